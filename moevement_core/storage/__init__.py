"""Persisted windows on disk: written beside training, loadable by a new job."""
