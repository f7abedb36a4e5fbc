"""Makes snapshots that nobody has any more from parity and what is left of the group.

Each rank that has a part of the sum adds it to what comes from the one before, a piece at a time, so a snapshot comes
to its owner about as quickly as one that is sent from one rank to another, and no rank has more than its own part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from moevement_core.parity.field import add_product
from moevement_core.parity.store import GroupStore, Stripe, tensors_between
from moevement_core.recovery.places import Source, Sum, Term
from moevement_core.recovery.sums import Part, Summed
from moevement_core.replication.transport import Transport
from moevement_core.replication.wire import MESSAGE_BYTES, TO_OWNER, Kind, Message, checksum
from moevement_core.snapshot.buffer import Buffer
from moevement_core.snapshot.snapshot import Snapshot

PIECE = 4 << 20
"""Bytes that go from rank to rank at a time."""


def summed(store: GroupStore) -> Iterator[Summed]:
    """What a rank reports of the parity that it keeps."""
    for stripe in store.stripes():
        parts = tuple(
            Part(owner, header.state, header.schedule, header.contents, header.payload_bytes)
            for owner, header in sorted(stripe.members.items())
        )
        yield Summed(stripe.iteration, store.group.members, store.group.size, store.number, parts)


OpenSum = Callable[[int, int], tuple[GroupStore, Stripe] | None]
"""By the first member of the group and the iteration, a block of parity, leased; nothing if it is gone."""
Open = Callable[[Term, int], Snapshot | None]
"""A member's snapshot, checked; nothing if it is gone."""


def take_part(
    rank: int, owner: int, iteration: int, sum_: Sum, open_: Open, open_sum: OpenSum, transport: Transport
) -> None:
    """Add this rank's terms to what comes from the rank before, and send it on: to the next, or to the owner."""
    chain = sum_.chain
    before = chain[chain.index(rank) - 1] if rank != chain[0] else None
    after = chain[chain.index(rank) + 1] if rank != chain[-1] else owner
    leases: list[tuple[GroupStore, Stripe]] = []
    try:
        parts = [_open(term, iteration, open_, open_sum, leases) for term in sum_.terms if term.rank == rank]
        is_here = all(part is not None for part in parts)
        if after == owner:  # whose header is wanted; the sum may have been begun without it meanwhile
            is_here &= bool(leases) and owner in leases[-1][1].members
        comes = before is None or _receive(transport, before).kind is Kind.GO
        if not (is_here and comes):
            transport.send(after, TO_OWNER, Message(Kind.REFUSED, rank, iteration).encode())
            if before is not None and comes:
                _let_pass(transport, before, sum_.nbytes)
            return
        if after == owner:
            encoded = torch.frombuffer(bytearray(leases[-1][1].headers[owner].encode()), dtype=torch.uint8)
            announced = Message(
                Kind.SNAPSHOT, rank, iteration, encoded.numel(), sum_.nbytes, check=checksum(encoded)
            )  # fmt: skip
            transport.send(after, TO_OWNER, announced.encode())
            transport.send(after, TO_OWNER, encoded)
        else:
            transport.send(after, TO_OWNER, Message(Kind.GO, rank, iteration).encode())
        _add([part for part in parts if part is not None], sum_.nbytes, before, after, transport)
    finally:
        for store, stripe in leases:
            store.give_back(stripe)


def _add(parts: Sequence[_Added], nbytes: int, before: int | None, after: int, transport: Transport) -> None:
    """Piece by piece what comes from ``before``, or nothing, and this rank's parts, on to ``after``."""
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
"""A coefficient, and what gives the bytes between two places of the sum: where, and the bytes."""


def _open(
    term: Term, iteration: int, open_: Open, open_sum: OpenSum, leases: list[tuple[GroupStore, Stripe]]
) -> _Added | None:
    if term.source is Source.PARITY:
        if (found := open_sum(term.owner, iteration)) is None:
            return None
        leases.append(found)
        total = found[1].total
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
    """What comes and is of no use."""
    piece = torch.empty(min(PIECE, nbytes), dtype=torch.uint8)
    for start in range(0, nbytes, PIECE):
        transport.receive(peer, TO_OWNER, piece[: min(PIECE, nbytes - start)])


def _receive(transport: Transport, peer: int) -> Message:
    data = torch.empty(MESSAGE_BYTES, dtype=torch.uint8)
    transport.receive(peer, TO_OWNER, data)
    return Message.decode(data)
