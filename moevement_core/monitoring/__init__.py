"""Figures of a run for operators: the table that defines them, and an endpoint that serves them beside the job."""
