"""Processes of a job on one or more hosts: code that starts, watches, suspends, replaces and ends them."""
