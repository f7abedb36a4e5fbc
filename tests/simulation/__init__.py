"""Deterministic simulation of failures: a whole job, its own classes, one process, a simulated clock and network.

What is real is what ships: coordinator, leases, supervisors, members, sessions, checkpointers, replication, recovery.
What is simulated is what they stand on: time, threads, processes, nodes, connections, the store, collectives, and a
trainer of a few integers. ``python -m tests.simulation --seeds 1000`` runs so many jobs, each drawn from its seed.
"""
