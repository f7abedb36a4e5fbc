"""Digests of compute weights that several ranks hold; a recovery compares survivors with ranks that replayed."""

from __future__ import annotations

import torch
import torch.distributed as dist

from megatron.moevement.elastic.replicas import local_parameters, slot_layers
from megatron.moevement.elastic.slots import slots
from megatron.moevement.optimizer.quantised import quantised_buffers
from megatron.moevement.runtime.live import Live
from moevement_core.snapshot.whole import begin_whole
from moevement_core.trainer.capabilities import Replicas


def replica_digests(live: Live) -> list[Replicas]:
    """Return digests of this rank's compute weights: of dense weights, of its experts together, and of single experts.

    A single expert has a digest only if expert slots hold several replicas of it. Each digest comes with the
    data-parallel ranks that must have an equal digest. The function does not communicate. It reads all compute weights
    and waits for the device. With the distributed optimizer, weights come from a gather, so the digests also show
    whether the gather gave all ranks equal weights. Weights of tensor-parallel ranks are not compared, although those
    of norms and routers are equal.
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
    alike = [("", ranks, begin_whole({"": tensors})()[""]) for ranks, tensors in weights.items() if len(ranks) > 1]
    return alike + _experts_in_slots(live)


def _experts_in_slots(live: Live) -> list[Replicas]:
    """Return a digest of each expert on this rank that is in more than one slot; empty without expert slots."""
    digests: list[Replicas] = []
    if (expert_slots := slots()) is None:
        return digests
    for layer in slot_layers(live.model or []):
        table, own = expert_slots.tables[layer.layer_number - 1], layer.ep_group.rank()
        ranks = dist.get_process_group_ranks(layer.ep_group)
        for expert, parameters in zip(table[own], local_parameters(layer), strict=True):
            replicas = tuple(ranks[rank] for rank, of_rank in enumerate(table) for other in of_rank if other == expert)
            if len(replicas) > 1:
                digest = begin_whole({"": [parameter.data for parameter in parameters]})()[""]
                digests.append((f"expert {expert} of layer {layer.layer_number - 1}", replicas, digest))
    return digests
