"""Snapshots in host memory: what one holds, how it gets there, how long it lives."""
