"""What the launcher tells a process about the job that it is to take part in; light to import."""

from __future__ import annotations

STORE_ENV = "MOEVEMENT_STORE"
"""``host:port`` of the launcher's store; unset where ranks meet at MASTER_ADDR and MASTER_PORT."""
MEMBER_ENV = "MOEVEMENT_MEMBER"
"""The number of this process in a job that goes on after failures; unset in one that ends with the first."""
NODE_ENV = "MOEVEMENT_NODE"
"""The node that this process is on; unset: its host."""

PARENT_ENV = "MOEVEMENT_PARENT"
"""The process that started this one, with which it ends."""
