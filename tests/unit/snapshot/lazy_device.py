"""Device in host memory that works only while a thread waits for it, so copies take as long as they possibly can."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, override

import torch

from moevement_core.device import CpuDevice, DeviceEvent


class Stream:
    """Queue of work that is executed in order; the first ``done`` items of it are finished."""

    def __init__(self, device: LazyDevice) -> None:
        self.device = device
        self.work: list[Callable[[], object]] = []
        self.done = 0

    def synchronize(self) -> None:
        self.device.run(self, len(self.work))

    def wait_stream(self, other: Stream) -> None:
        end = len(other.work)
        self.work.append(lambda: self.device.run(other, end))


class LazyEvent(DeviceEvent):
    """Event in a stream; each wait for it needs a permit if the device counts permits."""

    def __init__(self, device: LazyDevice, *, sleeps: bool) -> None:
        self.device, self.sleeps = device, sleeps
        self.stream, self.at = device.current_stream(), 0

    @override
    def record(self, stream: Any = None) -> None:
        self.stream = stream or self.device.current_stream()
        self.at = len(self.stream.work)

    @override
    def synchronize(self) -> None:
        device = self.device
        assert self.sleeps or threading.current_thread() is threading.main_thread(), "a background thread spins"
        if device.permits is not None:
            device.is_waited_for.set()
            device.permits.acquire()
        device.waits += 1
        if device.waits == device.fails_at:
            raise RuntimeError("CUDA error")
        device.run(self.stream, self.at)

    @override
    def order_before(self, stream: Any = None) -> None:
        (stream or self.device.current_stream()).work.append(lambda: self.device.run(self.stream, self.at))

    @override
    def query(self) -> bool:
        return self.stream.done >= self.at

    @override
    def elapsed_ms(self, end: DeviceEvent) -> float:
        return 0.0


class LazyDevice(CpuDevice):
    """Device of one test; the thread that waits for a stream executes its work."""

    kind = "lazy"

    def __init__(self) -> None:
        self.training = Stream(self)
        self._current = threading.local()
        self._lock = threading.RLock()
        self.copied: list[int] = []
        """Bytes of every copy, in the order of issue."""
        self.under_way_bytes = self.most_under_way_bytes = 0
        self.permits: threading.Semaphore | None = None
        self.is_waited_for = threading.Event()
        """Event that is set once a thread has begun to wait for a permit."""
        self.waits, self.fails_at = 0, 0

    def run(self, stream: Stream, end: int) -> None:
        """Execute the work of ``stream`` up to ``end``, and the work that it waits for."""
        with self._lock:
            while stream.done < end:
                stream.work[stream.done]()
                stream.done += 1

    def issue(self, work: Callable[[], object]) -> None:
        """Put work into the current stream."""
        self.current_stream().work.append(work)

    @override
    def stream(self) -> Any:
        return Stream(self)

    @override
    def current_stream(self) -> Any:
        return getattr(self._current, "stream", self.training)

    @override
    def use_stream(self, stream: Any) -> AbstractContextManager[Any]:
        return self._using(stream)

    @contextmanager
    def _using(self, stream: Any) -> Iterator[None]:
        before, self._current.stream = self.current_stream(), stream
        try:
            yield
        finally:
            self._current.stream = before

    @override
    def event(self, timing: bool = False, *, sleeps: bool = False) -> DeviceEvent:
        return LazyEvent(self, sleeps=sleeps)

    @override
    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        nbytes = source.numel()

        def work() -> None:
            target.copy_(source)
            self.under_way_bytes -= nbytes

        with self._lock:
            self.copied.append(nbytes)
            self.under_way_bytes += nbytes
            self.most_under_way_bytes = max(self.most_under_way_bytes, self.under_way_bytes)
            self.issue(work)
