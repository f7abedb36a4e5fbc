"""Computation of lost snapshots from parity and the remaining snapshots of a group, by a chain of ranks.

The snapshot passes along the chain in pieces. Each rank adds its own terms to a piece, and sends the sum to the next
rank. So the owner receives its snapshot about as quickly as from a single rank, and no rank needs the terms of others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from moevement_core.comms.transport import Transport
from moevement_core.recovery.holdings import Source, Sum, SumTerm
from moevement_core.recovery.sums import Summed, SumPart
from moevement_core.replication.parity.field import add_product
from moevement_core.replication.parity.store import GroupStore, Stripe, tensors_between
from moevement_core.replication.wire import MESSAGE_BYTES, TO_OWNER, Message, MessageKind, checksum
from moevement_core.snapshot.buffer import Buffer
from moevement_core.snapshot.snapshot import Snapshot

PIECE = 4 << 20
"""Bytes that a rank sends to the next rank at a time."""


def summed(store: GroupStore) -> Iterator[Summed]:
    """Yield a description of each block of parity in ``store``."""
    for stripe in store.stripes():
        parts = tuple(
            SumPart(
                owner,
                state=header.state,
                schedule=header.schedule,
                contents=header.contents,
                nbytes=header.payload_bytes,
            )
            for owner, header in sorted(stripe.members.items())
        )
        yield Summed(
            iteration=stripe.iteration,
            members=store.group.members,
            size=store.group.size,
            number=store.number,
            parts=parts,
        )


OpenSum = Callable[[int, int], tuple[GroupStore, Stripe] | None]
"""Function that returns a block of parity, given the first member of its group, and its iteration.

The block stays in memory until ``GroupStore.end_reading``. The function returns None if the block was freed.
"""
Open = Callable[[SumTerm, int], Snapshot | None]
"""Function that checks and returns the snapshot of one group member; None if it was freed or is damaged."""


def take_part(
    rank: int, owner: int, iteration: int, sum_: Sum, open_: Open, open_sum: OpenSum, transport: Transport
) -> None:
    """Add this rank's terms to the sum from the previous rank, and send the sum to the next rank, or to the owner.

    If a term is missing, the rank sends a refusal instead, and so do all later ranks of the chain.

    Args:
        rank: this rank, which is in the chain of the sum.
        owner: rank whose snapshot is computed.
        iteration: iteration of the snapshot.
        sum_: sum whose result is the snapshot.
        open_: returns snapshots of members that this rank holds.
        open_sum: returns blocks of parity that this rank holds.
        transport: connection between ranks.
    """
    chain = sum_.chain
    before = chain[chain.index(rank) - 1] if rank != chain[0] else None
    after = chain[chain.index(rank) + 1] if rank != chain[-1] else owner
    leases: list[tuple[GroupStore, Stripe]] = []
    try:
        parts = [
            _open(term, iteration, open_=open_, open_sum=open_sum, leases=leases)
            for term in sum_.terms
            if term.rank == rank
        ]
        is_here = all(part is not None for part in parts)
        if after == owner:  # The group may have begun this block anew since the report, without the owner's header.
            is_here &= bool(leases) and owner in leases[-1][1].members
        comes = before is None or _receive(transport, before).kind is MessageKind.GO
        if not (is_here and comes):
            transport.send(after, TO_OWNER, Message(MessageKind.REFUSED, rank, iteration).encode())
            if before is not None and comes:
                _let_pass(transport, before, sum_.nbytes)
            return
        if after == owner:
            encoded = torch.frombuffer(bytearray(leases[-1][1].headers[owner].encode()), dtype=torch.uint8)
            announced = Message(
                kind=MessageKind.SNAPSHOT, rank=rank, iteration=iteration, header_bytes=encoded.numel(),
                payload_bytes=sum_.nbytes, check=checksum(encoded),
            )  # fmt: skip
            transport.send(after, TO_OWNER, announced.encode())
            transport.send(after, TO_OWNER, encoded)
        else:
            transport.send(after, TO_OWNER, Message(MessageKind.GO, rank, iteration).encode())
        _add(
            parts=[part for part in parts if part is not None],
            nbytes=sum_.nbytes,
            before=before,
            after=after,
            transport=transport,
        )
    finally:
        for store, stripe in leases:
            store.end_reading(stripe)


def _add(parts: Sequence[_Added], nbytes: int, before: int | None, after: int, transport: Transport) -> None:
    """Add this rank's ``parts`` to the pieces from ``before``, or to zeros if that rank is None, and send the sums."""
    total = torch.empty(min(PIECE, nbytes), dtype=torch.uint8)
    for start in range(0, nbytes, PIECE):
        piece = total[: min(PIECE, nbytes - start)]
        if before is None:
            piece.zero_()
        else:
            transport.receive(before, TO_OWNER, piece)
        for coefficient, between in parts:
            for at, values in between(start, start + piece.numel()):
                target = piece[at - start : at - start + values.numel()].numpy()
                add_product(target, coefficient, np.ascontiguousarray(values.numpy()))
        transport.send(after, TO_OWNER, piece)


_Added = tuple[int, Callable[[int, int], Iterator[tuple[int, torch.Tensor]]]]
"""Coefficient, and function that yields the bytes between two offsets, in pieces with their offsets."""


def _open(
    term: SumTerm, iteration: int, open_: Open, open_sum: OpenSum, leases: list[tuple[GroupStore, Stripe]]
) -> _Added | None:
    if term.source is Source.PARITY:
        if (leased := open_sum(term.owner, iteration)) is None:
            return None
        leases.append(leased)
        total = leased[1].total
        return term.coefficient, lambda start, end: _between(total, start, min(end, total.nbytes))
    snapshot = open_(term, iteration)
    if snapshot is None:
        return None
    header, _ = snapshot.packed()
    return term.coefficient, lambda start, end: tensors_between(snapshot, header, start, end)


def _between(total: Buffer, start: int, end: int) -> Iterator[tuple[int, torch.Tensor]]:
    for piece in total.pieces(start, end - start) if start < end else ():
        yield start, piece
        start += piece.numel()


def _let_pass(transport: Transport, peer: int, nbytes: int) -> None:
    """Receive and discard the pieces that ``peer`` sends."""
    piece = torch.empty(min(PIECE, nbytes), dtype=torch.uint8)
    for start in range(0, nbytes, PIECE):
        transport.receive(peer, TO_OWNER, piece[: min(PIECE, nbytes - start)])


def _receive(transport: Transport, peer: int) -> Message:
    data = torch.empty(MESSAGE_BYTES, dtype=torch.uint8)
    transport.receive(peer, TO_OWNER, data)
    return Message.decode(data)
