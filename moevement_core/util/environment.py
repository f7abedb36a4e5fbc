"""Environment variables that a launcher sets for the processes of a job. The module is light to import."""

from __future__ import annotations

STORE_ENV = "MOEVEMENT_STORE"
"""Address of the job's store, ``host:port``; unset if ranks meet at MASTER_ADDR and MASTER_PORT."""
MEMBER_ENV = "MOEVEMENT_MEMBER"
"""Number of this member. Unset in a job without spares; such a job ends at the first failure."""
NODE_ENV = "MOEVEMENT_NODE"
"""Name of this process's node. If it is unset, the host name is the node's name."""
FIRST_TASK_ENV = "MOEVEMENT_FIRST_TASK"
"""Number of the first task on this process's node. Set if each node has a separate Slurm step, because the step numbers
only the tasks of that node."""
TASKS_ENV = "MOEVEMENT_TASKS"
"""Number of tasks on all nodes. Set together with :data:`FIRST_TASK_ENV`."""
START_ENV = "MOEVEMENT_START"
"""Start name, ``NODE/NUMBER``: the node, and how often the coordinator has started the node's command. All processes
that come from the same start of the command have the same start name."""
PARENT_ENV = "MOEVEMENT_PARENT"
"""Id of the process that started this one. This process ends when that process ends."""
