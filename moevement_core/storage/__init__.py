"""Persisted windows on disk, which ranks write beside training and a new job can load."""
