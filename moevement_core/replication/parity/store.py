"""Store of a group's parity in this rank's host memory: for each iteration a weighted sum of the members' snapshots.

A receiver for each member of the group adds the member's snapshot to the sum, in blocks of tensors
(``snapshot/blocks.py``). It checks each block before it adds the block. Of the snapshot itself it keeps only the
header. A sum that contains the snapshots of all members never changes again, so recoveries can rely on it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import override

import torch

from moevement_core.device import Device
from moevement_core.replication.parity.code import coefficients
from moevement_core.replication.parity.field import add_product
from moevement_core.replication.parity.groups import Group
from moevement_core.replication.parity.staging import Staging
from moevement_core.replication.peer_store import PeerStore
from moevement_core.replication.store_memory import StoreMemory
from moevement_core.snapshot.blocks import blocks_of
from moevement_core.snapshot.buffer import Buffer
from moevement_core.snapshot.snapshot import Entry, Header, Snapshot, SnapshotLease, digest_of
from moevement_core.util import damage
from moevement_core.util.iterations import is_newer, newest_of


@dataclass(slots=True, eq=False)
class Stripe:
    """Parity of one iteration: the sum of the members' snapshots ``SS_iteration``, and the headers of the snapshots."""

    iteration: int
    total: Buffer
    headers: dict[int, Header] = field(default_factory=dict)
    """Headers of the snapshots that the sum contains, wholly or in part, by member."""
    missing: dict[int, set[int]] = field(default_factory=dict)
    """Numbers of the snapshot's blocks that the sum lacks, for each member whose snapshot has not arrived whole."""
    digest: str | None = None
    """Digest of the sum; None until the sum contains the snapshots of all members."""
    users: int = 0
    """Number of threads that read the sum or add to it."""
    freed: bool = False

    @property
    def members(self) -> dict[int, Header]:
        """Headers of the snapshots that the sum contains wholly, by member."""
        return {source: header for source, header in self.headers.items() if source not in self.missing}


class GroupMemory(StoreMemory):
    """Host memory for the parity of one group.

    Args:
        members: ranks of the group.
        device: device whose host memory is allocated.
    """

    def __init__(self, members: tuple[int, ...], device: Device) -> None:
        super().__init__(members, device)
        self._members = members
        self._needed: dict[int, int] = {}
        """Bytes that each member needs: its last request, or the larger total that its receiver allocated later."""

    @override
    def need(self, source: int, nbytes: int) -> None:
        self._needed[source] = nbytes

    @override
    def trim(self) -> bool:
        """Free memory beyond the largest need of a member; return True if any was freed.

        The method frees nothing until every member has asked for memory, because the largest need is unknown before.
        """
        needed, before = list(self._needed.values()), self.arena.nbytes
        if len(needed) == len(self._members) and before > (most := max(needed)):
            self.arena.shrink(most)
        return self.arena.nbytes < before


class GroupStore:
    """Store of one group's parity. Any thread may use it.

    Args:
        group: group whose members send their snapshots here.
        number: number of the group's block of parity that this rank keeps; it determines the coefficients.
        device: device whose host memory holds the sums.
    """

    def __init__(self, group: Group, number: int, device: Device) -> None:
        self.group, self.number = group, number
        self.floor: int | None = None
        """Iteration of the oldest stripe that is kept; None if all are."""
        self.memory, self.staging = GroupMemory(group.members, device), Staging()
        self._coefficients = dict(zip(group.members, coefficients(*group.size)[number], strict=False))
        self._stripes: dict[int, Stripe] = {}
        self._lock = threading.Lock()

    def stripes(self) -> list[Stripe]:
        """Return the stripes without partly received snapshots, by ascending iteration."""
        with self._lock:
            return [stripe for _, stripe in sorted(self._stripes.items()) if not stripe.missing]

    def schedules_of(self, source: int) -> dict[int, str]:
        """Return the schedule id of each snapshot of ``source`` that a sum contains wholly, by iteration."""
        with self._lock:
            return {
                iteration: stripe.headers[source].schedule
                for iteration, stripe in self._stripes.items()
                if source in stripe.members
            }

    def begin(self, source: int, header: Header) -> Stripe | None:
        """Return the stripe for a snapshot of ``source`` that is about to arrive; None if too little memory is free.

        If the transfer of this snapshot was interrupted before, the blocks that have been added stay in the sum. But if
        the sum contains another snapshot of ``source`` for the iteration, a new and empty sum replaces the sum, because
        nothing can be taken out of a sum. The caller has to call :meth:`end`.
        """
        with self._lock:
            stripe = self._stripes.get(header.iteration)
            if stripe is not None and source in stripe.headers and stripe.headers[source].entries != header.entries:
                self._release(header.iteration)
                stripe = None
            if stripe is None:
                if (total := self._zeros(header.payload_bytes)) is None:
                    return None
                stripe = self._stripes[header.iteration] = Stripe(header.iteration, total)
            elif header.payload_bytes > stripe.total.nbytes:
                if (more := self._zeros(header.payload_bytes - stripe.total.nbytes)) is None:
                    return None
                stripe.total = Buffer(*(buffer.memory for buffer in (*stripe.total.extents, *more.extents)))
            if source not in stripe.headers:
                stripe.headers[source] = header
                stripe.missing[source] = set(range(len(blocks_of(header))))
                if not stripe.missing[source]:
                    del stripe.missing[source]
            stripe.users += 1
            return stripe

    def add(self, stripe: Stripe, source: int, number: int, data: Sequence[tuple[Entry, torch.Tensor]]) -> None:
        """Add block ``number`` of a member's snapshot to the sum. The caller has checked the tensors of the block."""
        coefficient = self._coefficients[source]
        with self._lock:
            if stripe.freed:
                return
            for entry, values in data:
                at = 0
                for piece in stripe.total.pieces(entry.offset, entry.nbytes):
                    add_product(piece.numpy(), coefficient, values[at : at + piece.numel()].numpy())
                    at += piece.numel()
            stripe.missing[source].discard(number)

    def end(self, stripe: Stripe, source: int) -> None:
        """End the use of a stripe that :meth:`begin` returned for ``source``.

        The snapshot may have arrived only in part. If this call is the one that completes the sum, it computes the
        digest of the sum.
        """
        with self._lock:
            stripe.users -= 1
            if not stripe.missing.get(source, True):
                del stripe.missing[source]
            if stripe.freed:
                self._release_unless_used(stripe)
                return
            is_whole = not stripe.missing and len(stripe.headers) == len(self.group.members)
            if not is_whole or stripe.digest is not None:
                return
            stripe.users += 1
        digest = digest_of(*stripe.total.pieces(0, stripe.total.nbytes))
        with self._lock:
            stripe.digest = digest
            stripe.users -= 1
            self._release_unless_used(stripe)

    def lease(self, iteration: int) -> Stripe | None:
        """Return the stripe of an iteration. Its memory stays allocated until the reader calls :meth:`end_reading`.

        Returns:
            None if there is no stripe, or if it is damaged or contains a snapshot only in part.
        """
        with self._lock:
            stripe = self._stripes.get(iteration)
            if stripe is None or stripe.missing:
                return None
            stripe.users += 1
        if stripe.digest is not None and digest_of(*stripe.total.pieces(0, stripe.total.nbytes)) != stripe.digest:
            what = f"parity of iteration {iteration} of ranks {', '.join(map(str, self.group.members))}"
            damage.report(
                "the digest of a parity sum, checked before use", what, "the recovery is planned again without it"
            )
            self.end_reading(stripe)
            return None
        return stripe

    def end_reading(self, stripe: Stripe) -> None:
        """End the reading of a stripe that :meth:`lease` returned."""
        with self._lock:
            stripe.users -= 1
            self._release_unless_used(stripe)

    def free_before(self, iteration: int) -> None:
        """Free the stripes of iterations before ``iteration``, because no recovery needs them."""
        with self._lock:
            self.floor = newest_of((self.floor, iteration))
            for old in [kept for kept in self._stripes if kept < iteration]:
                self._release(old)

    def drop(self, source: int, first: int, count: int) -> None:
        """Free the stripes of ``count`` iterations from ``first`` on that contain a snapshot of ``source``.

        The source never sends these snapshots again, so the sums can never become complete.
        """
        with self._lock:
            iterations = [
                at for at, stripe in self._stripes.items() if first <= at < first + count and source in stripe.headers
            ]
            for iteration in iterations:
                self._release(iteration)

    def _zeros(self, nbytes: int) -> Buffer | None:
        buffer = self.memory.arena.acquire(nbytes)
        for extent in buffer.extents if buffer is not None else ():
            extent.memory.zero_()
        return buffer

    def _release(self, iteration: int) -> None:
        stripe = self._stripes.pop(iteration)
        stripe.freed = True
        self._release_unless_used(stripe)

    def _release_unless_used(self, stripe: Stripe) -> None:
        if stripe.freed and not stripe.users:
            self.memory.arena.release(stripe.total)


class MemberStore(PeerStore):
    """Store of one member's snapshots. It has no data of its own: the parity of the member's group contains them.

    Args:
        source: rank of the member.
        group: store of the group's parity.
    """

    def __init__(self, source: int, group: GroupStore) -> None:
        super().__init__(source, group.memory)
        self.group = group

    @property
    @override
    def floor(self) -> int | None:  # type: ignore[override]
        return self.group.floor

    @override
    def lower_floor(self, iteration: int) -> None:
        if is_newer(self.group.floor, iteration):
            self.group.floor = iteration

    @override
    def schedules(self) -> Mapping[int, str]:
        return self.group.schedules_of(self.source)

    @override
    def snapshots(self) -> Mapping[int, Snapshot]:
        return {}

    @override
    def lease(self, iteration: int) -> SnapshotLease | None:
        return None

    @override
    def free_before(self, iteration: int) -> None:
        self.group.free_before(iteration)

    @override
    def free_unneeded(self, last: int) -> None:
        """Free nothing: the same bytes of a sum may contain parts that other members still need."""

    @override
    def drop(self, first: int, count: int) -> None:
        self.group.drop(self.source, first, count)


def tensors_between(snapshot: Snapshot, header: Header, start: int, end: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield the parts of a snapshot that bytes ``start`` to ``end`` of a sum contain, each with its place in the sum.

    A snapshot in memory may have gaps between its tensors. A sum has none, because the snapshot was sent without them.

    Args:
        snapshot: snapshot of a member, in memory.
        header: header of the same snapshot as it was sent; it describes the payload without gaps.
        start: first byte of the range, as a position in this payload.
        end: first byte after the range.
    """
    for sent, held in zip(header.entries, snapshot.in_order(), strict=True):
        first, last = max(sent.offset, start), min(sent.offset + sent.nbytes, end)
        at = first
        for piece in snapshot.buffer.pieces(held.offset + first - sent.offset, last - first) if first < last else ():
            yield at, piece
            at += piece.numel()
