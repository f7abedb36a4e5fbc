"""Capture of snapshots: a rank copies its live state into host memory while training runs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np

from moevement_core.comms import plain
from moevement_core.device import Device
from moevement_core.engine.gradients import GradientLog
from moevement_core.engine.layout import Layouts, OperatorState
from moevement_core.engine.memory import SnapshotMemory
from moevement_core.engine.own import HeldBuffer, OwnSnapshots
from moevement_core.engine.progress import CheckpointCounters
from moevement_core.errors import SnapshotError
from moevement_core.overhead.pause import Pause
from moevement_core.policy.schedule import Contents, Saved, Schedule
from moevement_core.snapshot.arena import in_pages
from moevement_core.snapshot.buffer import spread
from moevement_core.snapshot.copies import Capture, copy_engine
from moevement_core.snapshot.snapshot import (
    BOUNDARY,
    Entry,
    Header,
    Snapshot,
    SnapshotPart,
    StateTensor,
    aligned_bytes,
    as_bytes,
    contents_text,
    offsets,
)
from moevement_core.snapshot.whole import begin_whole


class Capturer:
    """Maker of one rank's snapshots: it copies live state into buffers. Every method is for the training thread.

    Args:
        rank: this rank.
        states: live tensors of the operators that this rank holds; they stay valid for the whole job.
        own: snapshots of this rank, to which each capture adds one.
        device: device of the live tensors.
        memory: computation of the host memory that this rank's snapshots need.
        done: function that the capture thread calls with each captured snapshot.
        progress: counters of this rank's checkpointing.
        pause: switch that stops the digests of the capture thread in some iterations, so that the job can measure what
            saving costs. None: the digests never stop.
    """

    def __init__(
        self,
        rank: int,
        states: Mapping[str, OperatorState],
        own: OwnSnapshots,
        device: Device,
        memory: SnapshotMemory,
        done: Callable[[HeldBuffer, Snapshot], None],
        progress: CheckpointCounters,
        pause: Pause | None = None,
    ) -> None:
        self.last: Capture | None = None
        """Capture of the snapshot that began right before the current iteration; None if no snapshot began then."""
        self.arena = own.arena
        self.memory = memory
        self._rank, self._states, self._own, self._done = rank, states, own, done
        self._layouts = Layouts(states)
        self._engine = copy_engine(device, pause)
        self.gradients = GradientLog(
            self._layouts, self._engine, self.arena, memory=memory, device=device, progress=progress
        )
        self._copied_bytes, self._copy_s = 0, 0.0

    def has_room(self, iteration: int, schedule: Schedule) -> bool:
        """Return True if host memory for ``SS_iteration`` is free."""
        layout = self._layouts.of(schedule, schedule.slot(iteration))
        return self.arena.available >= in_pages(layout.nbytes + self.memory.record_bytes)

    def take(self, iteration: int, schedule: Schedule, record: Any, *, state: int, whole: Collection[str]) -> bool:
        """Begin to capture ``SS_iteration``; return True if a buffer was free. See :meth:`Checkpointer.capture`.

        The snapshot holds gradients only if :attr:`gradients` has copied those of this iteration.

        Raises:
            SnapshotError: the record is larger than the memory set aside for it, or an earlier copy failed.
        """
        slot = schedule.slot(iteration)
        layout = self._layouts.of(schedule, slot)
        marked, tensors = plain.flatten(record)
        boundary = [StateTensor(BOUNDARY, Saved.FULL, str(number), t.contiguous()) for number, t in enumerate(tensors)]
        if (nbytes := aligned_bytes(boundary)) > self.memory.record_bytes:
            raise SnapshotError(
                f"the boundary record has {nbytes} bytes, but only {self.memory.record_bytes} were set aside for it"
            )
        placed = [*layout.placed, *((t, at, as_bytes(t.tensor)) for t, at in offsets(boundary, layout.nbytes))]
        everything = self._everything(whole)
        logged = self.gradients.take(iteration, schedule)
        # No code may be between acquiring and registering the buffer: an interruption there leaves it without an owner.
        buffer = logged.buffer if logged is not None else self.arena.acquire(layout.nbytes + self.memory.record_bytes)
        if buffer is None:
            return False
        on_disk = schedule.parts_of_slot(slot).on_disk
        # Peers that keep parity receive whole snapshots, because parity is a sum of whole snapshots.
        at_peers = None if self.memory.is_summed else schedule.parts_of_slot(slot).at_peers
        contents = layout.contents
        held = self._own.add(HeldBuffer(iteration, buffer, contents, contents if at_peers is None else at_peers))
        pairs = [(source, list(buffer.pieces(at, t.nbytes))) for t, at, source in placed]
        places = schedule.table.index_of

        def captured(done: Capture) -> None:
            # One thread copies in order, so the gradients, which it began earlier, are complete now.
            parts = [(placed, done.digests)]
            if logged is not None:
                if logged.copies.error is not None:
                    raise logged.copies.error
                parts.insert(0, (layout.gradients, logged.copies.digests))
            entries = tuple(
                Entry(
                    operator=t.operator, saved=t.saved, key=t.key, dtype=str(t.tensor.dtype).removeprefix("torch."),
                    offset=at, nbytes=t.nbytes, digest=digest, place=places.get(t.operator, -1),
                )
                for of_part, digests in parts
                for (t, at, _), digest in zip(of_part, digests, strict=True)
            )  # fmt: skip
            header = Header(
                rank=self._rank, iteration=iteration, schedule=schedule.id, slot=slot,
                contents=contents_text(layout.contents), entries=entries, record=marked, state=state,
                whole=done.whole or None, on_disk=part_of(schedule, slot, on_disk, self._states),
                at_peers=part_of(schedule, slot, at_peers, self._states),
            )  # fmt: skip
            self._done(held, Snapshot(header, buffer))

        def failed() -> None:
            self._own.end_use(held, has_failed=True)

        count = len(layout.placed)
        self.last = self._engine.start(pairs[count:], pairs[:count], everything, captured, failed)
        return True

    def adopt(self, snapshot: Snapshot) -> bool:
        """Keep a copy of a snapshot that an earlier process of this rank captured; return True if a buffer was free."""
        header, pieces = snapshot.packed()
        if (buffer := self.arena.acquire(header.payload_bytes)) is None:
            return False
        at = 0
        for piece in pieces:
            for source, target in spread(piece, list(buffer.pieces(at, piece.numel()))):
                target.copy_(source)
            at += piece.numel()
        held = self._own.add(HeldBuffer(snapshot.iteration, buffer, snapshot.contents, snapshot.contents_at_peers))
        self._done(held, Snapshot(header, buffer))
        return True

    def wait(self) -> float:
        """Block until the snapshot is copied out of the live tensors; return the seconds of stall."""
        if self.last is None:
            return 0.0
        stall_s = self.last.wait_copied()
        for copies in self.parts:
            self._copied_bytes += copies.nbytes
            self._copy_s += copies.copy_s
        return stall_s

    @property
    def parts(self) -> list[Capture]:
        """Captures of gradients and :attr:`last`, which together make up a snapshot; each only if it is set."""
        return [copies for copies in (self.gradients.last, self.last) if copies is not None]

    def copy_rate(self) -> float:
        """Return the mean rate of all copies so far in bytes per second; infinite before the first copy."""
        return self._copied_bytes / self._copy_s if self._copy_s else float("inf")

    def settle(self) -> None:
        """Block until every capture that was begun is complete or has failed."""
        self._engine.settle()

    def reset(self) -> None:
        """Finish the captures that were begun, and forget errors; called between two generations."""
        self._engine.settle()
        self._engine.forget_error()
        self.last = None

    def close(self) -> None:
        """Finish all captures and end the capture thread."""
        self._engine.close()

    def whole_now(self) -> dict[str, str]:
        """Return a digest of each operator's compute weights and full state, computed as for :attr:`Header.whole`."""
        return begin_whole(self._everything(self._states))()

    def _everything(self, names: Collection[str]) -> dict[str, list[Any]]:
        """Return all live tensors of the operators in ``names`` that have tensors on this rank."""
        every = {
            name: [t.tensor for t in (*state.compute, *state.full)]
            for name, state in self._states.items()
            if name in names
        }
        return {name: tensors for name, tensors in every.items() if tensors}


def part_of(schedule: Schedule, slot: int, wanted: Contents | None, states: Mapping[str, Any]) -> SnapshotPart | None:
    """Return which part of a snapshot goes to peers or to disk; None for the whole snapshot.

    The schedule leaves some experts out of the part. A rank without tensors of such an expert has nothing to leave out,
    so its part lists the expert as the whole snapshot does. In a restore, only the ranks with tensors of an expert
    therefore decide which version of the expert is the newest (MoC-System, section 5.1).

    Args:
        schedule: schedule of the snapshot.
        slot: slot of the snapshot in the schedule.
        wanted: contents of the part, for all ranks of the stage; None for the whole snapshot.
        states: states of the operators with tensors on this rank, by name.
    """
    held = schedule.contents_of_slot(slot)
    if wanted is None or held is None or np.array_equal(wanted, held):
        return None
    names = schedule.table.names
    has_tensors = np.array([bool(state and (state.full or state.compute)) for state in map(states.get, names)])
    own = np.where(has_tensors, wanted, held)
    without = tuple(names[place] for place in np.flatnonzero(own != held))
    return SnapshotPart(contents_text(own), without, of_stage=contents_text(wanted))
