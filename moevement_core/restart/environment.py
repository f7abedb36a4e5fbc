"""Environment variables by which the launcher describes a job to its processes; light to import."""

from __future__ import annotations

STORE_ENV = "MOEVEMENT_STORE"
"""``host:port`` of the launcher's store; unset where ranks meet at MASTER_ADDR and MASTER_PORT."""
MEMBER_ENV = "MOEVEMENT_MEMBER"
"""The number of this process in a job that goes on after failures; unset in one that ends with the first."""
NODE_ENV = "MOEVEMENT_NODE"
"""The node that this process is on; unset: its host."""
FIRST_TASK_ENV = "MOEVEMENT_FIRST_TASK"
"""The number of the first task of the node that this process was started on; unset: Slurm numbers them."""
TASKS_ENV = "MOEVEMENT_TASKS"
"""Tasks on all nodes, where Slurm only knows those of one."""
START_ENV = "MOEVEMENT_START"
"""Which start of the tasks of its node this process is of."""
PARENT_ENV = "MOEVEMENT_PARENT"
"""The process that started this one, with which it ends."""
