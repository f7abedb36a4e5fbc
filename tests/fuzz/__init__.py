"""Attacks on a running job by an unauthenticated peer, which reaches all sockets of the job but has no token."""
