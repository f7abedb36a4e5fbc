"""Sparse checkpoints of one rank: capture, lifetime and memory of snapshots, and their copies on peers."""
