"""Execution of a plan's fetches: every rank receives its own snapshots, from its memory, a peer, or a file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from moevement_core.comms.transport import Transport
from moevement_core.errors import SnapshotError
from moevement_core.recovery.holdings import Fetch, Source
from moevement_core.recovery.plan import RecoveryPlan
from moevement_core.recovery.take_part import OpenSum, take_part
from moevement_core.replication.wire import MESSAGE_BYTES, TO_OWNER, Message, MessageKind, checksum
from moevement_core.snapshot.buffer import Buffer
from moevement_core.snapshot.snapshot import Header, Snapshot
from moevement_core.util import damage

Open = Callable[[Source, int, int], Snapshot | None]
"""Function that returns a snapshot that this rank reported, given source, owner and iteration.

It returns None if the snapshot was freed since the report.
"""


def fetch(
    rank: int, plan: RecoveryPlan, open_: Open, transport: Transport | None, open_sum: OpenSum = lambda *which: None
) -> dict[int, Snapshot | Fetch]:
    """Execute the fetches of a plan; every rank of the job calls this function with the same plan.

    Args:
        rank: this rank.
        plan: plan with the fetches.
        open_: returns snapshots that this rank holds.
        transport: connection between ranks; None if all fetches are local.
        open_sum: returns blocks of parity that this rank holds.

    Returns:
        This rank's checked snapshots, by iteration of the plan. If a holder could not provide a snapshot, the value is
        the fetch itself.
    """
    fetched: dict[int, Snapshot | Fetch] = {}
    for request in plan.fetches:
        if request.sum is not None:
            assert transport is not None, "other ranks hold terms of the sum"
            if rank in request.sum.chain:
                take_part(
                    rank, owner=request.owner, iteration=request.iteration, sum_=request.sum,
                    open_=lambda term, iteration: _checked(
                        open_(term.source, term.owner, iteration), Fetch(term.owner, iteration, rank, term.source)
                    ),
                    open_sum=open_sum, transport=transport,
                )  # fmt: skip
            if rank == request.owner:
                fetched[request.iteration] = _receive(request, transport)
            continue
        if rank not in (request.owner, request.holder):
            continue
        snapshot = (
            _checked(open_(request.source, request.owner, request.iteration), request)
            if rank == request.holder
            else None
        )
        if request.owner != request.holder:
            assert transport is not None, "another rank holds the snapshot"
            if rank == request.holder:
                _send(rank, request, snapshot, transport)
                continue
            fetched[request.iteration] = _receive(request, transport)
            continue
        fetched[request.iteration] = request if snapshot is None else snapshot
    return fetched


def _checked(snapshot: Snapshot | None, request: Fetch) -> Snapshot | None:
    """Return the snapshot if it is the requested one and intact, else None.

    The snapshot may have been freed or damaged since this rank reported it.
    """
    if snapshot is None or snapshot.header.rank != request.owner or snapshot.iteration != request.iteration:
        return None
    try:
        snapshot.check(_PLACES[request.source])
    except SnapshotError as error:
        what, _, _ = str(error).partition(";")
        damage.report("the digest of a fetched snapshot", what, "the recovery is planned again without it")
        return None
    return snapshot


_PLACES = {
    Source.MEMORY: "in its own memory",
    Source.PEER: "as a copy in a peer's memory",
    Source.PARITY: "made from parity",
    Source.REPLICA: "made from live state",
    Source.FILE: "in a file",
}


def _send(rank: int, request: Fetch, snapshot: Snapshot | None, transport: Transport) -> None:
    if snapshot is None:
        transport.send(request.owner, TO_OWNER, Message(MessageKind.REFUSED, rank, request.iteration).encode())
        return
    packed, pieces = snapshot.packed()
    header = torch.frombuffer(bytearray(packed.encode()), dtype=torch.uint8)
    message = Message(
        kind=MessageKind.SNAPSHOT, rank=rank, iteration=request.iteration, header_bytes=header.numel(),
        payload_bytes=packed.payload_bytes, check=checksum(header),
    )  # fmt: skip
    for data in (message.encode(), header, *pieces):
        transport.send(request.owner, TO_OWNER, data)


def _receive(request: Fetch, transport: Transport) -> Snapshot | Fetch:
    """Return the snapshot that the holder sends.

    Returns:
        The snapshot. The request itself if the holder refuses it, or if the received snapshot is damaged or is not the
        requested one.
    """
    data = torch.empty(MESSAGE_BYTES, dtype=torch.uint8)
    transport.receive(request.holder, TO_OWNER, data)
    message = Message.decode(data)
    if message.kind is not MessageKind.SNAPSHOT:
        return request
    header = torch.empty(message.header_bytes, dtype=torch.uint8)
    payload = torch.empty(message.payload_bytes, dtype=torch.uint8)
    transport.receive(request.holder, TO_OWNER, header)
    if payload.numel():
        transport.receive(request.holder, TO_OWNER, payload)
    try:
        message.refuse_unless_whole(header)
        snapshot = Snapshot(Header.decode(header.numpy().tobytes()), Buffer(payload))
        snapshot.check(f"as received from rank {request.holder}")
    except SnapshotError as error:
        what, _, _ = str(error).partition(";")
        damage.report("the checksums of a snapshot from another rank", what, "this rank fetches the snapshot again")
        return replace(request, was_sent=True)
    is_wanted = snapshot.header.rank == request.owner and snapshot.iteration == request.iteration
    return snapshot if is_wanted else request
