"""Rendezvous: how processes join a job, get ranks and report deaths, at the start of the job and after each failure."""
