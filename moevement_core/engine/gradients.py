"""Log of gradients: copies of the newest update's gradients for a snapshot that is captured after the update."""

from __future__ import annotations

from dataclasses import dataclass

from moevement_core.device import Device, DeviceEvent
from moevement_core.engine.layout import Layouts
from moevement_core.engine.memory import SnapshotMemory
from moevement_core.engine.progress import CheckpointCounters
from moevement_core.policy.schedule import Schedule
from moevement_core.snapshot.arena import Arena
from moevement_core.snapshot.buffer import Buffer
from moevement_core.snapshot.copies import Capture, CopyEngine
from moevement_core.util.iterations import is_newer


@dataclass(frozen=True, slots=True, eq=False)
class CopiedGradients:
    """Gradients of one update, copied into the buffer of the snapshot that will hold them."""

    iteration: int
    schedule: str
    buffer: Buffer
    copies: Capture


class GradientLog:
    """Gradients of the newest update, live or copied. Every method is for the training thread.

    Args:
        layouts: layouts of snapshots.
        engine: engine that makes the copies.
        arena: memory for this rank's snapshots.
        memory: computation of the host memory that this rank's snapshots need.
        device: device of the live tensors.
        progress: counters, with the stall of each iteration.
    """

    def __init__(
        self,
        layouts: Layouts,
        engine: CopyEngine,
        arena: Arena,
        memory: SnapshotMemory,
        device: Device,
        progress: CheckpointCounters,
    ) -> None:
        self.last: Capture | None = None
        """Copies of the gradients for the newest snapshot; None if that snapshot holds no gradients."""
        self.live: int | None = None
        """Iteration whose gradients the live tensors hold; None if they hold those of no iteration."""
        self._layouts, self._engine, self._arena, self._memory = layouts, engine, arena, memory
        self._device, self._progress = device, progress
        self._copied: CopiedGradients | None = None
        self._overwritten: int | None = None
        """Newest iteration whose gradients were overwritten; None before the first."""
        self._final: DeviceEvent | None = None
        """Event after which the gradients of the newest update are final; None once they are live or overwritten."""
        self._ready: DeviceEvent | None = None
        """Event after which the gradients of :attr:`live` are final; None if they were computed again in a replay."""
        self._waited_s = 0.0
        """Seconds that training has waited for copies of gradients since the last :meth:`wait`."""

    def mark(self) -> None:
        """Record that the gradients of the next update are final; return without waiting.

        On a GPU the copies of gradients then run beside the update instead of after it.
        """
        mark = self._device.event()
        mark.record()
        self._final = mark

    def begin(self, iteration: int, *, is_replayed: bool) -> bool:
        """Record that the gradients of ``iteration`` are live; return False if they were overwritten before.

        Args:
            iteration: iteration whose gradients are in the live tensors.
            is_replayed: True if a recovery executed the iteration again, so that its gradients are live again.
        """
        self._ready, self._final = None if is_replayed else self._final, None
        if not is_replayed and not is_newer(iteration, self._overwritten):
            return False
        self.live = iteration
        return True

    def are_due(self, iteration: int, schedule: Schedule) -> bool:
        """Return True if ``SS_iteration`` holds gradients of this rank's operators."""
        return bool(self._layouts.of(schedule, schedule.slot(iteration)).gradients)

    def copy(self, iteration: int, schedule: Schedule) -> bool:
        """Begin to copy the live gradients into the buffer of ``SS_iteration``, unless that was begun before.

        The caller must not change the gradients before :meth:`end`.

        Args:
            iteration: iteration of the update.
            schedule: schedule of the snapshot.

        Returns:
            True if a buffer was free.
        """
        if self.has(iteration, schedule):
            return True
        self.drop()
        layout = self._layouts.of(schedule, schedule.slot(iteration))
        if (buffer := self._arena.acquire(layout.nbytes + self._memory.record_bytes)) is None:
            return False
        pairs = [(source, list(buffer.pieces(at, t.nbytes))) for t, at, source in layout.gradients]
        copies = self._engine.start((), pairs, {}, lambda done: None, lambda: None, ready=self._ready)
        self._copied = CopiedGradients(iteration, schedule.id, buffer, copies)
        return True

    def has(self, iteration: int, schedule: Schedule) -> bool:
        """Return True if :meth:`copy` has begun to copy the gradients for ``SS_iteration`` under ``schedule``."""
        copied = self._copied
        return copied is not None and (copied.iteration, copied.schedule) == (iteration, schedule.id)

    def take(self, iteration: int, schedule: Schedule) -> CopiedGradients | None:
        """Return the copies for ``SS_iteration``, whose capture begins now; None if there are none."""
        if (copied := self._copied) is None or not self.has(iteration, schedule):
            return None
        self._copied, self.last = None, copied.copies
        return copied

    def wait(self, iteration: int) -> float:
        """Block until the current stream may overwrite the gradients of ``iteration``; return the seconds of stall.

        After this call the trainer overwrites the gradients. On a GPU the host waits only until the copies are issued;
        the stream waits for their end.
        """
        self.end()
        stall_s, self._waited_s = self._waited_s, 0.0
        self._progress.gradient_stall_s = stall_s
        self._overwritten = iteration
        return stall_s

    def end(self) -> None:
        """Block until the current stream may overwrite the copied gradients.

        A trainer calls this method only if it overwrites gradients before its call of :meth:`wait`. That later call
        then returns the stall of both methods. Gradients that were not copied before the call of this method are lost.
        """
        self._final = None
        copies = self._copied.copies if self._copied is not None else self.last
        self._waited_s += copies.order_after_copies() if copies is not None else 0.0
        self.live = None

    @property
    def buffers(self) -> list[Buffer]:
        """Return the buffer with copied gradients, as a list; empty if no gradients wait for their snapshot."""
        return [self._copied.buffer] if self._copied is not None else []

    def drop(self) -> None:
        """Release the copied gradients, because their snapshot will not be captured."""
        copied, self._copied = self._copied, None
        if copied is not None:
            self._engine.end_pause()
            copied.copies.finished.wait()
            self._arena.release(copied.buffer)
