"""Copies from live state to host buffers beside training (MoEvement section 4).

A capture begins after one optimizer step and must be over before the next: :meth:`Capture.wait_copied` stands in front
of the step and says how long it had to wait. Digests are made after that, from the host copy.

A background thread makes copies first, and digests while no copy waits. Without a GPU it copies itself; NumPy's copy
runs on that thread alone and lets other threads run meanwhile. With one it issues asynchronous copies on a stream of
their own, in chunks of which few are under way: a GPU serves copies in one direction in turn, and training's own small
ones, for which a mixture-of-experts layer waits, would stand behind a whole snapshot.
"""

from __future__ import annotations

import queue
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch

from moevement_core.device import Device, Event
from moevement_core.gate import Gate
from moevement_core.overhead.pause import Pause
from moevement_core.snapshot.buffer import spread
from moevement_core.snapshot.snapshot import digest_of, numpy_bytes
from moevement_core.snapshot.whole import Finish, begin_whole

Pair = tuple[torch.Tensor, Sequence[torch.Tensor]]
"""Live tensor and the pieces that it goes to, all as flat uint8, of the same length together."""
Part = tuple[torch.Tensor, torch.Tensor]
"""Live bytes and where they go, of the same length."""
CHUNK_BYTES = 8 << 20
"""Bytes of a chunk: 0.15 ms of a link of 55 GB/s, so that issuing the next one in time is no feat."""
CHUNKS_UNDER_WAY = 2
"""Chunks that are issued and not done, at most: with a second one behind the first the link never waits."""


class Capture:
    """One snapshot on its way to host memory."""

    def __init__(
        self,
        at_once: Sequence[Pair],
        beside: Sequence[Pair],
        whole: Mapping[str, Sequence[torch.Tensor]],
        done: Callable[[Capture], None],
        failed: Callable[[], None],
    ) -> None:
        self.at_once = at_once
        self.beside = beside
        self.to_digest_whole = whole
        self.whole: dict[str, str] = {}
        """A digest of each operator's whole state, where it was asked for, once it is done."""
        self.digests: list[str] = []
        """One for each pair, those copied beside training first, once it is done."""
        self.copy_s = 0.0
        """Seconds that the copies took; on a GPU from the first to the last, by its clock."""
        self.copy_cpu_s = 0.0
        """Processor time that the copies took of this host; next to nothing on a GPU."""
        self.digest_cpu_s = 0.0
        self.whole_cpu_s = 0.0
        """Processor time that digests of the whole state took; live state may not change before they are made."""
        self.error: BaseException | None = None
        self.is_urgent = False
        """Whether training waits for the copies, so that nobody gains by their being paced."""
        self.last: Event | None = None
        """The end of the copies in their stream, once they are issued; None without streams."""
        self._pairs = (*beside, *at_once)
        self._done = done
        self._failed = failed
        self.issued = Gate()
        self.copied = Gate()
        self.finished = Gate()

    @property
    def nbytes(self) -> int:
        """Bytes that are copied."""
        return sum(source.numel() for source, _ in self._pairs)

    def wait_copied(self) -> float:
        """Block until live state may change again; returns the seconds that this took.

        Raises:
            Exception: whatever went wrong in the background; the snapshot is not to be used.
        """
        return self._wait(self.copied)

    def let_change(self) -> float:
        """Order later work of the current stream behind the copies, and block until that is possible.

        On a GPU the copies only have to be issued for that, and may still be under way afterwards. Without one it is
        the same as :meth:`wait_copied`. Digests of the whole state may not have been asked for.

        Returns:
            The seconds that it blocked.

        Raises:
            Exception: whatever went wrong in the background; the snapshot is not to be used.
        """
        waited_s = self._wait(self.issued)
        if self.last is not None:
            self.last.hold_back()
        return waited_s

    def _wait(self, gate: Gate) -> float:
        if gate.is_open:
            waited_s = 0.0
        else:
            self.is_urgent = True
            began = time.perf_counter()
            gate.wait()
            waited_s = time.perf_counter() - began
        if self.error is not None:
            raise self.error
        return waited_s

    def finish_whole(self, finish: Finish) -> None:
        """Bring the digests of the whole state to their end."""
        if not self.to_digest_whole:
            return
        began = time.thread_time()
        self.whole = finish()
        self.whole_cpu_s = time.thread_time() - began

    def digest_next(self) -> bool:
        """Make one more digest of the copies; returns whether it was the last."""
        began = time.thread_time()
        if len(self.digests) < len(self._pairs):
            _, targets = self._pairs[len(self.digests)]
            self.digests.append(digest_of(*targets))
        self.digest_cpu_s += time.thread_time() - began
        return len(self.digests) == len(self._pairs)


class CopyEngine(ABC):
    """Engine that runs captures one after the other, beside training.

    Args:
        pause: while it is on no digest is made, unless somebody waits for one.
    """

    def __init__(self, pause: Pause | None = None) -> None:
        self._pause = pause or Pause()
        self.error: BaseException | None = None
        """What went wrong in the background last; raised at every later call until :meth:`forget_error`."""
        self._jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_closing = False
        """Whether the thread was asked to end; an exception from outside may come before it has."""

    def start(
        self,
        at_once: Sequence[Pair],
        beside: Sequence[Pair],
        whole: Mapping[str, Sequence[torch.Tensor]],
        done: Callable[[Capture], None],
        failed: Callable[[], None],
        *,
        ready: Event | None = None,
    ) -> Capture:
        """Begin to copy; call it when the live tensors hold what is to be kept.

        Args:
            at_once: live tensors that anything may change after this call, and their targets: small ones.
            beside: live tensors that nothing changes before :meth:`Capture.wait_copied` or :meth:`Capture.let_change`,
                and their targets.
            whole: live tensors, likewise, of which only a digest is made, by operator.
            done: called on the background thread when copies and digests are complete.
            failed: called there instead if they are not. Nothing writes into the targets any more then.
            ready: a mark after which ``beside`` holds what is to be kept; None: the present end of the current stream.

        Raises:
            Exception: what went wrong in the background before.
        """
        if self.error is not None:
            failed()
            raise self.error
        if self._is_closing:
            self.close()
        if not self._is_running:
            # With a queue of its own: where an exception from outside came before a thread was known to run, it may.
            self._jobs = queue.SimpleQueue()
            self._thread = threading.Thread(
                target=self._work, args=(self._jobs,), name="moevement-capture", daemon=True
            )
            self._thread.start()
        capture = Capture(at_once, beside, whole, done, failed)
        self._jobs.put((capture, self._begin_capture(capture, ready)))
        return capture

    def forget_error(self) -> None:
        """Capture again although something went wrong in the background; called between two generations.

        A failure of one moment (no memory, a record that was too large) would otherwise be raised in every later one.
        """
        self.error = None

    def settle(self) -> None:
        """Block until everything that was started is complete, or has failed."""
        if self._is_closing:
            self.close()
        if not self._is_running:
            return
        self._pause.end()
        over = Gate()
        self._jobs.put(over)
        over.wait()

    def go_on(self) -> None:
        """End a pause, because somebody is about to wait for digests."""
        self._pause.end()

    def close(self) -> None:
        """Finish what was started and end the thread; the next start begins another."""
        if self._thread is not None and self._is_running:
            self._is_closing = True  # so that, where this is interrupted, nobody waits for a thread that has ended
            self._jobs.put(None)
            self._thread.join()
        self._thread = None
        self._is_closing = False

    @property
    def _is_running(self) -> bool:
        """Whether there is a thread; an exception from outside may have come before it was started."""
        return self._thread is not None and self._thread.is_alive()

    @abstractmethod
    def _begin_capture(self, capture: Capture, ready: Event | None) -> Any:
        """Begin, without waiting; on the training thread."""

    @abstractmethod
    def _complete(self, capture: Capture, begun: Any) -> None:
        """Return when all is copied, with ``copy_s`` set; on the background thread."""

    @abstractmethod
    def _begin(self) -> None:
        """Prepare the background thread; called on it before anything else."""

    def _work(self, jobs: queue.SimpleQueue[Any]) -> None:
        self._begin()
        copied: deque[Capture | Gate] = deque()
        while True:
            if copied and jobs.empty():
                if self._pause.is_on:
                    time.sleep(self._pause.step_s)
                else:
                    self._digest_first(copied)
                continue
            if (job := jobs.get()) is None:
                break
            if isinstance(job, Gate):
                copied.append(job)  # it opens when everything before it is finished
            elif self._copy(*job):
                copied.append(job[0])
        while copied:
            self._digest_first(copied)

    def _copy(self, capture: Capture, begun: Any) -> bool:
        """Make all copies of a capture; returns whether that went well."""
        began = time.thread_time()
        try:
            self._complete(capture, begun)
        except BaseException as error:  # shown on the training thread
            self._fail(capture, error)
        capture.copy_cpu_s = time.thread_time() - began
        capture.issued.open()
        capture.copied.open()
        if capture.error is None:
            return True
        capture.finished.open()
        return False

    def _digest_first(self, copied: deque[Capture | Gate]) -> None:
        """Make one more digest of the first capture in ``copied``, or open the gate that stands there."""
        first = copied[0]
        if isinstance(first, Gate):
            first.open()
        else:
            try:
                if not first.digest_next():
                    return
                first._done(first)
            except BaseException as error:  # shown on the training thread
                self._fail(first, error)
            first.finished.open()
        copied.popleft()

    def _fail(self, capture: Capture, error: BaseException) -> None:
        capture.error = self.error = error
        capture._failed()


class ThreadCopies(CopyEngine):
    """Copies on the background thread, for a machine without a GPU."""

    def _begin(self) -> None:
        pass

    def _begin_capture(self, capture: Capture, ready: Event | None) -> Finish:
        for source, target in _parts(capture.at_once):
            target.copy_(source)
        return begin_whole(capture.to_digest_whole)

    def _complete(self, capture: Capture, begun: Finish) -> None:
        began = time.perf_counter()
        for source, target in _parts(capture.beside):
            np.copyto(numpy_bytes(target), numpy_bytes(source))
        capture.copy_s = time.perf_counter() - began
        capture.finish_whole(begun)


class StreamCopies(CopyEngine):
    """Asynchronous copies on a stream of their own, issued chunk by chunk from the background thread."""

    def __init__(self, device: Device, pause: Pause | None = None) -> None:
        self._device = device
        self._stream = device.stream()
        super().__init__(pause)

    def _begin(self) -> None:
        self._device.use_in_this_thread()

    def _begin_capture(self, capture: Capture, ready: Event | None) -> Event:
        for source, target in _parts(capture.at_once):
            self._device.copy(target, source)  # in the order of training's own work, so before anything changes it
        if ready is None or capture.at_once:
            ready = self._device.event()
            ready.record()
        return ready

    def _complete(self, capture: Capture, begun: Event) -> None:
        device, stream = self._device, self._stream
        first, last, end = device.event(timing=True), device.event(timing=True), device.event(sleeps=True)
        with device.use_stream(stream):
            try:
                begun.hold_back(stream)
                first.record(stream)
                self._issue_paced(capture)
                last.record(stream)
                capture.last = last
                capture.issued.open()
                finish = begin_whole(capture.to_digest_whole)
                end.record(stream)
                end.synchronize()
            except BaseException:
                with suppress(Exception):
                    stream.synchronize()  # until nothing writes any more into memory that others are to have
                raise
            capture.copy_s = first.elapsed_ms(last) / 1e3
            capture.finish_whole(finish)

    def _issue_paced(self, capture: Capture) -> None:
        """Issue the copies on the current stream, few at a time unless training waits for them."""
        under_way: deque[Event] = deque()
        for chunk in in_chunks(_parts(capture.beside), CHUNK_BYTES):
            if len(under_way) >= CHUNKS_UNDER_WAY and not capture.is_urgent:
                under_way.popleft().synchronize()
            for source, target in chunk:
                self._device.copy(target, source)
            done = self._device.event(sleeps=True)
            done.record(self._stream)
            under_way.append(done)


def in_chunks(parts: Iterable[Part], nbytes: int) -> Iterator[list[Part]]:
    """Cut and gather ``parts``, in their order, into chunks of ``nbytes``; the last one may have less."""
    chunk: list[Part] = []
    room = nbytes
    for source, target in parts:
        at = 0
        while at < source.numel():
            end = min(at + room, source.numel())
            chunk.append((source[at:end], target[at:end]))
            room -= end - at
            at = end
            if not room:
                yield chunk
                chunk, room = [], nbytes
    if chunk:
        yield chunk


def _parts(pairs: Sequence[Pair]) -> Iterator[Part]:
    for source, targets in pairs:
        yield from spread(source, targets)


def copy_engine(device: Device, pause: Pause | None = None) -> CopyEngine:
    """Return the engine for ``device``, whose digests keep to ``pause``."""
    return ThreadCopies(pause) if device.kind == "cpu" else StreamCopies(device, pause)
