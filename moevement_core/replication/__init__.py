"""Copies of snapshots on peers: placement, transfer and acknowledgements."""
