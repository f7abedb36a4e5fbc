"""Assignment of a rank's tokens to replicas of experts (Lazarus, algorithm 1).

Replicas of experts are in *slots*, and every rank has the same number of slots. The tokens of an expert are divided
evenly among all replicas, up to a remainder. Tokens go to replicas on their own rank first. All functions run on the
device of the routing map, and the host does not wait for the device.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from moevement_kernels.backend import has_kernels


class SlotTable(NamedTuple):
    """Slots of a layer in the order of ranks, as int64 tensors. There are S slots on N ranks."""

    expert: torch.Tensor
    """Expert in each slot, ``[S]``."""
    rank: torch.Tensor
    """Rank of each slot, ``[S]``."""
    ordinal: torch.Tensor
    """Index of each slot among the slots with the same rank and expert, ``[S]``."""
    replicas: torch.Tensor
    """Replicas of each expert on each rank, ``[E, N]``."""

    @staticmethod
    def of(slots: list[list[int]], experts: int, device: torch.device | str = "cpu") -> SlotTable:
        """Build a table from the experts in the slots of each rank.

        Args:
            slots: expert in each slot, by rank.
            experts: number of experts, E.
            device: device of the tokens.
        """
        replicas = torch.zeros(experts, len(slots), dtype=torch.int64)
        ordinal = []
        for rank, row in enumerate(slots):
            for expert in row:
                ordinal.append(int(replicas[expert, rank]))
                replicas[expert, rank] += 1
        tensors = (
            torch.tensor([expert for row in slots for expert in row]),
            torch.arange(len(slots)).repeat_interleave(len(slots[0])),
            torch.tensor(ordinal),
            replicas,
        )
        return SlotTable(*(tensor.to(device) for tensor in tensors))


class Shares(NamedTuple):
    """Range of tokens that each slot gets, int64 ``[S]``.

    The tokens that one rank routes to one expert are numbered from 0, in the order of the batch.
    """

    begin: torch.Tensor
    end: torch.Tensor


def shares(tokens: torch.Tensor, table: SlotTable, rank: int) -> Shares:
    """Return the range of tokens that each slot gets from one rank. All ranks use the same ``tokens``.

    Args:
        tokens: tokens routed to each expert on each rank, int64 ``[N, E]``.
        table: slots of the layer.
        rank: rank that sends the tokens.
    """
    routed = tokens.T
    room = _capacities(routed.sum(1), table.replicas)
    own = torch.minimum(room, routed)
    left, free = routed - own, room - own
    left_end, free_end = left.cumsum(1)[:, rank, None], free.cumsum(1)
    left_begin, free_begin = left_end - left[:, rank, None], free_end - free
    sent = (torch.minimum(left_end, free_end) - torch.maximum(left_begin, free_begin)).clamp_min(0)
    sent[:, rank] += own[:, rank]
    here = (table.expert, table.rank)
    each, more = sent[here] // table.replicas[here], sent[here] % table.replicas[here]
    begin = (sent.cumsum(1) - sent)[here] + table.ordinal * each + torch.minimum(table.ordinal, more)
    return Shares(begin, begin + each + (table.ordinal < more))


def _capacities(routed: torch.Tensor, replicas: torch.Tensor) -> torch.Tensor:
    """Return how many tokens of each expert each rank computes, ``[E, N]``. The first replicas get the remainder."""
    ends = replicas.cumsum(1)
    every = ends[:, -1:].clamp_min(1)
    each, more = routed[:, None] // every, routed[:, None] % every
    return each * replicas + torch.minimum(ends, more) - torch.minimum(ends - replicas, more)


def to_slots(routing_map: torch.Tensor, table: SlotTable, shares_: Shares) -> torch.Tensor:
    """Return the map of tokens to slots, bool ``[T, S]``. A token gets one slot of each expert that it is routed to.

    Args:
        routing_map: bool ``[T, E]``.
        table: slots of the layer.
        shares_: shares of this rank.
    """
    if has_kernels(routing_map):
        from moevement_kernels.triton_dispatch import to_slots_kernel

        return to_slots_kernel(routing_map, table.expert, shares_.begin, shares_.end)
    return to_slots_reference(routing_map, table, shares_)


def to_slots_reference(routing_map: torch.Tensor, table: SlotTable, shares_: Shares) -> torch.Tensor:
    """Compute :func:`to_slots` in torch."""
    place = (routing_map.cumsum(0) - 1)[:, table.expert]
    return routing_map[:, table.expert] & (place >= shares_.begin) & (place < shares_.end)
