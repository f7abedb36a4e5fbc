"""Replicas of an expert: the same gradient in all of them, and each counted once in a norm.

Their gradients are summed by the rank of the first replica, in the order of ranks and slots, and the sum goes back to
all of them: the same bits everywhere, and in every run with the same placement.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron.moevement.elastic.slots import Table, slots
from megatron.moevement.optimizer.views import parts_of

SHARED = "shared"
"""Megatron's attribute of a parameter that another one has the norm of."""


def reducing_replicas(original: Callable[..., Any]) -> Callable[..., Any]:
    """``finalize_model_grads`` that also reduces the gradients of experts over their replicas."""

    @functools.wraps(original)
    def finalize_model_grads(model: list[Any], *args: Any, **kwargs: Any) -> Any:
        result = original(model, *args, **kwargs)
        if slots() is not None:
            reduce_gradients(model)
        return result

    return finalize_model_grads


def slot_layers(chunks: Sequence[Any]) -> Iterator[Any]:
    """The MoE layers of this rank that have slots.

    Args:
        chunks: this rank's virtual stages, in their wrappers or without.
    """
    for chunk in chunks:
        for module in chunk.modules():
            if hasattr(module, "token_dispatcher") and hasattr(module.token_dispatcher, "table"):
                yield module


def local_parameters(layer: Any) -> list[list[Any]]:
    """Return the parameters of each of this rank's slots, in one order."""
    return [list(expert.parameters()) for expert in layer.experts.local_experts]


@torch.no_grad()
def reduce_gradients(chunks: Sequence[Any]) -> None:
    """Sum the gradients of experts over their replicas; every rank of the stage calls it, after all other reductions.

    Args:
        chunks: this rank's virtual stages.
    """
    its = slots()
    assert its is not None
    for layer in slot_layers(chunks):
        table = its.tables[layer.layer_number - 1]
        gradients = [
            [one.main_grad.view(-1) for one in parameters if one.requires_grad]
            for parameters in local_parameters(layer)
        ]
        _reduce(table, gradients, layer.ep_group)


def _reduce(table: Table, gradients: list[list[torch.Tensor]], group: Any) -> None:
    """Reduce the gradients of one layer."""
    rank = dist.get_rank(group)
    owner = _first_slots(table)
    flat = [torch.cat(parts) for parts in gradients]
    if not flat[0].numel() or all(count == 1 for count in _counts(table).values()):
        return
    away = [_slots_owned_by(table, owner, rank, target) for target in range(len(table))]
    here = [_slots_owned_by(table, owner, source, rank) for source in range(len(table))]
    received = _exchange(
        [flat[slot] for its in away for slot in its], flat[0], list(map(len, away)), list(map(len, here)), group
    )
    sums = {slot: flat[slot].clone() for where, slot in owner.values() if where == rank}
    arrived = iter(received)
    for source, its in enumerate(table):  # ranks and slots in their order, whoever holds them
        for slot, expert in enumerate(its):
            where, first = owner[expert]
            if where != rank or (source, slot) == owner[expert]:
                continue
            sums[first] += flat[slot] if source == rank else next(arrived)
    returned = [sums[owner[table[source][slot]][1]] for source, its in enumerate(here) for slot in its]
    back = iter(_exchange(returned, flat[0], list(map(len, here)), list(map(len, away)), group))
    for slot in (slot for of_rank in away for slot in of_rank):
        flat[slot] = next(back)
    for slot, expert in enumerate(table[rank]):
        where, first = owner[expert]
        whole = sums[first] if where == rank else flat[slot]
        begin = 0
        for part in gradients[slot]:
            part.copy_(whole[begin : begin + part.numel()])
            begin += part.numel()


def _counts(table: Table) -> dict[int, int]:
    counts: dict[int, int] = {}
    for its in table:
        for expert in its:
            counts[expert] = counts.get(expert, 0) + 1
    return counts


def _first_slots(table: Table) -> dict[int, tuple[int, int]]:
    """Rank and slot of the first replica of each expert."""
    first: dict[int, tuple[int, int]] = {}
    for rank, its in enumerate(table):
        for slot, expert in enumerate(its):
            first.setdefault(expert, (rank, slot))
    return first


def _slots_owned_by(table: Table, owner: dict[int, tuple[int, int]], rank: int, target: int) -> list[int]:
    """Slots of ``rank`` whose expert's first replica is on ``target``, another rank."""
    if rank == target:
        return []
    return [slot for slot, expert in enumerate(table[rank]) if owner[expert][0] == target]


def _exchange(
    tensors: Sequence[torch.Tensor], like: torch.Tensor, sends: Sequence[int], receives: Sequence[int], group: Any
) -> list[torch.Tensor]:
    """Flat tensors of one size, that of ``like``: so many to each rank, for so many from each."""
    received = like.new_empty(sum(receives) * like.numel())
    sent = torch.cat([*tensors, like[:0]])
    dist.all_to_all_single(
        received, sent, [count * like.numel() for count in receives], [count * like.numel() for count in sends], group
    )
    return list(received.view(-1, like.numel()))


def mark_replicas(chunks: Sequence[Any], optimizer: Any) -> None:
    """Have each expert counted once in norms: Megatron passes over what is marked as shared, as replicas are but the
    first.

    Args:
        chunks: this rank's virtual stages.
        optimizer: Megatron's.
    """
    its = slots()
    assert its is not None
    part_of = parts_of(optimizer)
    for layer in slot_layers(chunks):
        for slot, parameters in enumerate(local_parameters(layer)):
            is_shared = not its.is_first(layer.layer_number - 1, layer.ep_group.rank(), slot)
            for parameter in parameters:
                part = part_of(parameter)
                for tensor in (parameter, part.master if part is not None else None):
                    if tensor is not None:
                        setattr(tensor, SHARED, is_shared)
