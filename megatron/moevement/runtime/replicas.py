"""Compute weights that several ranks have alike: after a recovery they are compared, kept ones and replayed ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from megatron.moevement.runtime.job import Job
from moevement_core.snapshot.whole import begin_whole

Replicas = tuple[tuple[int, ...], str]
"""Ranks that have the same compute weights, and a digest of those of one of them."""


def replica_digests(job: Job) -> list[Replicas]:
    """Of this rank's compute weights, by the data-parallel group that has them alike, dense ones and experts.

    No communication; reads all compute weights and waits for the device. What was gathered is in it, so it also says
    whether a gather brought the same to all. Weights that tensor-parallel ranks have alike (norms, routers) are not
    compared across those.
    """
    from megatron.core import parallel_state

    dense = parallel_state.get_data_parallel_group(with_context_parallel=True)
    expert = parallel_state.get_expert_data_parallel_group()
    weights: dict[tuple[int, ...], list[torch.Tensor]] = {}
    for chunk in job.model or []:
        for parameter in chunk.parameters():
            group = dense if getattr(parameter, "allreduce", True) else expert
            weights.setdefault(tuple(dist.get_process_group_ranks(group)), []).append(parameter.data)
    return [(ranks, begin_whole({"": tensors})()[""]) for ranks, tensors in weights.items() if len(ranks) > 1]


def unequal_replicas(everyones: Sequence[Sequence[Replicas]]) -> list[str]:
    """In words, the groups whose ranks do not have the same.

    Args:
        everyones: what :func:`replica_digests` gave, of every rank.
    """
    digests: dict[tuple[int, ...], set[str]] = {}
    for its in everyones:
        for ranks, digest in its:
            digests.setdefault(ranks, set()).add(digest)
    return [
        f"compute weights of ranks {', '.join(map(str, ranks))}, which have the same ones"
        for ranks, distinct in digests.items()
        if len(distinct) > 1
    ]
