"""Parity instead of copies: nodes outside a group of ranks keep combinations of the group's snapshots."""
