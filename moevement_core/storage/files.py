"""Snapshot as a file; ``docs/file_format.md`` describes the bytes.

A file begins with magic, version, length and digest of the header, and the header. The payload (the bytes of the
tensors, without gaps) follows from the next multiple of 64 bytes on. Ranks write a file under another name, make it
durable, and then rename it. So a file with a final name is complete.
"""

from __future__ import annotations

import itertools
import os
import re
import struct
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

from moevement_core.errors import SnapshotError
from moevement_core.snapshot.buffer import Buffer
from moevement_core.snapshot.snapshot import ALIGNMENT, READ, READ_TEXT, VERSION, Header, Snapshot, numpy_bytes
from moevement_core.util.file_modes import opener
from moevement_core.util.regular_files import open_regular

MAGIC = b"MoEvSnap"
_PREFIX = struct.Struct("<8sIIQ16s")  # magic, version, unused, header bytes, XXH3-128 of the header
_NAME = re.compile(r"rank_(\d{5})_iteration_(\d{7})\.snapshot")
_PARTIAL = re.compile(r"\.rank_\d{5}_iteration_\d{7}\.snapshot\.\d+(\.\d+)?")
_attempts = itertools.count()
_MAX_HEADER_BYTES = 1 << 30
FRONT_BYTES = 1 << 16
"""Bytes from the beginning of a file that usually hold the whole header."""


def file_name(owner: int, iteration: int) -> str:
    """Return the name of the file with ``SS_iteration`` of rank ``owner``."""
    return f"rank_{owner:05d}_iteration_{iteration:07d}.snapshot"


def owner_and_iteration(name: str) -> tuple[int, int] | None:
    """Return the owner and iteration in a name of :func:`file_name`; None for any other name."""
    match = _NAME.fullmatch(name)
    return (int(match[1]), int(match[2])) if match else None


def is_snapshot_file(name: str) -> bool:
    """Return True if ``name`` has the form that :func:`write_snapshot` gives to finished or to unfinished files."""
    return _NAME.fullmatch(name) is not None or _PARTIAL.fullmatch(name) is not None


def write_snapshot(folder: Path, snapshot: Snapshot, is_wanted: Callable[[], bool] = lambda: True) -> None:
    """Write ``snapshot`` into ``folder``, and return when the file is durable.

    Args:
        folder: existing folder.
        snapshot: snapshot, whose buffer must stay unchanged until this function returns.
        is_wanted: function that is called when the file is durable. If it returns False, the file is deleted instead of
            getting its final name.

    Raises:
        OSError: the disk is full, or the folder cannot be written.
    """
    front, pieces = encode_front(snapshot)
    path = folder / file_name(snapshot.header.rank, snapshot.iteration)
    # Every attempt has its own name, because a thread on a stalled disk may still write an earlier attempt.
    partial = path.with_name(f".{path.name}.{os.getpid()}.{next(_attempts)}")
    try:
        with open(partial, "wb", buffering=0, opener=opener) as file:
            _write_all(file.fileno(), memoryview(front))
            for piece in pieces:
                _write_all(file.fileno(), memoryview(numpy_bytes(piece).data))
            os.fsync(file.fileno())
        if is_wanted():
            os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def encode_front(snapshot: Snapshot) -> tuple[bytes, list[torch.Tensor]]:
    """Return the bytes of a file before its payload, and the pieces of the payload: uint8 tensors, contiguous."""
    packed, pieces = snapshot.packed()
    header = packed.encode()
    prefix = _PREFIX.pack(MAGIC, VERSION, 0, len(header), xxhash.xxh3_128_digest(header))
    return (prefix + header).ljust(payload_at(len(prefix) + len(header)), b"\0"), pieces


def front_bytes(front: bytes, name: str) -> int:
    """Return the bytes of a file up to the end of its header.

    Args:
        front: bytes from the beginning of the file.
        name: name of the file, for messages.

    Raises:
        SnapshotError: the file is no snapshot, or of another version.
    """
    if len(front) < _PREFIX.size or not front.startswith(MAGIC):
        raise SnapshotError(f"{name}: the file is no snapshot, or was cut off; another copy is needed")
    _, version, _, length, _ = _PREFIX.unpack_from(front)
    if version not in READ:
        raise SnapshotError(f"{name}: the file has version {version}; this program reads {READ_TEXT}")
    if length > _MAX_HEADER_BYTES:
        raise SnapshotError(f"{name}: the header is damaged; another copy is needed")
    return _PREFIX.size + int(length)


def header_digest(front: bytes) -> str:
    """Return the digest of the header that the beginning of a file records, as hexadecimal text."""
    return bytes(_PREFIX.unpack_from(front)[4]).hex()


def decode_header(front: bytes, name: str) -> Header:
    """Return the header of a file.

    Args:
        front: bytes of the file up to the end of its header (:func:`front_bytes`).
        name: name of the file, for messages.

    Raises:
        SnapshotError: the header is damaged or of another version.
    """
    encoded = front[_PREFIX.size :]
    if xxhash.xxh3_128_digest(encoded) != _PREFIX.unpack_from(front)[4]:
        raise SnapshotError(f"{name}: the header is damaged; another copy is needed")
    try:
        return Header.decode(encoded)
    except SnapshotError as error:
        raise SnapshotError(f"{name}: {error}; another copy is needed") from None


def payload_at(header_end: int) -> int:
    """Return the offset of a file's payload.

    Args:
        header_end: offset of the first byte after the header.
    """
    return -(-header_end // ALIGNMENT) * ALIGNMENT


def _write_all(descriptor: int, data: memoryview) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def read_header(path: Path) -> Header:
    """Return the header of a snapshot file.

    Raises:
        SnapshotError: the file is missing, cut off, damaged, or of another version.
    """
    return _read(path)[0]


def read_snapshot(path: Path) -> Snapshot:
    """Return the snapshot in a file. Its tensors are unchecked; the caller calls :meth:`Snapshot.check`.

    Raises:
        SnapshotError: the file is missing, cut off, or of another version, or its header is damaged.
    """
    header, payload_at = _read(path)
    try:
        with open_regular(path) as file:
            if (nbytes := os.fstat(file.fileno()).st_size) < payload_at + header.payload_bytes:
                raise SnapshotError(
                    f"{path}: the file has {nbytes} bytes instead of {payload_at + header.payload_bytes}; another copy "
                    "is needed"
                )
            buffer = torch.empty(header.payload_bytes, dtype=torch.uint8)
            file.seek(payload_at)
            view, got = memoryview(buffer.numpy().data), 0
            while got < len(view):
                if not (count := file.readinto(view[got:])):  # type: ignore[attr-defined]
                    raise SnapshotError(f"{path}: the file ends after {payload_at + got} bytes; another copy is needed")
                got += count
    except OSError as error:
        raise SnapshotError(f"{path}: {error.strerror}; another copy of the file is needed") from None
    return Snapshot(header, Buffer(buffer))


def read_record(path: Path) -> Any:
    """Return the boundary record in a snapshot file. Only the record's bytes are read, and not checked.

    Raises:
        SnapshotError: the file is missing, cut off, or of another version, or its header is damaged.
    """
    header, payload_at = _read(path)
    try:
        mapped = np.memmap(path, dtype=np.uint8, mode="r", offset=payload_at, shape=(header.payload_bytes,))
    except (OSError, ValueError) as error:
        raise SnapshotError(f"{path}: {error}; another copy of the file is needed") from None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that the memory is read-only, and nothing writes to it
        return Snapshot(header, Buffer(torch.from_numpy(mapped))).record()


def payload_start(path: Path) -> int:
    """Return the offset in bytes at which the tensors of a snapshot file begin.

    Raises:
        SnapshotError: the file has no valid header; see :func:`read_header`.
    """
    return _read(path)[1]


def _read(path: Path) -> tuple[Header, int]:
    try:
        with open_regular(path) as file:
            front = file.read(_PREFIX.size)
            length = front_bytes(front, str(path)) - _PREFIX.size
            left = os.fstat(file.fileno()).st_size - _PREFIX.size
            front += file.read(length) if length <= left else b""
    except OSError as error:
        raise SnapshotError(f"{path}: {error.strerror}; another copy of the file is needed") from None
    return decode_header(front, str(path)), payload_at(_PREFIX.size + length)
