"""Collectives of some ranks over a tree of TCP connections, in host memory.

A gloo group connects every rank with every other rank, and its reductions take 2(N - 1) steps, one after the other.
In this tree a rank has at most :data:`FAN_OUT` + 1 neighbours at any N, and a collective takes O(log N) steps. What a
rank sends in a reduction does not depend on N; a gather of N values gives every rank N values.

The result of a collective has the same bits on every rank, because one rank, the root, computes it for all.
"""

from __future__ import annotations

import queue
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum
from typing import Any

import torch

from moevement_core.comms.transport import Transport
from moevement_core.errors import ExchangeError
from moevement_core.util.gate import Gate

FAN_OUT = 4
"""Largest number of ranks below a rank in the tree."""

_HEADER = struct.Struct("!BIQ")
"""Header of a message: kind of the collective, its number among the collectives of the group, bytes that follow."""
_PART = struct.Struct("!II")
"""Header of the value of one rank in a gather: place of the rank in the group, bytes of the value."""
_NUMBERS = 1 << 32


class Reduction(IntEnum):
    """Reduction of the values of all ranks, element by element."""

    SUM = 1
    MIN = 2
    MAX = 3


_GATHER, _BROADCAST, _QUESTION, _DECISION = 11, 12, 13, 14
"""Kinds of collectives that are no :class:`Reduction`."""
_COMBINE: dict[Reduction, Callable[..., Any]] = {
    Reduction.SUM: torch.add,
    Reduction.MIN: torch.minimum,
    Reduction.MAX: torch.maximum,
}


class TreeGroup:
    """Group of ranks that exchange data in host memory over a tree.

    All ranks of the group call the same methods in the same order. If a rank of the group is lost, the others raise an
    error, or wait until :func:`~moevement_core.comms.transport.refuse` ends the wait. After an error, the group is
    unusable.

    Args:
        ranks: ranks of the group, in the same order on all of them.
        rank: this rank.
        transport: channel to the other ranks; None only in a group of one rank.
        tag: number of this group among the groups that use the same channel.
    """

    def __init__(self, ranks: Sequence[int], rank: int, transport: Transport | None, tag: int = 0) -> None:
        self.ranks, self.rank = tuple(ranks), rank
        self.place = self.ranks.index(rank)
        """Index of this rank in :attr:`ranks`."""
        self._parent, self._children = neighbours(self.place, len(self.ranks))
        self._transport, self._tag = transport, tag
        self._number = 0
        self._later: queue.SimpleQueue[_Later | None] | None = None

    @property
    def size(self) -> int:
        """Number of ranks in the group."""
        return len(self.ranks)

    def gather(self, data: bytes) -> list[bytes]:
        """Return the bytes that each rank gives, in the order of :attr:`ranks`. Collective.

        Raises:
            RuntimeError: a rank of the group is lost.
            ExchangeError: another rank calls another collective.
        """
        parts = [_PART.pack(self.place, len(data)), data]
        with _Collective(self, _GATHER) as step:
            parts += [step.receive(child) for child in self._children]
            whole = step.pass_down(b"".join(parts))
        return _values(whole, self.size)

    def broadcast(self, data: bytes, source: int) -> bytes:
        """Return the bytes that the rank at place ``source`` gives; the others' ``data`` is ignored. Collective.

        Raises:
            RuntimeError: a rank of the group is lost.
            ExchangeError: another rank calls another collective.
        """
        with _Collective(self, _BROADCAST) as step:
            path = list(_to_root(source))
            if self.place in path and self.place != source:
                data = step.receive(path[path.index(self.place) - 1])
            if self._parent is not None and self.place in path:
                step.send(self._parent, data)
            return step.pass_down(data, is_sent=True)

    def reduce(self, values: torch.Tensor, reduction: Reduction) -> None:
        """Replace ``values`` by their reduction over all ranks. Collective.

        Args:
            values: contiguous tensor on the host, not empty, of the same shape and type on all ranks.
            reduction: function that combines the values; sums are in the same order on all ranks.

        Raises:
            RuntimeError: a rank of the group is lost.
            ExchangeError: another rank calls another collective, or gives a tensor of another size.
        """
        flat = values.view(-1)
        with _Collective(self, reduction) as step:
            for child in self._children:
                received = step.receive(child)
                if len(received) != flat.numel() * flat.element_size():
                    raise ExchangeError(
                        f"rank {self.ranks[child]} gives {len(received)} bytes to a reduction; "
                        f"needs {flat.numel() * flat.element_size()}, as rank {self.rank} gives"
                    )
                _COMBINE[reduction](flat, torch.frombuffer(bytearray(received), dtype=flat.dtype), out=flat)
            whole = step.pass_down(flat.view(torch.uint8).numpy().tobytes())
        flat.copy_(torch.frombuffer(bytearray(whole), dtype=flat.dtype))

    def reduce_later(self, values: torch.Tensor, reduction: Reduction) -> Callable[[], None]:
        """Begin :meth:`reduce` on a background thread; return a function that waits for its end.

        Until that function returns, this rank must call no other method of the group but this one.
        ``values`` must not be used until the returned function returns. That function raises the errors of
        :meth:`reduce`.
        """
        later = _Later(values, reduction)
        if self._later is None:
            self._later = queue.SimpleQueue()
            threading.Thread(target=self._reduce_all, args=(self._later,), name="moevement-tree", daemon=True).start()
        self._later.put(later)
        return later.wait

    def barrier(self) -> None:
        """Wait until all ranks have called this method. Collective.

        Raises:
            RuntimeError: a rank of the group is lost.
            ExchangeError: another rank calls another collective.
        """
        self.reduce(torch.zeros(1, dtype=torch.uint8), Reduction.SUM)

    def ask_once(self, question: Callable[[], bool]) -> bool:
        """Ask a question once for all ranks, after all of them have called this method. Collective.

        Args:
            question: function that one rank calls, the root.

        Returns:
            The answer, on every rank.

        Raises:
            RuntimeError: a rank of the group is lost.
            ExchangeError: another rank calls another collective.
        """
        with _Collective(self, _QUESTION) as step:
            for child in self._children:
                step.receive(child)
            answer = bytes([question()]) if self._parent is None else b""
            return bool(step.pass_down(answer)[0])

    def decide(self, data: bytes, decision: Callable[[list[bytes]], bytes]) -> bytes:
        """Collect the bytes that each rank gives on one rank, the root, which decides for all. Collective.

        The root gets N values. Every other rank passes on those of the ranks below it, and gets the decision alone.

        Args:
            data: bytes of this rank.
            decision: function of the values of all ranks, in the order of :attr:`ranks`; the root calls it.

        Returns:
            The result of ``decision``, on every rank.

        Raises:
            RuntimeError: a rank of the group is lost.
            ExchangeError: another rank calls another collective.
        """
        parts = [_PART.pack(self.place, len(data)), data]
        with _Collective(self, _DECISION) as step:
            parts += [step.receive(child) for child in self._children]
            collected = b"".join(parts)
            return step.pass_down(decision(_values(collected, self.size)) if self._parent is None else collected)

    def close(self) -> None:
        """End the thread of :meth:`reduce_later`, after the reductions that have begun."""
        if self._later is not None:
            self._later.put(None)

    def _reduce_all(self, later: queue.SimpleQueue[_Later | None]) -> None:
        while (reduction := later.get()) is not None:
            reduction.run(self)


class _Later:
    """Reduction that runs on a background thread."""

    def __init__(self, values: torch.Tensor, reduction: Reduction) -> None:
        self._values, self._reduction = values, reduction
        self._error = ""
        self._ended = Gate()

    def run(self, group: TreeGroup) -> None:
        try:
            group.reduce(self._values, self._reduction)
        except Exception as error:
            self._error = f"{type(error).__name__}: {error}"
        self._ended.open()

    def wait(self) -> None:
        self._ended.wait()
        if self._error:
            # The thread's own error would keep alive, by its traceback, all that its waiting callers hold.
            raise RuntimeError(f"a reduction in the background has failed: {self._error}")


class _Collective:
    """Messages that this rank exchanges with its neighbours in one collective."""

    def __init__(self, group: TreeGroup, kind: int) -> None:
        self._group, self._kind = group, kind
        self._number = group._number

    def __enter__(self) -> _Collective:
        self._group._number = (self._number + 1) % _NUMBERS
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def send(self, place: int, data: bytes) -> None:
        group = self._group
        assert group._transport is not None
        header = _HEADER.pack(self._kind, self._number, len(data))
        message = torch.frombuffer(bytearray(header + data), dtype=torch.uint8)
        group._transport.send(group.ranks[place], group._tag, message)

    def receive(self, place: int) -> bytes:
        group = self._group
        assert group._transport is not None
        header = torch.empty(_HEADER.size, dtype=torch.uint8)
        group._transport.receive(group.ranks[place], group._tag, header)
        kind, number, nbytes = _HEADER.unpack(header.numpy().tobytes())
        if (kind, number) != (self._kind, self._number):
            raise ExchangeError(
                f"rank {group.ranks[place]} is in collective {number} of kind {kind}, and rank {group.rank} in "
                f"{self._number} of kind {self._kind}; all ranks must call the same collectives in the same order"
            )
        data = torch.empty(nbytes, dtype=torch.uint8)
        if nbytes:
            group._transport.receive(group.ranks[place], group._tag, data)
        return data.numpy().tobytes()

    def pass_down(self, data: bytes, *, is_sent: bool = False) -> bytes:
        """Send ``data`` to the rank above, unless it is there already, and the root's answer to the ranks below."""
        group = self._group
        if group._parent is not None:
            if not is_sent:
                self.send(group._parent, data)
            data = self.receive(group._parent)
        for child in group._children:
            self.send(child, data)
        return data


def neighbours(place: int, size: int) -> tuple[int | None, range]:
    """Return the places above and below a place in a tree of ``size`` places; the root has None above it.

    ``neighbours(1, 7)`` is ``(0, range(5, 7))``.
    """
    first = place * FAN_OUT + 1
    return (place - 1) // FAN_OUT if place else None, range(min(first, size), min(first + FAN_OUT, size))


def _to_root(place: int) -> Iterator[int]:
    yield place
    while place:
        place = (place - 1) // FAN_OUT
        yield place


def _values(whole: bytes, size: int) -> list[bytes]:
    """Return the value of each place, from the concatenated parts of all places."""
    values, at, view = [b""] * size, 0, memoryview(whole)
    while at < len(whole):
        place, nbytes = _PART.unpack_from(view, at)
        at += _PART.size
        values[place] = bytes(view[at : at + nbytes])
        at += nbytes
    return values
