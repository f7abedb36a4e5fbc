"""Copies from live state to host buffers beside training (MoEvement section 4).

A capture begins after an optimizer step, and its copies must be complete before the next step. Training therefore calls
:meth:`Capture.wait_copied` before each step. That method blocks until the copies are complete, and returns the seconds
of the wait. Digests are computed later, from the host copy.

A background thread makes the copies, and computes digests while no copy is queued. Without a GPU the thread copies with
NumPy, which lets other threads run meanwhile. With a GPU the thread issues asynchronous copies on a separate stream, in
chunks, and keeps only a few chunks under way. The reason is that a GPU serves copies of one direction in order. The
small copies for which a mixture-of-experts layer waits would otherwise queue behind a whole snapshot.
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

from moevement_core.device import Device, DeviceEvent
from moevement_core.overhead.pause import Pause
from moevement_core.snapshot.buffer import spread
from moevement_core.snapshot.snapshot import digest_of, numpy_bytes
from moevement_core.snapshot.whole import Finish, begin_whole
from moevement_core.util.gate import Gate

Pair = tuple[torch.Tensor, Sequence[torch.Tensor]]
"""Live tensor, and the pieces of host memory that receive its bytes.

All are flat uint8. The pieces together are as long as the tensor.
"""
Part = tuple[torch.Tensor, torch.Tensor]
"""Part of a live tensor and the host memory that receives its bytes, both flat uint8 of the same length."""
CHUNK_BYTES = 8 << 20
"""Bytes of a chunk. A link of 55 GB/s copies a chunk in 0.15 ms, which is enough time to issue the next chunk."""
CHUNKS_UNDER_WAY = 2
"""Largest number of chunks issued and not complete. The second keeps the link busy when the first completes."""


class Capture:
    """Copy of one snapshot to host memory, with the digests of the copied bytes."""

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
        """Digest of each operator's whole state, for the operators in ``whole`` of :meth:`CopyEngine.start`.

        It is empty until all of these digests are computed.
        """
        self.digests: list[str] = []
        """Digest of each copied tensor: first ``beside``, then ``at_once`` (arguments of :meth:`CopyEngine.start`).

        The list is complete once the gate :attr:`finished` is open.
        """
        self.copy_s = 0.0
        """Seconds that the copies took. A GPU measures from the start of the first copy to the end of the last one."""
        self.copy_cpu_s = 0.0
        """Processor seconds that the copies took on this host, including :attr:`whole_cpu_s`; close to 0 on a GPU."""
        self.digest_cpu_s = 0.0
        self.whole_cpu_s = 0.0
        """Processor seconds for digests of the whole state. Live state must stay unchanged while they are computed."""
        self.error: BaseException | None = None
        self.is_urgent = False
        """True if training waits for the copies. The thread then issues all remaining chunks at once."""
        self.last: DeviceEvent | None = None
        """Event after the last copy in the copy stream. None until all copies are issued, and always without a GPU."""
        self._pairs = (*beside, *at_once)
        self._done = done
        self._failed = failed
        self.issued = Gate()
        self.copied = Gate()
        self.finished = Gate()

    @property
    def nbytes(self) -> int:
        """Bytes that the capture copies."""
        return sum(source.numel() for source, _ in self._pairs)

    def wait_copied(self) -> float:
        """Block until the live state is copied and may change; return the seconds of the wait.

        Raises:
            Exception: the error of the background thread; the snapshot must not be used.
        """
        return self._wait(self.copied)

    def order_after_copies(self) -> float:
        """Make later work of the current stream wait for the copies.

        Without a GPU the method does the same as :meth:`wait_copied`. On a GPU it blocks only until all copies are
        issued; the copies may still run when it returns. On a GPU it does not wait for digests of the whole state
        either, so a capture that computes such digests needs :meth:`wait_copied`.

        Returns:
            Seconds that the call blocked.

        Raises:
            Exception: the error of the background thread; the snapshot must not be used.
        """
        waited_s = self._wait(self.issued)
        if self.last is not None:
            self.last.order_before()
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
        """Compute the digests of the whole state with ``finish``; called on the background thread after the copies."""
        if not self.to_digest_whole:
            return
        began = time.thread_time()
        self.whole = finish()
        self.whole_cpu_s = time.thread_time() - began

    def digest_next(self) -> bool:
        """Compute the digest of the next pair from its host copy; return True if all digests are computed."""
        began = time.thread_time()
        if len(self.digests) < len(self._pairs):
            _, targets = self._pairs[len(self.digests)]
            self.digests.append(digest_of(*targets))
        self.digest_cpu_s += time.thread_time() - began
        return len(self.digests) == len(self._pairs)


class CopyEngine(ABC):
    """Engine that runs captures in order on a background thread, beside training.

    Args:
        pause: switch that the training thread sets to time an iteration without digests. While it is set, the
            background thread computes no digests. :meth:`settle` and :meth:`end_pause` end the pause.
    """

    def __init__(self, pause: Pause | None = None) -> None:
        self._pause = pause or Pause()
        self.error: BaseException | None = None
        """Last error of the background thread; every :meth:`start` raises it again until :meth:`forget_error`."""
        self._jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_closing = False
        """True while :meth:`close` waits for the end of the thread, and after an interruption of that wait."""

    def start(
        self,
        at_once: Sequence[Pair],
        beside: Sequence[Pair],
        whole: Mapping[str, Sequence[torch.Tensor]],
        done: Callable[[Capture], None],
        failed: Callable[[], None],
        *,
        ready: DeviceEvent | None = None,
    ) -> Capture:
        """Begin to copy live tensors to host memory, and return the capture.

        Args:
            at_once: small live tensors, each with its targets; they may change as soon as this call returns.
            beside: live tensors, each with its targets; they may change only after :meth:`Capture.wait_copied` or
                :meth:`Capture.order_after_copies`.
            whole: live tensors of each operator that gets a digest of its whole state, by operator. They may change
                only after :meth:`Capture.wait_copied`.
            done: function that is called on the background thread when copies and digests are complete.
            failed: function that is called instead of ``done`` after an error. No copy writes into the targets then.
            ready: event after which ``beside`` holds the state to be saved; None: the end of the work that is issued on
                the current stream so far.

        Raises:
            Exception: an earlier error of the background thread.
        """
        if self.error is not None:
            failed()
            raise self.error
        if self._is_closing:
            self.close()
        if not self._is_running:
            # Each thread has its own queue, because an interruption may leave an earlier thread running unnoticed.
            self._jobs = queue.SimpleQueue()
            self._thread = threading.Thread(
                target=self._work, args=(self._jobs,), name="moevement-capture", daemon=True
            )
            self._thread.start()
        capture = Capture(at_once, beside, whole=whole, done=done, failed=failed)
        self._jobs.put((capture, self._begin_capture(capture, ready)))
        return capture

    def forget_error(self) -> None:
        """Forget the error of the background thread, so that later captures can start. Called after a rank failed.

        Without this call, an error that has passed, such as a lack of memory, would stop all later captures.
        """
        self.error = None

    def settle(self) -> None:
        """End a pause, and block until every started capture is complete or has failed."""
        if self._is_closing:
            self.close()
        if not self._is_running:
            return
        self._pause.end()
        over = Gate()
        self._jobs.put(over)
        over.wait()

    def end_pause(self) -> None:
        """End a pause, so that the thread computes digests again. Called before training waits for digests."""
        self._pause.end()

    def close(self) -> None:
        """Finish all started captures and end the thread; the next :meth:`start` creates a new thread."""
        if self._thread is not None and self._is_running:
            self._is_closing = True  # set first: after an interruption here, later calls must not rely on the thread
            self._jobs.put(None)
            self._thread.join()
        self._thread = None
        self._is_closing = False

    @property
    def _is_running(self) -> bool:
        """True if the thread runs. After an interruption, a created thread may never have been started."""
        return self._thread is not None and self._thread.is_alive()

    @abstractmethod
    def _begin_capture(self, capture: Capture, ready: DeviceEvent | None) -> Any:
        """Begin a capture on the training thread, without waiting; return what :meth:`_complete` needs."""

    @abstractmethod
    def _complete(self, capture: Capture, begun: Any) -> None:
        """Wait until all bytes are copied, and set ``copy_s``; called on the background thread."""

    @abstractmethod
    def _begin(self) -> None:
        """Prepare the background thread, which calls this method first."""

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
                copied.append(job)  # the gate opens when all captures before it are finished
            elif self._copy(*job):
                copied.append(job[0])
        while copied:
            self._digest_first(copied)

    def _copy(self, capture: Capture, begun: Any) -> bool:
        """Complete all copies of a capture; return False after an error."""
        began = time.thread_time()
        try:
            self._complete(capture, begun)
        except BaseException as error:  # raised on the training thread
            self._fail(capture, error)
        capture.copy_cpu_s = time.thread_time() - began
        capture.issued.open()
        capture.copied.open()
        if capture.error is None:
            return True
        capture.finished.open()
        return False

    def _digest_first(self, copied: deque[Capture | Gate]) -> None:
        """Compute one digest for the first capture in ``copied``, and remove the capture after its last digest.

        If the first entry is a gate, open and remove it: all captures before the gate are finished.
        """
        first = copied[0]
        if isinstance(first, Gate):
            first.open()
        else:
            try:
                if not first.digest_next():
                    return
                first._done(first)
            except BaseException as error:  # raised on the training thread
                self._fail(first, error)
            first.finished.open()
        copied.popleft()

    def _fail(self, capture: Capture, error: BaseException) -> None:
        capture.error = self.error = error
        capture._failed()


class ThreadCopies(CopyEngine):
    """Engine that copies on the background thread, for a machine without a GPU."""

    def _begin(self) -> None:
        pass

    def _begin_capture(self, capture: Capture, ready: DeviceEvent | None) -> Finish:
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
    """Engine that issues asynchronous copies on a separate stream, in chunks, from the background thread."""

    def __init__(self, device: Device, pause: Pause | None = None) -> None:
        self._device = device
        self._stream = device.stream()
        super().__init__(pause)

    def _begin(self) -> None:
        self._device.use_in_this_thread()

    def _begin_capture(self, capture: Capture, ready: DeviceEvent | None) -> DeviceEvent:
        for source, target in _parts(capture.at_once):
            self._device.copy(target, source)  # ordered before later work of training that changes the tensor
        if ready is None or capture.at_once:
            ready = self._device.event()
            ready.record()
        return ready

    def _complete(self, capture: Capture, begun: DeviceEvent) -> None:
        device, stream = self._device, self._stream
        first, last, end = device.event(timing=True), device.event(timing=True), device.event(sleeps=True)
        with device.use_stream(stream):
            try:
                begun.order_before(stream)
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
                    stream.synchronize()  # all copies must end before their memory is released
                raise
            capture.copy_s = first.elapsed_ms(last) / 1e3
            capture.finish_whole(finish)

    def _issue_paced(self, capture: Capture) -> None:
        """Issue the copies on the current stream.

        At most :data:`CHUNKS_UNDER_WAY` chunks are under way at a time, unless training waits for the copies.
        """
        under_way: deque[DeviceEvent] = deque()
        for chunk in in_chunks(_parts(capture.beside), CHUNK_BYTES):
            if len(under_way) >= CHUNKS_UNDER_WAY and not capture.is_urgent:
                under_way.popleft().synchronize()
            for source, target in chunk:
                self._device.copy(target, source)
            done = self._device.event(sleeps=True)
            done.record(self._stream)
            under_way.append(done)


def in_chunks(parts: Iterable[Part], nbytes: int) -> Iterator[list[Part]]:
    """Yield ``parts`` in order, cut and gathered into chunks of ``nbytes``; the last chunk may be smaller."""
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
    """Return the copy engine for ``device``; it computes no digests while ``pause`` is on."""
    return ThreadCopies(pause) if device.kind == "cpu" else StreamCopies(device, pause)
