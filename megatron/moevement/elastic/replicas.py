"""Sum of an expert's gradients over its replicas in slots, and norms that count each expert once.

The rank of an expert's first replica sums the gradients in the order of ranks and slots, and sends the sum to all
replicas. So all replicas of an expert have equal gradients, and two jobs with equal placements have equal bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron.moevement.elastic.recut import Shard
from megatron.moevement.elastic.slots import Table, slots
from megatron.moevement.optimizer.views import parts_of
from moevement_core.elastic.exchange import bring_pieces
from moevement_core.operators import expert_name
from moevement_core.trainer.recut import Recut

SHARED = "shared"
"""Attribute by which Megatron marks a parameter as a duplicate, so that norms count the parameter once."""


def finalize_with_replicas(original: Callable[..., Any], model: list[Any], *args: Any, **kwargs: Any) -> Any:
    """Reduce also the gradients of experts over their replicas, in place of ``finalize_model_grads``."""
    result = original(model, *args, **kwargs)
    if slots() is not None:
        reduce_gradients(model)
    return result


def slot_layers(chunks: Sequence[Any]) -> Iterator[Any]:
    """Yield the MoE layers of this rank that have slots.

    Args:
        chunks: this rank's virtual stages, with or without their wrappers.
    """
    for chunk in chunks:
        for module in chunk.modules():
            if hasattr(module, "token_dispatcher") and hasattr(module.token_dispatcher, "table"):
                yield module


def local_parameters(layer: Any) -> list[list[Any]]:
    """Return the parameters of each slot of this rank, in the same order for every slot."""
    return [list(expert.parameters()) for expert in layer.experts.local_experts]


@torch.no_grad()
def reduce_gradients(chunks: Sequence[Any]) -> None:
    """Sum the gradients of each expert over its replicas, after all other reductions of gradients.

    Collective over the ranks of the stage.

    Args:
        chunks: this rank's virtual stages.
    """
    expert_slots = slots()
    assert expert_slots is not None
    for layer in slot_layers(chunks):
        table = expert_slots.tables[layer.layer_number - 1]
        gradients = [
            [parameter.main_grad.view(-1) for parameter in parameters if parameter.requires_grad]
            for parameters in local_parameters(layer)
        ]
        _reduce(table, gradients, layer.ep_group)


def _reduce(table: Table, gradients: list[list[torch.Tensor]], group: Any) -> None:
    """Sum the gradients of one layer's experts over their replicas, in place.

    Args:
        table: expert in each slot of each rank.
        gradients: flat gradients of the parameters, by slot of this rank.
        group: expert-parallel group.
    """
    rank = dist.get_rank(group)
    owner = _first_slots(table)
    flat = [torch.cat(parts) for parts in gradients]
    if not flat[0].numel() or len(owner) == sum(map(len, table)):  # no expert has a second replica
        return
    away = [_slots_owned_by(table, owner, rank, target) for target in range(len(table))]
    here = [_slots_owned_by(table, owner, source, rank) for source in range(len(table))]
    received = _exchange(
        tensors=[flat[slot] for slots_ in away for slot in slots_],
        like=flat[0],
        sends=list(map(len, away)),
        receives=list(map(len, here)),
        group=group,
    )
    sums = {slot: flat[slot].clone() for holder, slot in owner.values() if holder == rank}
    arrived = iter(received)
    # Terms are added in the order of ranks and slots, so the sum is reproducible bit for bit.
    for source, row in enumerate(table):
        for slot, expert in enumerate(row):
            holder, first = owner[expert]
            if holder != rank or (source, slot) == owner[expert]:
                continue
            sums[first] += flat[slot] if source == rank else next(arrived)
    returned = [sums[owner[table[source][slot]][1]] for source, slots_ in enumerate(here) for slot in slots_]
    back = iter(
        _exchange(
            tensors=returned, like=flat[0], sends=list(map(len, here)), receives=list(map(len, away)), group=group
        )
    )
    for slot in (slot for of_rank in away for slot in of_rank):
        flat[slot] = next(back)
    for slot, expert in enumerate(table[rank]):
        holder, first = owner[expert]
        whole = sums[first] if holder == rank else flat[slot]
        begin = 0
        for part in gradients[slot]:
            part.copy_(whole[begin : begin + part.numel()])
            begin += part.numel()


def _first_slots(table: Table) -> dict[int, tuple[int, int]]:
    """Return the rank and slot of the first replica of each expert."""
    first: dict[int, tuple[int, int]] = {}
    for rank, row in enumerate(table):
        for slot, expert in enumerate(row):
            first.setdefault(expert, (rank, slot))
    return first


def _slots_owned_by(table: Table, owner: dict[int, tuple[int, int]], rank: int, target: int) -> list[int]:
    """Return the slots of ``rank`` whose expert has its first replica on rank ``target``; empty if they are equal."""
    if rank == target:
        return []
    return [slot for slot, expert in enumerate(table[rank]) if owner[expert][0] == target]


def _exchange(
    tensors: Sequence[torch.Tensor], like: torch.Tensor, sends: Sequence[int], receives: Sequence[int], group: Any
) -> list[torch.Tensor]:
    """Exchange flat tensors of the size of ``like`` between the ranks of a group.

    Args:
        tensors: tensors to send, in the order of their target ranks.
        like: tensor with the size and dtype of every sent tensor.
        sends: number of tensors for each rank.
        receives: number of tensors from each rank.
        group: expert-parallel group.

    Returns:
        The received tensors, in the order of their source ranks.
    """
    received = like.new_empty(sum(receives) * like.numel())
    sent = torch.cat([*tensors, like[:0]])
    dist.all_to_all_single(
        received, sent, [count * like.numel() for count in receives], [count * like.numel() for count in sends], group
    )
    return list(received.view(-1, like.numel()))


def mark_replicas(chunks: Sequence[Any], optimizer: Any) -> None:
    """Mark all replicas of an expert except the first as shared, so that Megatron leaves them out of norms.

    Args:
        chunks: this rank's virtual stages.
        optimizer: Megatron's optimizer.
    """
    expert_slots = slots()
    assert expert_slots is not None
    part_of = parts_of(optimizer)
    for layer in slot_layers(chunks):
        for slot, parameters in enumerate(local_parameters(layer)):
            is_shared = not expert_slots.is_first(layer.layer_number - 1, layer.ep_group.rank(), slot)
            for parameter in parameters:
                part = part_of(parameter)
                for tensor in (parameter, part.master if part is not None else None):
                    if tensor is not None:
                        setattr(tensor, SHARED, is_shared)


@torch.no_grad()
def equalize_replicas(recut: Recut) -> None:
    """Copy the state of each expert's first replica to the other replicas of the expert. Collective.

    Every rank calls it when the job starts, because Megatron may build or load the replicas of an expert with different
    state.

    Args:
        recut: division of this rank's state.
    """
    expert_slots, layout = slots(), recut.layout()
    assert expert_slots is not None
    own = Shard(*layout.shard).expert
    pieces = recut.pieces(layout)
    first = {
        expert_name(layer, expert)
        for layer, table in expert_slots.tables.items()
        for slot, expert in enumerate(table[own])
        if expert_slots.is_first(layer, own, slot)
    }
    experts = {expert_name(layer, expert) for layer in expert_slots.tables for expert in range(expert_slots.experts)}
    held = [piece for piece in pieces if piece.operator not in experts or piece.operator in first]
    bring_pieces(held, pieces, is_verified=True)
    recut.filled()
