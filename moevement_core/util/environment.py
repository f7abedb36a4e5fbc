"""Environment variables that a launcher sets for the processes of a job. The module is light to import."""

from __future__ import annotations

STORE_ENV = "MOEVEMENT_STORE"
"""Address of the job's store, ``host:port``; unset if ranks meet at MASTER_ADDR and MASTER_PORT."""
MEMBER_ENV = "MOEVEMENT_MEMBER"
"""Number of this member; unset in a job without spares, which ends with the first failure."""
NODE_ENV = "MOEVEMENT_NODE"
"""Name of the node of this process; unset: the name of its host."""
FIRST_TASK_ENV = "MOEVEMENT_FIRST_TASK"
"""Number of the first task on this process's node; unset: Slurm numbers the tasks of all nodes."""
TASKS_ENV = "MOEVEMENT_TASKS"
"""Number of tasks on all nodes, if Slurm only knows those of one node."""
START_ENV = "MOEVEMENT_START"
"""Name of the start of this node's command, ``NODE/NUMBER``, that this process belongs to."""
PARENT_ENV = "MOEVEMENT_PARENT"
"""Process id of the process that started this one, and with which this one ends."""
