"""Parity instead of copies: nodes outside a group of ranks keep weighted sums of the group's snapshots."""
