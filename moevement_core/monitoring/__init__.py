"""Figures of a run for whoever watches it: one table of them, and an endpoint that serves them beside the job."""
