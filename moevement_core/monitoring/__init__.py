"""Monitoring of a run: a reader of the run directory, and an endpoint from which Prometheus gets the run's metrics."""
