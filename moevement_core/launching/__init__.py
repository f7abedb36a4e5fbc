"""Processes of a job on one or more hosts: code that starts, watches, replaces, fences and ends them."""
