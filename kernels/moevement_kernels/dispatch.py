"""Assignment of a rank's tokens to replicas of experts (Lazarus, algorithm 1).

Replicas of experts are in *slots*, and every rank has the same number of slots. All replicas of an expert compute the
same number of tokens, or one more. So each rank has a capacity for each expert, which is the sum over its replicas of
the expert. First, a rank keeps as many of its own tokens as its capacity allows. It sends the rest to other ranks, in
proportion to their free capacity. Because tokens are whole, the numbers differ from this proportion by fewer tokens
than there are ranks. All functions run on the device of the routing map, and the host does not wait for the device.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from moevement_kernels.backend import has_kernels


class SlotTable(NamedTuple):
    """Slots of a layer in the order of ranks, as int64 tensors. There are S slots on N ranks."""

    expert: torch.Tensor
    """Expert in each of the S slots, ``[S]``."""
    rank: torch.Tensor
    """Rank on which each of the S slots is, ``[S]``."""
    ordinal: torch.Tensor
    """Index of each of the S slots among the slots with the same rank and expert, ``[S]``."""
    replicas: torch.Tensor
    """Number of replicas of each of E experts on each of N ranks, ``[E, N]``."""

    @staticmethod
    def of(slots: list[list[int]], experts: int, device: torch.device | str = "cpu") -> SlotTable:
        """Build a table from the experts in the slots of each rank.

        Args:
            slots: for each rank, the expert in each of its slots.
            experts: number of experts, E.
            device: device on which the tokens are.
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
    """Range of the tokens of one rank that each of S slots gets: first token and end, int64 ``[S]``.

    The tokens that one rank routes to one expert are numbered from 0, in the order of the batch.
    """

    begin: torch.Tensor
    end: torch.Tensor


def shares(tokens: torch.Tensor, table: SlotTable, rank: int) -> Shares:
    """Return the range of tokens that each slot gets from one rank. All ranks use the same ``tokens``.

    Args:
        tokens: tokens that each of N ranks routes to each of E experts, int64 ``[N, E]``.
        table: slots of the layer.
        rank: rank that sends the tokens.
    """
    routed = tokens.T
    room = _capacities(routed.sum(1), table.replicas)
    own = torch.minimum(room, routed)
    sent = _in_proportion(routed - own, room - own, rank)
    sent[:, rank] += own[:, rank]
    here = (table.expert, table.rank)
    each, more = sent[here] // table.replicas[here], sent[here] % table.replicas[here]
    begin = (sent.cumsum(1) - sent)[here] + table.ordinal * each + torch.minimum(table.ordinal, more)
    return Shares(begin, begin + each + (table.ordinal < more))


BLOCK = 1 << 20
"""Largest number of elements of an intermediate tensor in :func:`_in_proportion`."""


def _in_proportion(left: torch.Tensor, free: torch.Tensor, rank: int) -> torch.Tensor:
    """Return the number of tokens of each of E experts that one rank sends to each of N ranks, ``[E, N]``.

    The rank divides its tokens in proportion to ``free``, and rounds each part down. Rounding leaves tokens over at
    senders, and room at receivers. The first tokens left over fill the first room, both in the order of ranks. So ranks
    send every token, and no rank gets more than it can take. The sums over all pairs of ranks take E * N * N
    operations, in blocks of :data:`BLOCK` elements.

    Args:
        left: number of tokens of each expert that each rank cannot compute itself, ``[E, N]``.
        free: number of tokens of each expert that each rank can still take, ``[E, N]``. For each expert, the sum over
            ranks equals that of ``left``.
        rank: rank that sends the tokens.
    """
    total = left.sum(1, keepdim=True).clamp_min(1)
    sent_whole, got_whole = torch.zeros_like(left), torch.zeros_like(free)
    step = max(1, BLOCK // free.numel())
    for first in range(0, left.shape[1], step):
        whole = left[:, first : first + step, None] * free[:, None, :] // total[:, :, None]
        sent_whole[:, first : first + step] = whole.sum(2)
        got_whole += whole.sum(1)
    rest_end, room_end = (left - sent_whole).cumsum(1)[:, rank, None], (free - got_whole).cumsum(1)
    rest_begin, room_begin = rest_end - (left - sent_whole)[:, rank, None], room_end - (free - got_whole)
    rounded = (torch.minimum(rest_end, room_end) - torch.maximum(rest_begin, room_begin)).clamp_min(0)
    return left[:, rank, None] * free // total + rounded


def _capacities(routed: torch.Tensor, replicas: torch.Tensor) -> torch.Tensor:
    """Return how many tokens of each of E experts each of N ranks computes, ``[E, N]``.

    The replicas of an expert divide its tokens evenly. If a remainder is left, the first replicas compute one more.
    """
    ends = replicas.cumsum(1)
    every = ends[:, -1:].clamp_min(1)
    each, more = routed[:, None] // every, routed[:, None] % every
    return each * replicas + torch.minimum(ends, more) - torch.minimum(ends - replicas, more)


def to_slots(routing_map: torch.Tensor, table: SlotTable, shares_: Shares) -> torch.Tensor:
    """Return the map of T tokens to S slots, bool ``[T, S]``. A token gets one slot of each expert it is routed to.

    Args:
        routing_map: True where a token is routed to an expert, one of E, bool ``[T, E]``.
        table: slots of the layer.
        shares_: result of :func:`shares` for this rank.
    """
    if has_kernels(routing_map):
        from moevement_kernels.triton_dispatch import to_slots_kernel

        return to_slots_kernel(routing_map, table.expert, shares_.begin, shares_.end)
    return to_slots_reference(routing_map, table, shares_)


def to_slots_reference(routing_map: torch.Tensor, table: SlotTable, shares_: Shares) -> torch.Tensor:
    """Return the result of :func:`to_slots`, computed in plain torch; it specifies what the kernel computes."""
    place = (routing_map.cumsum(0) - 1)[:, table.expert]
    return routing_map[:, table.expert] & (place >= shares_.begin) & (place < shares_.end)
