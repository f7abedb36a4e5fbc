"""Snapshots in host memory: format, buffers, copies from the device, and agreement on persisted runs."""
