"""Creation of all communicators of this rank at the start of a generation, rather than at their first use."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_object_coll_device

from moevement_core.device import current_device
from moevement_core.restart import injection
from moevement_core.restart.faults import Phase
from moevement_core.restart.generation import connecting, generation


def make_communicators(pipelines: Iterable[Any] = ()) -> int:
    """Use each process group of this rank once; every rank of the job calls this when its groups are made.

    NCCL makes a communicator at the first use of a group, in a call that waits for all ranks of the group. If the first
    use came in a replay, a further failure could interrupt it while state is half replaced. When this function runs, no
    state has changed yet. Each rank uses its groups in the order in which it made them; all ranks make groups in the
    same order. Gloo needs no such call, because it connects a group when the group is made.

    Args:
        pipelines: pipeline groups, in which neighbouring ranks send to each other, and so do the first and the last
            rank. NCCL makes a further communicator for each such pair.

    Returns:
        The number of groups and pairs that were used.
    """
    if (now := generation()) is not None and now.roster.generation > 0:
        injection.at(Phase.COMMUNICATORS)
    device, used = current_device(), 0
    with connecting():
        for group in list(dist.distributed_c10d._world.pg_map):
            if dist.get_world_size(group) > 1:
                dist.all_reduce(_token(group), group=group)
                device.synchronize()
                used += 1
        for group in pipelines:
            used += _connect_neighbours(group)
            device.synchronize()
    return used


def neighbours(ranks: int) -> list[tuple[int, int]]:
    """Return all pairs of neighbours in a ring, in an order in which the ranks cannot deadlock.

    ``neighbours(4)`` is ``[(0, 1), (2, 3), (1, 2), (0, 3)]``.
    """
    chain = [(rank, rank + 1) for first in (0, 1) for rank in range(first, ranks - 1, 2)]
    return chain + ([(0, ranks - 1)] if ranks > 2 else [])


def _connect_neighbours(group: Any) -> int:
    ranks, rank, used = dist.get_process_group_ranks(group), dist.get_rank(group), 0
    for pair in neighbours(len(ranks)):
        if rank in pair:
            _pass_token(group, [ranks[place] for place in pair], is_first=rank == pair[0])
            used += 1
    return used


def _pass_token(group: Any, pair: Sequence[int], *, is_first: bool) -> None:
    if is_first:
        dist.send(_token(group), pair[1], group=group)
    else:
        dist.recv(_token(group), pair[0], group=group)


def _token(group: Any) -> torch.Tensor:
    return torch.ones(1, device=_get_object_coll_device(group))
