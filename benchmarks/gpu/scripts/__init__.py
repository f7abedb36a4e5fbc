"""Training scripts of jobs that checks launch."""
