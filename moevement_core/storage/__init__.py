"""Windows of snapshots on disk, which ranks write while training runs and which a new job can load."""
