"""Compute weights that several ranks have alike: after a recovery they are compared, kept ones and replayed ones."""

from __future__ import annotations

import torch
import torch.distributed as dist

from megatron.moevement.optimizer.quantised import quantised_buffers
from megatron.moevement.runtime.live import Live
from moevement_core.session.binding import Replicas
from moevement_core.snapshot.whole import begin_whole


def replica_digests(live: Live) -> list[Replicas]:
    """Of this rank's compute weights, by the data-parallel group that has them alike, dense ones and experts.

    No communication; reads all compute weights and waits for the device. What was gathered is in it, so it also says
    whether a gather brought the same to all. Weights that tensor-parallel ranks have alike (norms, routers) are not
    compared across those.
    """
    from megatron.core import parallel_state

    dense = parallel_state.get_data_parallel_group(with_context_parallel=True)
    expert = parallel_state.get_expert_data_parallel_group()
    weights: dict[tuple[int, ...], list[torch.Tensor]] = {}
    for chunk in live.model or []:
        for parameter in chunk.parameters():
            group = dense if getattr(parameter, "allreduce", True) else expert
            quantised = quantised_buffers(parameter)
            stored = [parameter.data] if quantised is None else list(quantised.all.values())
            weights.setdefault(tuple(dist.get_process_group_ranks(group)), []).extend(stored)
    return [(ranks, begin_whole({"": tensors})()[""]) for ranks, tensors in weights.items() if len(ranks) > 1]
