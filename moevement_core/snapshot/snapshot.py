"""One snapshot: slices of a rank's state in a host buffer, with a header that says what they are.

The buffer holds raw tensors one after the other, each at a multiple of 64 bytes. The header is JSON: where each tensor
stands, its dtype, and its digest, taken right after the copy. That is also how a snapshot travels and how it is written
to disk, so whoever holds one can check it without knowing the model. What no recovery needs any more of it may be given
back while the rest stays; then it travels without the gaps.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from moevement_core.errors import SnapshotError
from moevement_core.policy.schedule import Contents, Saved
from moevement_core.snapshot import plain
from moevement_core.snapshot.buffer import Buffer

VERSION = 3
READ = (2, 3)
"""Versions that this program reads. Those of 2 do not say the places of operators."""
READ_TEXT = f"versions {' and '.join(map(str, READ))}"
ALIGNMENT = 64
_MOST_BYTES = 1 << 62
BOUNDARY = ""
"""In the place of an operator's name: tensors of the boundary record."""


@dataclass(frozen=True, slots=True, eq=False)
class StateTensor:
    """A tensor of an operator's live state, as a flat view."""

    operator: str
    saved: Saved
    """Whether it belongs to the compute weights or to the full state."""
    key: str
    """What it is: parameter, range of the parameter, and part (weight, master, exp_avg, step ...)."""
    tensor: torch.Tensor
    """A view of the live state, never a copy; contiguous, of any dtype, on any device."""

    @property
    def nbytes(self) -> int:
        """Its size."""
        return self.tensor.numel() * self.tensor.element_size()


@dataclass(frozen=True, slots=True)
class Entry:
    """Where a tensor stands in a snapshot's buffer."""

    operator: str
    saved: Saved
    key: str
    dtype: str
    offset: int
    nbytes: int
    digest: str
    """XXH3 of its bytes, 128 bits in hexadecimal."""
    place: int = -1
    """Of the operator in the stage's table, and so in :attr:`Header.contents`; -1 for the boundary record."""

    @property
    def name(self) -> str:
        """In words."""
        return f"{self.key} of {self.operator or 'the boundary record'}"


@dataclass(frozen=True, slots=True)
class OnDisk:
    """What of a snapshot is written to disk, where that is not all of it."""

    contents: str
    """As in :attr:`Header.contents`."""
    without: tuple[str, ...]
    """The operators that are left out."""


@dataclass(frozen=True, slots=True)
class Header:
    """What a snapshot is and holds."""

    rank: int
    iteration: int
    schedule: str
    """The id of the schedule under which it was taken."""
    slot: int
    contents: str
    """What it holds of each operator of the stage's table, one digit of :class:`Saved` for each."""
    entries: tuple[Entry, ...]
    record: Any
    """Boundary state and iteration record: plain data, whose tensors are entries too."""
    state: int
    """The iteration whose state it holds; the same as ``iteration`` but for those taken before a run's first
    iteration, which all hold the state that the run starts from."""
    whole: dict[str, str] | None = None
    """A digest of each operator's whole state then, held or not; where they were asked for."""
    on_disk: OnDisk | None = None
    """None: all of it is written to disk."""

    @property
    def payload_bytes(self) -> int:
        """Bytes of the buffer that are used."""
        return max((entry.offset + entry.nbytes for entry in self.entries), default=0)

    def encode(self) -> bytes:
        """As it travels."""
        entries = [
            [e.operator, int(e.saved), e.key, e.dtype, e.offset, e.nbytes, e.digest, e.place] for e in self.entries
        ]
        plain_header = {
            "version": VERSION,
            "rank": self.rank,
            "iteration": self.iteration,
            "schedule": self.schedule,
            "slot": self.slot,
            "contents": self.contents,
            "entries": entries,
            "record": self.record,
            "state": self.state,
            "whole": self.whole,
            "on_disk": None if self.on_disk is None else [self.on_disk.contents, self.on_disk.without],
        }
        return json.dumps(plain_header).encode()

    @staticmethod
    def decode(data: bytes) -> Header:
        """The inverse of :meth:`encode`, for bytes from anywhere.

        Raises:
            SnapshotError: they are no header of this version, or one that contradicts itself.
        """
        try:
            found = json.loads(data)
            if found["version"] not in READ:
                raise SnapshotError(f"a snapshot of version {found['version']}; this program reads {READ_TEXT}")
            entries = tuple(
                _checked(Entry(str(o), Saved(s), str(k), str(t), _size(at), _size(n), str(d), *map(int, place)))
                for o, s, k, t, at, n, d, *place in found["entries"]
            )
            whole, on_disk = found["whole"], found.get("on_disk")
            if not isinstance(found["record"], dict | None):
                raise ValueError(f"a record of type {type(found['record']).__name__}")
            return Header(
                rank=int(found["rank"]),
                iteration=int(found["iteration"]),
                schedule=str(found["schedule"]),
                slot=int(found["slot"]),
                contents=str(found["contents"]),
                entries=entries,
                record=found["record"],
                state=int(found["state"]),
                whole=None if whole is None else {str(name): str(digest) for name, digest in whole.items()},
                on_disk=None if on_disk is None else OnDisk(str(on_disk[0]), tuple(map(str, on_disk[1]))),
            )
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
            raise SnapshotError(f"no header of a snapshot ({type(error).__name__}: {error})") from None


def _checked(entry: Entry) -> Entry:
    dtype = getattr(torch, entry.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{entry.key}: dtype {entry.dtype[:20]!r}")
    if entry.nbytes % dtype.itemsize or entry.offset % ALIGNMENT or entry.offset + entry.nbytes >= _MOST_BYTES:
        raise ValueError(f"{entry.key}: {entry.nbytes} bytes at {entry.offset}")
    return entry


def _size(value: Any) -> int:
    if not isinstance(value, int) or value < 0:
        raise ValueError(f"size {value!r}")
    return value


@dataclass(slots=True, eq=False)
class Snapshot:
    """A header and its buffer. The buffer belongs to the snapshot until the snapshot is freed, and never before."""

    header: Header
    buffer: Buffer
    """May be longer than the payload."""
    acknowledged: set[int] = field(default_factory=set)
    """Peers that have all of it."""

    @property
    def iteration(self) -> int:
        """The t of ``SS_t``."""
        return self.header.iteration

    @property
    def contents(self) -> Contents:
        """What it holds of each operator of the stage's table."""
        return contents_of(self.header.contents)

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors."""
        return sum(entry.nbytes for entry in self.header.entries)

    def bytes_of(self, entry: Entry) -> torch.Tensor:
        """The raw bytes of one tensor: a view, or a copy where they are in several pieces."""
        return self.buffer.view(entry.offset, entry.nbytes)

    def digest_now(self, entry: Entry) -> str:
        """Of the raw bytes of one tensor as they are."""
        return digest_of(*self.buffer.pieces(entry.offset, entry.nbytes))

    def in_order(self) -> list[Entry]:
        """Its tensors as they stand in the buffer."""
        return [entry for run in _runs(self.header.entries) for entry in run]

    def packed(self) -> tuple[Header, list[torch.Tensor]]:
        """As it travels and is stored: a header, and the payload that it describes, in pieces and without gaps."""
        header, pieces, offset = self.header, list[torch.Tensor](), 0
        moved = []
        for run in _runs(header.entries):
            start, end = run[0].offset, run[-1].offset + run[-1].nbytes
            if offset < _aligned(offset):
                pieces.append(torch.zeros(_aligned(offset) - offset, dtype=torch.uint8))
            offset = _aligned(offset)
            pieces += self.buffer.pieces(start, end - start)
            moved += [replace(entry, offset=entry.offset - start + offset) for entry in run]
            offset += end - start
        return replace(header, entries=tuple(moved)), pieces

    def without(self, gone: npt.NDArray[np.bool_]) -> tuple[Snapshot, list[tuple[int, int]]]:
        """The same without what it holds of some operators, in the same buffer; and where that is, from byte to byte.

        Args:
            gone: by the place of the operator in the stage's table, bool ``[operators]``.
        """
        dropped = [one for one in self.header.entries if one.place >= 0 and gone[one.place]]
        kept = tuple(one for one in self.header.entries if one.place < 0 or not gone[one.place])
        ranges = [(run[0].offset, _aligned(run[-1].offset + run[-1].nbytes)) for run in _runs(dropped)]
        contents = np.where(gone, np.int8(Saved.NOTHING), self.contents)
        header = replace(self.header, entries=kept, contents=contents_text(contents))
        return Snapshot(header, self.buffer, self.acknowledged), ranges

    def tensors_of(self, loads: Mapping[str, Saved]) -> Iterator[tuple[Entry, torch.Tensor]]:
        """Full state or compute weights of the operators named, flat, in their dtypes; see :meth:`bytes_of`."""
        for entry in self.header.entries:
            if entry.operator != BOUNDARY and loads.get(entry.operator) is entry.saved:
                yield entry, self.bytes_of(entry).view(getattr(torch, entry.dtype))

    def for_disk(self) -> Snapshot:
        """Returns what of it is written to disk: itself, or a part of it in the same buffer."""
        if self.header.on_disk is None:
            return self
        without = set(self.header.on_disk.without)
        entries = tuple(one for one in self.header.entries if one.operator not in without)
        header = replace(self.header, contents=self.header.on_disk.contents, entries=entries, on_disk=None)
        return Snapshot(header, self.buffer)

    def record(self) -> Any:
        """Boundary state and iteration record, as they were given."""
        return plain.restore(
            self.header.record, [self.bytes_of(e) for e in self.header.entries if e.operator == BOUNDARY]
        )

    def check_record(self) -> None:
        """Refuse a snapshot without the state at the boundary, which nothing can be restored from.

        Raises:
            SnapshotError: it has none, or its record cannot be read.
        """
        record = self.record()
        parts = (record.get("boundary"), record.get("iteration", {})) if isinstance(record, dict) else (None, None)
        if not isinstance(parts[0], dict) or not isinstance(parts[1], dict | None):
            raise SnapshotError(
                f"snapshot {self.iteration} of rank {self.header.rank}: its record has no boundary; another copy "
                "is needed"
            )

    def damaged(self) -> Entry | None:
        """The first tensor whose bytes are not those that were captured; nothing if all are."""
        return next((e for e in self.header.entries if self.digest_now(e) != e.digest), None)

    def check(self, where: str) -> None:
        """Refuse a snapshot that is not what was captured.

        Raises:
            SnapshotError: with the tensor, and ``where`` the snapshot was.
        """
        if self.buffer.nbytes < self.header.payload_bytes:
            raise SnapshotError(
                f"snapshot {self.iteration} of rank {self.header.rank} {where} has {self.buffer.nbytes} bytes of "
                f"{self.header.payload_bytes}; another copy is needed"
            )
        if entry := self.damaged():
            raise SnapshotError(
                f"snapshot {self.iteration} of rank {self.header.rank} {where}: {entry.name} is damaged (digest "
                f"{entry.digest} expected); another copy is needed"
            )


@dataclass(frozen=True, slots=True)
class SnapshotLease:
    """A snapshot whose buffer stays as it is until it is given back."""

    snapshot: Snapshot
    release: Callable[[], None]


def contents_of(text: str) -> Contents:
    """The inverse of :func:`contents_text`."""
    return np.frombuffer(text.encode(), dtype=np.int8) - np.int8(ord("0"))


def contents_text(contents: Contents) -> str:
    """What a snapshot holds of each operator, one digit for each."""
    return (contents + np.int8(ord("0"))).tobytes().decode()


def digest_of(*data: torch.Tensor) -> str:
    """XXH3-128 of the bytes of host tensors, one after the other.

    Finds damage; it is no protection against somebody who wants to deceive.
    """
    digest = xxhash.xxh3_128()
    for piece in data:
        digest.update(as_bytes(piece).numpy())
    return digest.hexdigest()


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor as flat uint8, without a copy."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def aligned_bytes(tensors: Iterable[StateTensor]) -> int:
    """Buffer bytes that ``tensors`` take."""
    return sum(_aligned(tensor.nbytes) for tensor in tensors)


def _runs(entries: Iterable[Entry]) -> Iterator[list[Entry]]:
    """Entries that stand one right after the other, in the order of the buffer."""
    run: list[Entry] = []
    for entry in sorted(entries, key=lambda one: (one.offset, one.nbytes)):
        if run and entry.offset != _aligned(run[-1].offset + run[-1].nbytes):
            yield run
            run = []
        run.append(entry)
    if run:
        yield run


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def offsets(tensors: Sequence[StateTensor], offset: int = 0) -> Iterator[tuple[StateTensor, int]]:
    """Where each of ``tensors`` stands in a buffer, the first at ``offset``."""
    for tensor in tensors:
        yield tensor, offset
        offset += _aligned(tensor.nbytes)


def entries_of(
    placed: Iterable[tuple[StateTensor, int]], data: torch.Tensor, places: Mapping[str, int]
) -> tuple[Entry, ...]:
    """The entries of a snapshot whose tensors stand in ``data``, with their digests.

    Args:
        placed: each tensor and its offset.
        data: host memory, uint8.
        places: of operators in their stage's table.
    """
    return tuple(
        Entry(
            t.operator, t.saved, t.key, str(t.tensor.dtype).removeprefix("torch."), at, t.nbytes,
            digest_of(data[at : at + t.nbytes]), places.get(t.operator, -1),
        )
        for t, at in placed
    )  # fmt: skip


def numpy_bytes(tensor: torch.Tensor) -> np.ndarray:
    """A host tensor's bytes as an array, without a copy."""
    return as_bytes(tensor).numpy()
