"""Connections between the processes of a job, and typed messages over them."""
