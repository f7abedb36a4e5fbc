"""Environment variables that a launcher sets for the processes of a job.

This module imports nothing, so that every other module can import it.
"""

from __future__ import annotations

STORE_ENV = "MOEVEMENT_STORE"
"""Address, ``host:port``, at which a process meets the others of its job. In a supervisor's environment it is that of
the coordinator. In a rank's it is that of the store of torch's process groups; unset if ranks meet at MASTER_ADDR and
MASTER_PORT."""
SUPERVISOR_ENV = "MOEVEMENT_SUPERVISOR"
"""Address of the Unix socket of this process's supervisor, through which the process reaches the coordinator."""
MEMBER_ENV = "MOEVEMENT_MEMBER"
"""Number of this process among all members of the job (ranks and spares). Unset in a job without spares, which ends at
the first failure."""
NODE_ENV = "MOEVEMENT_NODE"
"""Name of this process's node. If it is unset, the host name is the node's name."""
FIRST_TASK_ENV = "MOEVEMENT_FIRST_TASK"
"""Number, in the whole job, of the first task on this process's node. The coordinator or the batch script sets it if
each node has a separate Slurm step, because Slurm counts the tasks of each step from 0."""
TASKS_ENV = "MOEVEMENT_TASKS"
"""Number of tasks on all nodes of the job together. Set together with :data:`FIRST_TASK_ENV`."""
START_ENV = "MOEVEMENT_START"
"""Name of a start, ``NODE/NUMBER``: the node, and how often the coordinator has started the node's command. The name
tells the processes of this start from those of an earlier start on the same node."""
REQUEUE_ENV = "MOEVEMENT_REQUEUE"
"""Permission of the job's processes, if the value is 1, to queue or end the Slurm job when its batch script is lost."""
PARENT_ENV = "MOEVEMENT_PARENT"
"""Id of the process that started this one. This process ends when that process ends."""
MEGATRON_ENV = "MOEVEMENT_MEGATRON"
"""Folder of the checkout of Megatron-LM with which the job trains; unset if it trains with the installed packages."""
