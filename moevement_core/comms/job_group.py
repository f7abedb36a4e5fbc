"""Group of all ranks of the job, for exchanges in host memory outside training.

A process has one such group in each generation (the time between two failures). The group belongs to torch's default
process group: whoever makes a new default group gets a new group of the job.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from moevement_core.comms.address import own_address
from moevement_core.comms.codec import decode, encode
from moevement_core.comms.connections import Address, Connections
from moevement_core.comms.tree import TreeGroup, neighbours

KEY = "moevement/address/{}"
"""Key of the address of a rank in the store of torch's default process group."""

_made: tuple[Any, TreeGroup, Connections | None] | None = None


def job_group() -> TreeGroup:
    """Return the group of all ranks, and make it at the first call after torch's default group was made. Collective.

    A rank puts its address into the store of the default group, and reads the addresses of its neighbours in the tree.
    So the store carries O(N) values in all, and a rank reads at most five.

    Raises:
        ConfigError: this host has no address on the interface that the environment names.
    """
    global _made
    default = dist.group.WORLD
    if _made is None or _made[0] is not default:
        forget_job_group()
        _made = (default, *_make(dist.get_rank(), dist.get_world_size()))
    return _made[1]


def forget_job_group() -> None:
    """Close the connections of the group, if this process has one. Called after the default group was destroyed."""
    global _made
    if _made is not None:
        _, group, connections = _made
        _made = None
        group.close()
        if connections is not None:
            connections.close()


def _make(rank: int, world: int) -> tuple[TreeGroup, Connections | None]:
    if world == 1:
        return TreeGroup([rank], rank, None), None
    store: Any = dist.distributed_c10d._get_default_store()
    connections = Connections(own_address())
    store.set(KEY.format(rank), encode(connections.address))
    parent, children = neighbours(rank, world)
    peers = [*children, *([parent] if parent is not None else [])]
    connections.open(rank, {peer: decode(store.get(KEY.format(peer)), Address) for peer in peers})
    return TreeGroup(range(world), rank, connections.channel("job")), connections
