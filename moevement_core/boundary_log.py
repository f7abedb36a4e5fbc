"""The upstream log (MoEvement section 3.4): what crosses a stage boundary, kept in host memory by who sent it.

A stage that is lost replays from what its neighbours sent it, while they do nothing else. Tensors are kept in the order
in which they were sent, for each iteration and direction; the schedule receives them in that order again, so the order
is all the name that a tensor needs. (Which micro-batch and virtual chunk it belongs to follows from the schedule; a log
keyed by buffers or micro-batches alone is wrong as soon as there are several.)

The digest of a tensor is made when its copy is there, beside training. So what memory did to it since is found before
it is fed, and what a replay sends again can be compared with what was sent.
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

from moevement_core.device import Device, Event
from moevement_core.log_buffers import LogBuffers
from moevement_core.snapshot.snapshot import as_bytes, digest_of


class Direction(IntEnum):
    """Which way a tensor crosses a boundary."""

    FORWARD = 0
    """An activation, to the next stage."""
    BACKWARD = 1
    """A gradient, to the stage before."""


@dataclass(frozen=True, slots=True, eq=False)
class Logged:
    """A tensor that was sent."""

    order: int
    """The how many-th of its iteration and direction."""
    dtype: str
    shape: tuple[int, ...]
    buffer: torch.Tensor
    """Bytes in host memory; they are complete when ``copied`` is over."""
    copied: Event
    digested: Future[str]

    @property
    def digest(self) -> str:
        """Digest of the bytes as they were copied; waits for it."""
        return self.digested.result()

    @property
    def tensor(self) -> torch.Tensor:
        """Tensor as it was sent, on the host; waits for the copy."""
        self.copied.synchronize()
        return self.buffer.view(getattr(torch, self.dtype)).view(self.shape)


class _Digests:
    """Maker of digests of host memory, with a thread of its own."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._wanted: SimpleQueue[tuple[torch.Tensor, Event, Future[str]]] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def of(self, buffer: torch.Tensor, copied: Event) -> Future[str]:
        """The digest of ``buffer`` once ``copied`` is over."""
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
            except Exception as error:  # shown to whoever asks for it
                digested.set_exception(error)


class BoundaryLog:
    """Log of what this rank sent over its stage's boundaries. All methods are for the training thread.

    Args:
        device: where the tensors live.
        cap_bytes: gives the host memory that the log may take now; beyond it the oldest iterations go.
        report: called, in words, when that happens.
    """

    def __init__(self, device: Device, cap_bytes: Callable[[], float], report: Callable[[str], None]) -> None:
        self.bytes_of_last = 0
        """Bytes that the last iteration sent."""
        self._device, self._cap_bytes, self._report = device, cap_bytes, report
        self._stream = device.stream()
        self._logged: dict[int, dict[Direction, list[Logged]]] = {}
        self._iteration: int | None = None
        self._digests = _Digests(device)
        self._buffers = LogBuffers(device)
        self._told = False

    @property
    def memory_bytes(self) -> int:
        """Host memory that is set aside, in use or not."""
        return self._buffers.nbytes

    @property
    def iterations(self) -> list[int]:
        """Iterations of which everything that was sent is here, in order."""
        return sorted(iteration for iteration in self._logged if iteration != self._iteration)

    def begin(self, iteration: int) -> None:
        """Begin an iteration: later sends belong to it, and earlier ones for the same iteration are dropped."""
        self._iteration = iteration  # first: an exception before the rest leaves no iteration that seems whole
        self._drop(iteration)
        self._logged[iteration] = {direction: [] for direction in Direction}
        self._buffers.begin_iteration()

    def begin_again(self) -> None:
        """Drop what the iteration under way has sent so far: it is computed again from its beginning."""
        if self._iteration is not None:
            self.begin(self._iteration)

    def first_not_finite(self, direction: Direction) -> int | None:
        """Return the order of the first tensor that the iteration under way sent with a value that is not finite.

        None if every value is finite, or no iteration is under way. Reads all that was sent; waits for the copies.
        """
        sent = self._logged[self._iteration][direction] if self._iteration is not None else []
        return next((logged.order for logged in sent if not logged.tensor.isfinite().all()), None)

    def end(self) -> None:
        """The iteration is over: nothing that is sent from now on is kept."""
        if self._iteration is not None:
            sent = self._logged[self._iteration]
            self.bytes_of_last = sum(logged.buffer.numel() for tensors in sent.values() for logged in tensors)
            self._buffers.end_iteration()
            self._iteration = None

    def note(self, direction: Direction, tensor: torch.Tensor) -> None:
        """Keep a tensor that is being sent; nothing outside an iteration (an evaluation, say)."""
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
            source.record_stream(self._stream)  # its memory may not be used again before the copy is over
        logged = self._logged[self._iteration][direction]
        dtype = str(tensor.dtype).removeprefix("torch.")
        digested = self._digests.of(buffer, copied)
        logged.append(Logged(len(logged), dtype, tuple(tensor.shape), buffer, copied, digested))

    def sent(self, iteration: int, direction: Direction) -> list[Logged] | None:
        """Everything that ``iteration`` sent in a direction, in order; None if it is not all here."""
        if iteration == self._iteration or iteration not in self._logged:
            return None
        return self._logged[iteration][direction]

    def digest(self, iteration: int) -> str | None:
        """Return the digest of everything that ``iteration`` sent, in order; None if it is not complete. Waits for its
        copies.
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
        """Return those of ``iterations`` whose tensors differ from what was copied. Reads all of them."""
        return [
            iteration
            for iteration in iterations
            if any(digest_of(logged.buffer) != logged.digest for logged in self._tensors_of(iteration))
        ]

    def free_before(self, iteration: int) -> None:
        """Let go of what no replay needs any more: what iterations before ``iteration`` sent."""
        for old in [older for older in self._logged if older < iteration]:
            self._drop(old)

    def give_up(self, to_bytes: float) -> None:
        """Keep no more than ``to_bytes``: the oldest iterations go."""
        self._report(
            f"host memory is used up: the log of what crosses stage boundaries keeps {to_bytes / 1e9:.3f} GB; a single "
            "stage cannot be recovered from before what is left"
        )
        self._told = True
        self._buffers.trim()
        while self._buffers.nbytes > to_bytes and (old := self._oldest()) is not None:
            self._drop(old)
            self._buffers.trim()

    def interrupted(self) -> None:
        """Drop the iteration under way, after an exception from outside that came at any moment."""
        if (unfinished := self._iteration) is not None:
            self._iteration = None
            self._drop(unfinished)
        self._buffers.reclaim(logged.buffer for iteration in self._logged for logged in self._tensors_of(iteration))

    def _drop(self, iteration: int) -> None:
        # Out of the log first: an exception between the two must not leave a buffer in both, to be written over.
        dropped = list(self._tensors_of(iteration))
        self._logged.pop(iteration, None)
        for logged in dropped:
            logged.copied.synchronize()
            self._buffers.give_back(logged.buffer, getattr(torch, logged.dtype).itemsize)

    def _tensors_of(self, iteration: int) -> Iterator[Logged]:
        for logged in self._logged.get(iteration, {}).values():
            yield from logged

    def _buffer(self, nbytes: int, element_bytes: int) -> torch.Tensor:
        """Return host memory of exactly this size; at the cap the oldest iterations make room for it."""
        while (buffer := self._buffers.take(nbytes, element_bytes, self._cap_bytes())) is None:
            if (old := self._oldest()) is None:  # the iteration under way is kept, whatever it takes
                buffer = self._buffers.take(nbytes, element_bytes, self._buffers.nbytes + nbytes)
                break
            self._drop(old)
            if not self._told:
                self._told = True
                self._report(
                    f"the log of what crosses stage boundaries is at its cap of {self._cap_bytes() / 1e9:g} GB: the "
                    f"oldest iterations go, {old} first; a single stage cannot be recovered before the next window"
                )
        assert buffer is not None
        return buffer

    def _oldest(self) -> int | None:
        return min((logged for logged in self._logged if logged != self._iteration), default=None)
