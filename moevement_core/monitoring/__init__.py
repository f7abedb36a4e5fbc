"""Monitoring of a run: reader of the run directory, and endpoint that serves the run's figures beside the job."""
