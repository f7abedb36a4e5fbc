"""Processes of a job: started, watched, replaced, fenced, and asked to end. On one host, or on several."""
