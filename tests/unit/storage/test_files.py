"""A snapshot file is read back as it was written, or refused with an error that names it."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path
from random import Random

import pytest
import torch

from moevement_core.errors import SnapshotError
from moevement_core.policy.window import WindowKind
from moevement_core.snapshot.snapshot import ALIGNMENT
from moevement_core.storage.files import file_name, owner_and_iteration, read_header, read_snapshot, write_snapshot
from tests.unit.recovery.toy import Toy


@pytest.fixture
def written(tmp_path: Path) -> Path:
    write_snapshot(tmp_path, Toy(2, WindowKind.ALIGNED).snapshot(7, 7, {"norm": 0.5}))
    return tmp_path / file_name(0, 7)


def test_it_comes_back(written: Path) -> None:
    snapshot = read_snapshot(written)
    snapshot.check("on disk")
    original = Toy(2, WindowKind.ALIGNED).snapshot(7, 7, {"norm": 0.5})
    assert snapshot.header == original.header == read_header(written)
    assert torch.equal(snapshot.buffer.view(0, snapshot.buffer.nbytes), torch.cat(original.packed()[1]))
    assert snapshot.record() == original.record()
    assert owner_and_iteration(written.name) == (0, 7)
    assert list(written.parent.iterdir()) == [written], "nothing unfinished is left"


def test_the_payload_begins_at_a_multiple_of_the_alignment(written: Path) -> None:
    assert (written.stat().st_size - read_header(written).payload_bytes) % ALIGNMENT == 0


@pytest.mark.parametrize("seed", range(40))
def test_any_damaged_byte_is_found(written: Path, seed: int) -> None:
    data = bytearray(written.read_bytes())
    place = Random(seed).randrange(len(data))
    padding = _padding(written)
    data[place] ^= 1 << Random(seed).randrange(8)
    written.write_bytes(data)
    if place in padding:
        read_snapshot(written).check("on disk")
        return
    with pytest.raises(SnapshotError):
        read_snapshot(written).check("on disk")


def _padding(path: Path) -> set[int]:
    """Return the positions of the bytes that no header and no tensor covers."""
    header = read_header(path)
    start = path.stat().st_size - header.payload_bytes
    used = {start + entry.offset + at for entry in header.entries for at in range(entry.nbytes)}
    prefix = 40 + len(header.encode())
    return set(range(12, 16)) | (set(range(prefix, path.stat().st_size)) - used)


@pytest.mark.parametrize("kept", [0, 5, 39, 60, 400, -1])
def test_a_cut_off_file_is_refused(written: Path, kept: int) -> None:
    written.write_bytes(written.read_bytes()[:kept])
    with pytest.raises(SnapshotError, match=r"rank_00000_iteration_0000007\.snapshot"):
        read_snapshot(written)


def test_another_version_and_no_file_are_refused(written: Path) -> None:
    data = bytearray(written.read_bytes())
    data[8] = 99
    written.write_bytes(data)
    with pytest.raises(SnapshotError, match=rf"{re.escape(written.name)}.*\bversion 99\b.*\b2\b.*\b3\b"):
        read_header(written)
    written.unlink()
    with pytest.raises(SnapshotError, match=rf"{re.escape(written.name)}.*{os.strerror(errno.ENOENT)}"):
        read_snapshot(written)
    assert owner_and_iteration("rank_1.snapshot") is None
