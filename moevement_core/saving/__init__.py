"""Saving of one rank's snapshots in every iteration, and of windows on disk."""
