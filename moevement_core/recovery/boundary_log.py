"""Boundary log (upstream log, MoEvement section 3.4): host copies of the tensors that a rank sends to other stages.

A stage whose state is lost replays alone, and its neighbours feed it from their logs. For each iteration and direction,
the log keeps tensors in the order in which they were sent. The replaying pipeline schedule receives tensors in that
order, so a tensor is identified by its position. The number of its micro-batch would not suffice, because a stage may
have several virtual chunks.

A background thread digests each tensor once its copy is complete. A rank checks the digests before it feeds tensors
from its log, and so finds damage to its memory. A replay compares the tensors that it sends with the digests.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from enum import IntEnum
from queue import SimpleQueue

import torch
import xxhash

from moevement_core.device import Device, DeviceEvent
from moevement_core.snapshot.snapshot import as_bytes, digest_of
from moevement_core.util.log_buffers import LogBuffers


class Direction(IntEnum):
    """Direction in which a tensor crosses a stage boundary."""

    FORWARD = 0
    """Direction of activations, to the next stage."""
    BACKWARD = 1
    """Direction of gradients, to the previous stage."""


@dataclass(frozen=True, slots=True, eq=False)
class Logged:
    """Copy of a tensor that was sent, with its place in the log."""

    order: int
    """Position among the tensors of its iteration and direction, from 0."""
    dtype: str
    shape: tuple[int, ...]
    buffer: torch.Tensor
    """Bytes of the copy, in host memory. They are complete once the device has passed the event ``copied``."""
    copied: DeviceEvent
    digested: Future[str]

    @property
    def digest(self) -> str:
        """Digest of the bytes as they were copied; the property waits until the digest exists."""
        return self.digested.result()

    @property
    def tensor(self) -> torch.Tensor:
        """Tensor on the host, as it was sent; the property waits for the copy."""
        self.copied.synchronize()
        return self.buffer.view(getattr(torch, self.dtype)).view(self.shape)


class _Digests:
    """Thread that computes the digests of logged tensors."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._wanted: SimpleQueue[tuple[torch.Tensor, DeviceEvent, Future[str]]] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def of(self, buffer: torch.Tensor, copied: DeviceEvent) -> Future[str]:
        """Return a future of the digest of ``buffer``; the thread computes the digest after the event ``copied``."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="moevement-log-digests", daemon=True)
            self._thread.start()
        digested: Future[str] = Future()
        self._wanted.put((buffer, copied, digested))
        return digested

    def _work(self) -> None:
        self._device.use_in_this_thread()
        while True:
            buffer, copied, digested = self._wanted.get()
            try:
                copied.synchronize()
                digested.set_result(digest_of(buffer))
            except Exception as error:  # The caller of result() gets the error.
                digested.set_exception(error)


class BoundaryLog:
    """Log of the tensors that this rank sends over its stage's boundaries; only the training thread calls the methods.

    Args:
        device: device of the tensors.
        cap_bytes: returns the bytes of host memory that the log may use now. At this cap, the log drops its oldest
            iterations.
        report: called with a message when the log begins to drop iterations.
    """

    def __init__(self, device: Device, cap_bytes: Callable[[], float], report: Callable[[str], None]) -> None:
        self.bytes_of_last = 0
        """Bytes that the last finished iteration sent."""
        self._device, self._cap_bytes, self._report = device, cap_bytes, report
        self._stream = device.stream()
        self._logged: dict[int, dict[Direction, list[Logged]]] = {}
        self._iteration: int | None = None
        self._digests = _Digests(device)
        self._buffers = LogBuffers(device)
        self._told = False

    @property
    def memory_bytes(self) -> int:
        """Bytes of host memory that the log has allocated, including free buffers for later tensors."""
        return self._buffers.nbytes

    @property
    def iterations(self) -> list[int]:
        """Iterations that are complete in the log, in ascending order."""
        return sorted(iteration for iteration in self._logged if iteration != self._iteration)

    def begin(self, iteration: int) -> None:
        """Begin an iteration: later sends belong to it. Sends of an earlier execution of the iteration are dropped."""
        # This assignment comes first. Otherwise, an exception could leave a partial iteration that counts as complete.
        self._iteration = iteration
        self._drop(iteration)
        self._logged[iteration] = {direction: [] for direction in Direction}
        self._buffers.begin_iteration()

    def restart_iteration(self) -> None:
        """Drop the sends of the present iteration, because training recomputes it from its beginning."""
        if self._iteration is not None:
            self.begin(self._iteration)

    def first_not_finite(self, direction: Direction) -> int | None:
        """Return the position of the first tensor sent in the present iteration that has a non-finite value.

        The method waits for the copies and reads all tensors of the iteration.

        Args:
            direction: direction of the sends to search.

        Returns:
            None if every value is finite, or if no iteration is under way.
        """
        sent = self._logged[self._iteration][direction] if self._iteration is not None else []
        return next((logged.order for logged in sent if not logged.tensor.isfinite().all()), None)

    def end(self) -> None:
        """End the iteration; the log ignores sends until the next one begins."""
        if self._iteration is not None:
            sent = self._logged[self._iteration]
            self.bytes_of_last = sum(logged.buffer.numel() for tensors in sent.values() for logged in tensors)
            self._buffers.end_iteration()
            self._iteration = None

    def note(self, direction: Direction, tensor: torch.Tensor) -> None:
        """Add a copy of a sent tensor to the log; outside an iteration, as in an evaluation, do nothing."""
        if self._iteration is None:
            return
        source = as_bytes(tensor.detach().contiguous())
        buffer = self._buffer(source.numel(), tensor.element_size())
        copied = self._device.event(sleeps=True)
        self._stream.wait_stream(self._device.current_stream())
        with self._device.use_stream(self._stream):
            buffer.copy_(source, non_blocking=True)
            copied.record(self._stream)
        if source.is_cuda:
            source.record_stream(self._stream)  # The allocator must not reuse the memory before the copy ends.
        logged = self._logged[self._iteration][direction]
        dtype = str(tensor.dtype).removeprefix("torch.")
        digested = self._digests.of(buffer, copied)
        logged.append(
            Logged(
                order=len(logged),
                dtype=dtype,
                shape=tuple(tensor.shape),
                buffer=buffer,
                copied=copied,
                digested=digested,
            )
        )

    def sent(self, iteration: int, direction: Direction) -> list[Logged] | None:
        """Return the tensors that ``iteration`` sent in a direction, in order; None if the log lacks some."""
        if iteration == self._iteration or iteration not in self._logged:
            return None
        return self._logged[iteration][direction]

    def digest(self, iteration: int) -> str | None:
        """Return the digest of all tensors that ``iteration`` sent, in order.

        The method waits for the digests of the tensors.

        Returns:
            None if the iteration is not complete in the log.
        """
        if iteration == self._iteration or iteration not in self._logged:
            return None
        sent = self._logged[iteration]
        words = (
            f"{direction} {logged.dtype} {logged.shape} {logged.digest}"
            for direction in Direction
            for logged in sent[direction]
        )
        return xxhash.xxh3_128_hexdigest("\n".join(words).encode())

    def damaged(self, iterations: Iterable[int]) -> list[int]:
        """Return the iterations with tensors that differ from their digests; the method reads all their tensors."""
        return [
            iteration
            for iteration in iterations
            if any(digest_of(logged.buffer) != logged.digest for logged in self._tensors_of(iteration))
        ]

    def free_before(self, iteration: int) -> None:
        """Drop the iterations before ``iteration``, which no replay needs any more."""
        for old in [older for older in self._logged if older < iteration]:
            self._drop(old)

    def give_up(self, to_bytes: float) -> None:
        """Drop the oldest iterations until the log uses at most ``to_bytes`` of host memory, and report that."""
        self._report(
            f"host memory is used up: the boundary log is cut to {to_bytes / 1e9:.3f} GB and drops its oldest "
            "iterations; a single stage cannot replay these iterations alone"
        )
        self._told = True
        self._buffers.trim()
        while self._buffers.nbytes > to_bytes and (old := self._oldest()) is not None:
            self._drop(old)
            self._buffers.trim()

    def interrupted(self) -> None:
        """Drop the present iteration. Called after a failure.

        The exception that interrupts training may have come in the middle of any other method of this class.
        """
        if (unfinished := self._iteration) is not None:
            self._iteration = None
            self._drop(unfinished)
        self._buffers.reclaim(logged.buffer for iteration in self._logged for logged in self._tensors_of(iteration))

    def _drop(self, iteration: int) -> None:
        # The entry leaves the log first. Otherwise, an exception could leave a buffer both in the log and among the
        # free buffers, where a later send would overwrite it.
        dropped = list(self._tensors_of(iteration))
        self._logged.pop(iteration, None)
        for logged in dropped:
            logged.copied.synchronize()
            self._buffers.release(logged.buffer, getattr(torch, logged.dtype).itemsize)

    def _tensors_of(self, iteration: int) -> Iterator[Logged]:
        for logged in self._logged.get(iteration, {}).values():
            yield from logged

    def _buffer(self, nbytes: int, element_bytes: int) -> torch.Tensor:
        """Return a buffer of exactly this size; at the cap, drop the oldest iterations to free memory."""
        while (buffer := self._buffers.take(nbytes, element_bytes, self._cap_bytes())) is None:
            if (old := self._oldest()) is None:  # The present iteration stays, whatever its size.
                buffer = self._buffers.take(nbytes, element_bytes, self._buffers.nbytes + nbytes)
                break
            self._drop(old)
            if not self._told:
                self._told = True
                self._report(
                    f"the boundary log has reached its cap of {self._cap_bytes() / 1e9:g} GB and drops its oldest "
                    f"iterations, beginning with {old}; a single stage cannot replay these iterations alone"
                )
        assert buffer is not None
        return buffer

    def _oldest(self) -> int | None:
        return min((logged for logged in self._logged if logged != self._iteration), default=None)
