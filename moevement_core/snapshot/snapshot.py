"""Snapshot of one rank: tensors of the rank's state in a host buffer, and a header that describes the tensors.

The buffer holds raw tensors, each at a multiple of 64 bytes. The header is JSON with the offset, dtype and digest of
each tensor; the capturing rank computes digests right after the copy. Peers and files hold the same form, so any holder
can check a snapshot without knowing the model. A holder may free tensors that no recovery needs. When it sends or
writes the others, it closes the gaps.
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

from moevement_core.comms import plain
from moevement_core.errors import SnapshotError
from moevement_core.policy.schedule import Contents, Saved
from moevement_core.snapshot.buffer import Buffer

VERSION = 3
READ = (2, 3)
"""Versions of the header that this program reads. Entries of version 2 have no :attr:`Entry.place`."""
READ_TEXT = f"versions {' and '.join(map(str, READ))}"
ALIGNMENT = 64
_MOST_BYTES = 1 << 62
BOUNDARY = ""
"""Operator name of the tensors that belong to the boundary record."""


@dataclass(frozen=True, slots=True, eq=False)
class StateTensor:
    """Tensor of an operator's live state, as a flat view."""

    operator: str
    saved: Saved
    """Part of the operator's state that the tensor belongs to: compute weights, full state or gradient."""
    key: str
    """Text that names the parameter, the range of its elements, and the kind of tensor (weight, exp_avg, step ...)."""
    tensor: torch.Tensor
    """View of the live state, never a copy; contiguous, of any dtype, on any device. It is detached from autograd."""

    def __post_init__(self) -> None:
        # Otherwise a load would write into a view of a leaf, which autograd refuses once the leaf requires a gradient.
        object.__setattr__(self, "tensor", self.tensor.detach())

    @property
    def nbytes(self) -> int:
        """Size of the tensor in bytes."""
        return self.tensor.numel() * self.tensor.element_size()


@dataclass(frozen=True, slots=True)
class Entry:
    """Description of one tensor in a snapshot's buffer."""

    operator: str
    saved: Saved
    key: str
    dtype: str
    offset: int
    nbytes: int
    digest: str
    """XXH3 digest of the tensor's bytes, 128 bits in hexadecimal."""
    place: int = -1
    """Index of the operator in the stage's table, and in :attr:`Header.contents`; -1 for the boundary record."""

    @property
    def name(self) -> str:
        """Name of the tensor as text, for messages."""
        return f"{self.key} of {self.operator or 'the boundary record'}"


@dataclass(frozen=True, slots=True)
class SnapshotPart:
    """Part of a snapshot that is written to disk, or sent to peers."""

    contents: str
    """Contents of the part, in the form of :attr:`Header.contents`."""
    without: tuple[str, ...]
    """Names of the operators that are left out."""
    of_stage: str = ""
    """Contents of the part according to the schedule, so equal on every rank of the stage.

    Ranks decide by this field which older snapshots to keep, so all ranks of a stage keep the same iterations. The
    field :attr:`contents` may differ between ranks: it marks an operator as left out only if the rank has tensors of
    the operator.
    """


@dataclass(frozen=True, slots=True)
class Header:
    """Header of a snapshot: rank and iteration of the capture, and a description of each tensor."""

    rank: int
    iteration: int
    schedule: str
    """Id of the schedule by which the rank captured the snapshot."""
    slot: int
    contents: str
    """Contents of the snapshot: one digit of :class:`Saved` for each operator of the stage's table."""
    entries: tuple[Entry, ...]
    record: Any
    """Boundary state and iteration record as plain data. The tensors of both are among the entries."""
    state: int
    """Iteration whose state the snapshot holds.

    It equals ``iteration``, except in the snapshots of the iterations before a job's first one. They all hold the state
    from which the job starts.
    """
    whole: dict[str, str] | None = None
    """Digest of the whole live state of each requested operator, by name; None if the capture requested no digest.

    A recovery compares the replayed state with these digests. The snapshot may hold only a part of the digested state.
    """
    on_disk: SnapshotPart | None = None
    """Part that is written to disk; None if the whole snapshot is written."""
    at_peers: SnapshotPart | None = None
    """Part that peers receive; None if they receive the whole snapshot. Headers at peers have this field too."""

    @property
    def payload_bytes(self) -> int:
        """Bytes of the buffer up to the end of its last tensor."""
        return max((entry.offset + entry.nbytes for entry in self.entries), default=0)

    def encode(self) -> bytes:
        """Return the header as JSON bytes, as peers and files hold it."""
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
            "on_disk": _plain_part(self.on_disk),
            "at_peers": _plain_part(self.at_peers),
        }
        return json.dumps(plain_header).encode()

    @staticmethod
    def decode(data: bytes) -> Header:
        """Return the header from the bytes that :meth:`encode` returned; ``data`` may come from an untrusted source.

        Raises:
            SnapshotError: ``data`` is not a header, has a version that this program does not read, or has impossible
                values.
        """
        try:
            fields = json.loads(data)
            if fields["version"] not in READ:
                raise SnapshotError(f"the snapshot has version {fields['version']}; this program reads {READ_TEXT}")
            entries = tuple(
                _checked(Entry(str(o), Saved(s), str(k), str(t), _size(at), _size(n), str(d), *map(int, place)))
                for o, s, k, t, at, n, d, *place in fields["entries"]
            )
            whole = fields["whole"]
            if not isinstance(fields["record"], dict | None):
                raise ValueError(f"the record must be a dict or null, but is a {type(fields['record']).__name__}")
            return Header(
                rank=int(fields["rank"]),
                iteration=int(fields["iteration"]),
                schedule=str(fields["schedule"]),
                slot=int(fields["slot"]),
                contents=str(fields["contents"]),
                entries=entries,
                record=fields["record"],
                state=int(fields["state"]),
                whole=None if whole is None else {str(name): str(digest) for name, digest in whole.items()},
                on_disk=_part_of(fields.get("on_disk")),
                at_peers=_part_of(fields.get("at_peers")),
            )
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
            raise SnapshotError(f"the header cannot be read ({type(error).__name__}: {error})") from None


def _plain_part(part: SnapshotPart | None) -> list[Any] | None:
    return None if part is None else [part.contents, part.without, part.of_stage]


def _part_of(fields: Any) -> SnapshotPart | None:
    """Return a part from a header; headers of older programs lack :attr:`SnapshotPart.of_stage`."""
    if fields is None:
        return None
    contents, without, *of_stage = fields
    return SnapshotPart(str(contents), tuple(map(str, without)), *map(str, of_stage[:1]))


def _checked(entry: Entry) -> Entry:
    dtype = getattr(torch, entry.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{entry.key} has dtype {entry.dtype[:20]!r}, which is no dtype of torch")
    if entry.nbytes % dtype.itemsize or entry.offset % ALIGNMENT or entry.offset + entry.nbytes >= _MOST_BYTES:
        raise ValueError(
            f"{entry.key} has {entry.nbytes} bytes at offset {entry.offset}; it needs a whole number of "
            "elements, an aligned offset, and an end within the largest possible buffer"
        )
    return entry


def _size(value: Any) -> int:
    if not isinstance(value, int) or value < 0:
        raise ValueError(f"sizes and offsets must be whole numbers of 0 or more, but one is {value!r}")
    return value


@dataclass(slots=True, eq=False)
class Snapshot:
    """Header and buffer of a snapshot. The arena does not reuse the buffer before the snapshot is freed."""

    header: Header
    buffer: Buffer
    """Buffer with the payload; it may be longer than the payload."""
    acknowledged: set[int] = field(default_factory=set)
    """Peers that have acknowledged the whole snapshot."""

    @property
    def iteration(self) -> int:
        """Iteration t of ``SS_t``."""
        return self.header.iteration

    @property
    def contents(self) -> Contents:
        """Part of each operator's state that the snapshot holds, values of :class:`Saved`, int8 ``[operators]``."""
        return contents_of(self.header.contents)

    @property
    def contents_at_peers(self) -> Contents:
        """Part of each operator's state that peers receive, by the schedule of the stage, int8 ``[operators]``."""
        return self.contents if (part := self.header.at_peers) is None else contents_of(part.of_stage)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors of the snapshot."""
        return sum(entry.nbytes for entry in self.header.entries)

    def bytes_of(self, entry: Entry) -> torch.Tensor:
        """Return the raw bytes of one tensor: a view, or a copy if the bytes are in several pieces."""
        return self.buffer.view(entry.offset, entry.nbytes)

    def in_order(self) -> list[Entry]:
        """Return the entries in the order of the buffer."""
        return [entry for run in _runs(self.header.entries) for entry in run]

    def packed(self) -> tuple[Header, list[torch.Tensor]]:
        """Return the form in which the snapshot is sent and stored: a header, and payload pieces without gaps."""
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

    def without(self, operators: npt.NDArray[np.bool_]) -> tuple[Snapshot, list[tuple[int, int]]]:
        """Return the snapshot without some operators, in the same buffer, and the bytes that the caller may free.

        Args:
            operators: operators to leave out, by their index in the stage's table, bool ``[operators]``.

        Returns:
            The smaller snapshot, and the ranges of the buffer to free, each as first byte and byte after the last byte.
        """
        dropped = [entry for entry in self.header.entries if entry.place >= 0 and operators[entry.place]]
        kept = tuple(entry for entry in self.header.entries if entry.place < 0 or not operators[entry.place])
        ranges = [(run[0].offset, _aligned(run[-1].offset + run[-1].nbytes)) for run in _runs(dropped)]
        contents = np.where(operators, np.int8(Saved.NOTHING), self.contents)
        header = replace(self.header, entries=kept, contents=contents_text(contents))
        return Snapshot(header, self.buffer, self.acknowledged), ranges

    def tensors_of(self, loads: Mapping[str, Saved]) -> Iterator[tuple[Entry, torch.Tensor]]:
        """Yield the entry and the tensor for each operator and part of its state that ``loads`` names.

        Tensors are flat, in their dtypes, and are views or copies as in :meth:`bytes_of`.
        """
        for entry in self.header.entries:
            if entry.operator != BOUNDARY and loads.get(entry.operator) is entry.saved:
                yield entry, self.bytes_of(entry).view(getattr(torch, entry.dtype))

    def for_disk(self) -> Snapshot:
        """Return the snapshot that is written to disk: this snapshot, or a part of it in the same buffer."""
        return self if (part := self.header.on_disk) is None else self._part(part, on_disk=None)

    def for_peers(self) -> Snapshot:
        """Return the snapshot that peers receive: this snapshot, or a part of it in the same buffer."""
        return self if (part := self.header.at_peers) is None else self._part(part)

    def _part(self, part: SnapshotPart, **changes: Any) -> Snapshot:
        without = set(part.without)
        entries = tuple(entry for entry in self.header.entries if entry.operator not in without)
        header = replace(self.header, contents=part.contents, entries=entries, **changes)
        return Snapshot(header, self.buffer, self.acknowledged)

    def record(self) -> Any:
        """Return the boundary state and iteration record in the form in which the capture received them."""
        return plain.restore(
            self.header.record, [self.bytes_of(e) for e in self.header.entries if e.operator == BOUNDARY]
        )

    def check_record(self) -> None:
        """Refuse a snapshot without boundary state, because no recovery can use it.

        Raises:
            SnapshotError: the record has no boundary state, or cannot be read.
        """
        record = self.record()
        parts = (record.get("boundary"), record.get("iteration", {})) if isinstance(record, dict) else (None, None)
        if not isinstance(parts[0], dict) or not isinstance(parts[1], dict | None):
            raise SnapshotError(
                f"snapshot {self.iteration} of rank {self.header.rank} has no boundary state; another copy of the "
                "snapshot is needed"
            )

    def damaged(self) -> Entry | None:
        """Return the first tensor whose bytes do not match their digest; None if all match."""
        entries, pieces = self.header.entries, self.buffer.pieces
        return next((e for e in entries if digest_of(*pieces(e.offset, e.nbytes)) != e.digest), None)

    def check(self, where: str) -> None:
        """Refuse a snapshot whose bytes differ from the captured bytes.

        Args:
            where: location of the snapshot as text, for the message.

        Raises:
            SnapshotError: the buffer is too short, or a tensor is damaged. The message has ``where`` and the tensor.
        """
        if self.buffer.nbytes < self.header.payload_bytes:
            raise SnapshotError(
                f"snapshot {self.iteration} of rank {self.header.rank} {where} has {self.buffer.nbytes} bytes, but its "
                f"header describes {self.header.payload_bytes}; another copy is needed"
            )
        if entry := self.damaged():
            raise SnapshotError(
                f"snapshot {self.iteration} of rank {self.header.rank} {where}: {entry.name} is damaged; its digest "
                f"should be {entry.digest}; another copy is needed"
            )


@dataclass(frozen=True, slots=True)
class SnapshotLease:
    """Snapshot whose buffer stays unchanged until ``release`` is called."""

    snapshot: Snapshot
    release: Callable[[], None]


def contents_of(text: str) -> Contents:
    """Return the contents that :func:`contents_text` has turned into ``text``."""
    return np.frombuffer(text.encode(), dtype=np.int8) - np.int8(ord("0"))


def contents_text(contents: Contents) -> str:
    """Return the contents of a snapshot as text, one digit for each operator."""
    return (contents + np.int8(ord("0"))).tobytes().decode()


def digest_of(*data: torch.Tensor) -> str:
    """Return the XXH3-128 digest, in hexadecimal, of the bytes of host tensors in order.

    The digest detects damage. It gives no protection against an attacker.
    """
    digest = xxhash.xxh3_128()
    for piece in data:
        digest.update(as_bytes(piece).numpy())
    return digest.hexdigest()


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor as flat uint8, without a copy."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def aligned_bytes(tensors: Iterable[StateTensor]) -> int:
    """Return the bytes that ``tensors`` take in a buffer, gaps for alignment included."""
    return sum(_aligned(tensor.nbytes) for tensor in tensors)


def _runs(entries: Iterable[Entry]) -> Iterator[list[Entry]]:
    """Yield the entries in the order of the buffer, in groups without gaps inside."""
    run: list[Entry] = []
    for entry in sorted(entries, key=lambda item: (item.offset, item.nbytes)):
        if run and entry.offset != _aligned(run[-1].offset + run[-1].nbytes):
            yield run
            run = []
        run.append(entry)
    if run:
        yield run


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def offsets(tensors: Sequence[StateTensor], offset: int = 0) -> Iterator[tuple[StateTensor, int]]:
    """Yield each tensor with its offset in a buffer, the first at ``offset`` bytes."""
    for tensor in tensors:
        yield tensor, offset
        offset += _aligned(tensor.nbytes)


def entries_of(
    placed: Iterable[tuple[StateTensor, int]], data: torch.Tensor, places: Mapping[str, int]
) -> tuple[Entry, ...]:
    """Return the entries of a snapshot whose tensors are in ``data``, with their digests.

    Args:
        placed: each tensor and its offset in bytes.
        data: host memory, uint8.
        places: index of each operator in its stage's table.
    """
    return tuple(
        Entry(
            operator=t.operator, saved=t.saved, key=t.key, dtype=str(t.tensor.dtype).removeprefix("torch."), offset=at,
            nbytes=t.nbytes, digest=digest_of(data[at : at + t.nbytes]), place=places.get(t.operator, -1),
        )
        for t, at in placed
    )  # fmt: skip


def numpy_bytes(tensor: torch.Tensor) -> np.ndarray:
    """Return the bytes of a host tensor as an array, without a copy."""
    return as_bytes(tensor).numpy()
