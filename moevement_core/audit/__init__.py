"""Audits of a healthy job: a stage executes an iteration twice, and ranks compare what both executions computed."""
