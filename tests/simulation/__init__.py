"""Deterministic simulation of failures: a whole job in one process, on a simulated clock and network.

The classes that ship run here: coordinator, leases, supervisors, members, sessions, checkpointers, replication and
recovery. Simulated are time, threads, processes, nodes, connections, the store, collectives, and a trainer of a few
integers. ``python -m tests.simulation --seeds 1000`` runs 1000 jobs, each drawn from its seed.
"""
