"""Copies from live state to host buffers beside training (MoEvement section 4).

A capture begins after one optimizer step and must be over before the next: :meth:`Capture.wait_copied` stands in front
of the step and says how long it had to wait. Digests are made after that, from the host copy.

With a GPU, copies are issued asynchronously on a stream of their own. Without one a background thread copies; NumPy's
copy runs on that thread alone and lets other threads run meanwhile.
"""

from __future__ import annotations

import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from moevement_core.device import Device, Event
from moevement_core.gate import Gate
from moevement_core.snapshot.buffer import spread
from moevement_core.snapshot.snapshot import digest_of, numpy_bytes
from moevement_core.snapshot.whole import Finish, begin_whole

Pair = tuple[torch.Tensor, Sequence[torch.Tensor]]
"""Live tensor and the pieces that it goes to, all as flat uint8, of the same length together."""


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
        self._done = done
        self._failed = failed
        self.copied = Gate()
        self.finished = Gate()

    @property
    def nbytes(self) -> int:
        """Bytes that are copied."""
        return sum(source.numel() for source, _ in (*self.beside, *self.at_once))

    def wait_copied(self) -> float:
        """Block until live state may change again; returns the seconds that this took.

        Raises:
            Exception: whatever went wrong in the background; the snapshot is not to be used.
        """
        if self.copied.is_open:
            waited_s = 0.0
        else:
            began = time.perf_counter()
            self.copied.wait()
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

    def _digest(self) -> None:
        began = time.thread_time()
        self.digests = [digest_of(*targets) for _, targets in (*self.beside, *self.at_once)]
        self.digest_cpu_s = time.thread_time() - began


class CopyEngine(ABC):
    """Runs captures one after the other, beside training."""

    def __init__(self) -> None:
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
    ) -> Capture:
        """Begin to copy; call it when the live tensors hold what is to be kept.

        Args:
            at_once: live tensors that anything may change after this call, and their targets: small ones.
            beside: live tensors that nothing changes before :meth:`Capture.wait_copied`, and their targets.
            whole: live tensors, likewise, of which only a digest is made, by operator.
            done: called on the background thread when copies and digests are complete.
            failed: called there instead if they are not.

        Raises:
            Exception: what went wrong in the background before.
        """
        if self.error is not None:
            failed()
            raise self.error
        if self._is_closing:
            self.close()
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="moevement-capture", daemon=True)
            self._thread.start()
        capture = Capture(at_once, beside, whole, done, failed)
        self._jobs.put((capture, self._issue(capture)))
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
        if self._thread is None:
            return
        over = Gate()
        self._jobs.put(over)
        over.wait()

    def close(self) -> None:
        """Finish what was started and end the thread; the next start begins another."""
        if self._thread is not None:
            self._is_closing = True  # so that, where this is interrupted, nobody waits for a thread that has ended
            self._jobs.put(None)
            self._thread.join()
            self._jobs = queue.SimpleQueue()
            self._thread = None
        self._is_closing = False

    @abstractmethod
    def _issue(self, capture: Capture) -> Any:
        """On the training thread: begin, without waiting."""

    @abstractmethod
    def _complete(self, capture: Capture, issued: Any) -> None:
        """On the background thread: return when all is copied, with ``copy_s`` set."""

    @abstractmethod
    def _begin(self) -> None:
        """On the background thread, before anything else."""

    def _work(self) -> None:
        self._begin()
        while (job := self._jobs.get()) is not None:
            if isinstance(job, Gate):
                job.open()
                continue
            capture, issued = job
            try:
                began = time.thread_time()
                self._complete(capture, issued)
                capture.copy_cpu_s = time.thread_time() - began
                capture.copied.open()
                capture._digest()
                capture._done(capture)
            except BaseException as error:  # shown on the training thread
                capture.error = self.error = error
                capture._failed()
            finally:
                capture.copied.open()
                capture.finished.open()


class ThreadCopies(CopyEngine):
    """Copies on the background thread, for a machine without a GPU."""

    def _begin(self) -> None:
        pass

    def _issue(self, capture: Capture) -> Finish:
        for source, target in _parts(capture.at_once):
            target.copy_(source)
        return begin_whole(capture.to_digest_whole)

    def _complete(self, capture: Capture, issued: Finish) -> None:
        began = time.perf_counter()
        for source, target in _parts(capture.beside):
            np.copyto(numpy_bytes(target), numpy_bytes(source))
        capture.copy_s = time.perf_counter() - began
        capture.finish_whole(issued)


class StreamCopies(CopyEngine):
    """Asynchronous copies on a stream of their own."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._stream = device.stream()
        super().__init__()

    def _begin(self) -> None:
        self._device.use_in_this_thread()

    def _issue(self, capture: Capture) -> tuple[Event, Event, Finish]:
        first, last = self._device.event(timing=True), self._device.event(timing=True)
        for source, target in _parts(
            capture.at_once
        ):  # in the order of training's own work, so before anything changes them
            target.copy_(source, non_blocking=True)
        self._stream.wait_stream(self._device.current_stream())
        with self._device.use_stream(self._stream):
            first.record(self._stream)
            for source, target in _parts(capture.beside):
                target.copy_(source, non_blocking=True)
            last.record(self._stream)
            finish = begin_whole(capture.to_digest_whole)
        return first, last, finish

    def _complete(self, capture: Capture, issued: Any) -> None:
        first, last, finish = issued
        last.synchronize()
        capture.copy_s = first.elapsed_ms(last) / 1e3
        with self._device.use_stream(self._stream):  # the answer waits for what was issued on it
            capture.finish_whole(finish)


def _parts(pairs: Sequence[Pair]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for source, targets in pairs:
        yield from spread(source, targets)


def copy_engine(device: Device) -> CopyEngine:
    """The engine for ``device``."""
    return ThreadCopies() if device.kind == "cpu" else StreamCopies(device)
