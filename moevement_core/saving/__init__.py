"""Saving of one rank in an iteration, and its windows on disk."""
