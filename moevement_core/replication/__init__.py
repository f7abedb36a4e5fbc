"""Copies of snapshots on peers: where they go, how they travel, who has acknowledged what."""
