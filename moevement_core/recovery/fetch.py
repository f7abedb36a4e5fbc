"""Carries out the fetches of a plan: every rank gets its own snapshots, from its memory, a peer's, or a file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from moevement_core import damage
from moevement_core.errors import SnapshotError
from moevement_core.recovery.places import Fetch, Source
from moevement_core.recovery.plan import RecoveryPlan
from moevement_core.recovery.take_part import OpenSum, take_part
from moevement_core.replication.transport import Transport
from moevement_core.replication.wire import MESSAGE_BYTES, TO_OWNER, Kind, Message, checksum
from moevement_core.snapshot.buffer import Buffer
from moevement_core.snapshot.snapshot import Header, Snapshot

Open = Callable[[Source, int, int], Snapshot | None]
"""A snapshot that this rank said it has, by source, owner and iteration; nothing if it is gone meanwhile."""


def fetch(
    rank: int, plan: RecoveryPlan, open_: Open, transport: Transport | None, open_sum: OpenSum = lambda *which: None
) -> dict[int, Snapshot | Fetch]:
    """Every rank of the job calls it with the same plan.

    Args:
        rank: this one.
        plan: whose fetches are carried out.
        open_: gives snapshots that this rank has.
        transport: between ranks.
        open_sum: gives parity that this rank has.

    Returns:
        Of each iteration of the plan this rank's snapshot, checked; or, if it could not be had there, the fetch.
    """
    fetched: dict[int, Snapshot | Fetch] = {}
    for one in plan.fetches:
        if one.sum is not None:
            assert transport is not None, "other ranks have the rest"
            if rank in one.sum.chain:
                take_part(
                    rank, one.owner, one.iteration, one.sum,
                    lambda term, iteration: _checked(
                        open_(term.source, term.owner, iteration), Fetch(term.owner, iteration, rank, term.source)
                    ),
                    open_sum, transport,
                )  # fmt: skip
            if rank == one.owner:
                fetched[one.iteration] = _receive(one, transport)
            continue
        if rank not in (one.owner, one.holder):
            continue
        snapshot = _checked(open_(one.source, one.owner, one.iteration), one) if rank == one.holder else None
        if one.owner != one.holder:
            assert transport is not None, "another rank has it, so there are others"
            if rank == one.holder:
                _send(rank, one, snapshot, transport)
                continue
            fetched[one.iteration] = _receive(one, transport)
            continue
        fetched[one.iteration] = one if snapshot is None else snapshot
    return fetched


def _checked(snapshot: Snapshot | None, one: Fetch) -> Snapshot | None:
    """The snapshot if it is the wanted one, whole; it may have been freed, or damaged, since it was reported."""
    if snapshot is None or snapshot.header.rank != one.owner or snapshot.iteration != one.iteration:
        return None
    try:
        snapshot.check(_PLACES[one.source])
    except SnapshotError as error:
        what, _, _ = str(error).partition(";")
        damage.report("the digest of a snapshot that is fetched", what, "planning again without it")
        return None
    return snapshot


_PLACES = {
    Source.MEMORY: "in its own memory",
    Source.PEER: "as a copy in a peer's memory",
    Source.PARITY: "made from parity",
    Source.REPLICA: "made from live state",
    Source.FILE: "in a file",
}


def _send(rank: int, one: Fetch, snapshot: Snapshot | None, transport: Transport) -> None:
    if snapshot is None:
        transport.send(one.owner, TO_OWNER, Message(Kind.REFUSED, rank, one.iteration).encode())
        return
    packed, pieces = snapshot.packed()
    header = torch.frombuffer(bytearray(packed.encode()), dtype=torch.uint8)
    said = Message(
        Kind.SNAPSHOT, rank, one.iteration, header.numel(), packed.payload_bytes, check=checksum(header)
    )  # fmt: skip
    for data in (said.encode(), header, *pieces):
        transport.send(one.owner, TO_OWNER, data)


def _receive(one: Fetch, transport: Transport) -> Snapshot | Fetch:
    """What the holder sends; the fetch itself if that is nothing, or not what was wanted."""
    data = torch.empty(MESSAGE_BYTES, dtype=torch.uint8)
    transport.receive(one.holder, TO_OWNER, data)
    message = Message.decode(data)
    if message.kind is not Kind.SNAPSHOT:
        return one
    header = torch.empty(message.header_bytes, dtype=torch.uint8)
    payload = torch.empty(message.payload_bytes, dtype=torch.uint8)
    transport.receive(one.holder, TO_OWNER, header)
    if payload.numel():
        transport.receive(one.holder, TO_OWNER, payload)
    try:
        message.refuse_unless_whole(header)
        snapshot = Snapshot(Header.decode(header.numpy().tobytes()), Buffer(payload))
        snapshot.check(f"as it came from rank {one.holder}")
    except SnapshotError as error:
        what, _, _ = str(error).partition(";")
        damage.report("the checksums of what another rank sends back", what, "it is asked for again")
        return replace(one, was_sent=True)
    is_wanted = snapshot.header.rank == one.owner and snapshot.iteration == one.iteration
    return snapshot if is_wanted else one
