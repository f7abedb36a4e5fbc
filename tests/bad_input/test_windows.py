"""Windows on disk that were edited by hand or replaced by a pipe, socket, device or folder are refused by name."""

from __future__ import annotations

import errno
import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import xxhash

from moevement_core.errors import SnapshotError
from moevement_core.policy.window import WindowKind
from moevement_core.storage import files
from moevement_core.storage.manifest import Manifest, manifests, manifests_and_refused, read_manifest
from moevement_core.util.lock import LOCK, acquire
from tests.bad_input.command import within
from tests.unit.recovery.toy import Toy

LIMIT_S = 20
Change = Callable[[dict[str, Any]], Any]


def fifo(path: Path) -> None:
    os.mkfifo(path)


def unix_socket(path: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # a socket's path has 107 bytes at most
    try:
        with socket.socket(socket.AF_UNIX) as its:
            its.bind(path.name)
    finally:
        os.chdir(here)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


STRANGE = [fifo, unix_socket, device, Path.mkdir]


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    written = Manifest("abcd", 3, 5, 5, {"iteration": 5, "consumed_train_samples": 40}, {"lr": 1e-3, "seed": 1})
    written.write(tmp_path)
    path = tmp_path / f"{written.name}.json"
    assert read_manifest(path) == written
    return path


@pytest.mark.parametrize(
    "change",
    [
        lambda found: found["progress"].update(consumed_train_samples=0),
        lambda found: found["progress"].update(iteration=4),
        lambda found: found["settings"].update(lr=2e-3),
        lambda found: found["settings"].pop("seed"),
        lambda found: found.update(first=4),
        lambda found: found.update(job="beef"),
        lambda found: found.update(digest="0" * 32),
        lambda found: found.update(digest=7),
        lambda found: found.update(more=1),
        lambda found: found.pop("digest"),
        lambda found: found.pop("reaches"),
    ],
)
def test_a_manifest_that_was_edited_is_refused(manifest: Path, change: Change) -> None:
    found = json.loads(manifest.read_text())
    change(found)
    manifest.write_text(json.dumps(found))
    with pytest.raises(SnapshotError, match=manifest.name):
        read_manifest(manifest)
    assert not manifests(manifest.parent)
    _, refused = manifests_and_refused(manifest.parent)
    assert list(refused) == [manifest.stem], "whoever loads hears of it"


def test_blanks_and_order_are_no_edit(manifest: Path) -> None:
    found = json.loads(manifest.read_text())
    manifest.write_text(json.dumps(dict(reversed(found.items()))))
    assert read_manifest(manifest).is_sealed


def test_the_version_before_has_no_digest_and_is_loaded(manifest: Path) -> None:
    found = {**json.loads(manifest.read_text()), "version": 1}
    del found["digest"]
    manifest.write_text(json.dumps(found))
    assert not read_manifest(manifest).is_sealed
    assert [one.reaches for one in manifests(manifest.parent)] == [5]


@pytest.mark.parametrize(
    "fields",
    [
        {"progress": []}, {"progress": None}, {"progress": {"iteration": "five"}}, {"progress": {"iteration": -1}},
        {"progress": {"iteration": 1.5}}, {"settings": []}, {"settings": 3}, {"first": "3"}, {"first": -1},
        {"first": 9}, {"last": 1 << 60}, {"last": None}, {"reaches": "5"}, {"reaches": 6}, {"reaches": True},
        {"job": 7}, {"job": "../../etc"}, {"version": 3}, {"version": None}, {"version": [1]}, {"unknown": 1},
    ],
)  # fmt: skip
def test_what_one_without_a_digest_cannot_say(manifest: Path, fields: dict[str, Any]) -> None:
    found = {**json.loads(manifest.read_text()), "version": 1, **fields}
    del found["digest"]
    manifest.write_text(json.dumps(found))
    with pytest.raises(SnapshotError, match=manifest.name):
        read_manifest(manifest)


@pytest.mark.parametrize("content", [b"", b"[]", b"3", b"\xff\xfe", b"[" * 100_000, b'{"version": 1', b"null"])
def test_what_is_no_manifest(manifest: Path, content: bytes) -> None:
    manifest.write_bytes(content)
    with pytest.raises(SnapshotError, match=manifest.name):
        read_manifest(manifest)


@pytest.mark.parametrize("make", STRANGE)
def test_a_manifest_that_is_no_file_is_not_waited_for(manifest: Path, make: Callable[[Path], None]) -> None:
    manifest.unlink()
    make(manifest)
    with within(LIMIT_S):
        found, refused = manifests_and_refused(manifest.parent)
    assert not found
    assert list(refused) == [manifest.stem]


@pytest.mark.parametrize("make", STRANGE)
def test_a_lock_that_is_no_file_is_not_waited_for(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / LOCK)
    with within(LIMIT_S), pytest.raises(OSError, match=LOCK) as raised:
        acquire(tmp_path, "abcd", "--run-dir", may_wait=False)
    assert raised.value.errno in (errno.EINVAL, errno.EISDIR, errno.ENXIO)


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    files.write_snapshot(tmp_path, Toy(2, WindowKind.ALIGNED).snapshot(7, 7, {"norm": 0.5}))
    return tmp_path / files.file_name(0, 7)


@pytest.mark.parametrize("make", STRANGE)
def test_a_snapshot_that_is_no_file_is_not_waited_for(snapshot: Path, make: Callable[[Path], None]) -> None:
    snapshot.unlink()
    make(snapshot)
    for read in (files.read_header, files.read_snapshot):
        with within(LIMIT_S), pytest.raises(SnapshotError, match=snapshot.name):
            read(snapshot)


def edit(path: Path, change: Change) -> None:
    """Change the header of a snapshot and make its digest right again, as a person does who knows the format."""
    data = path.read_bytes()
    prefix = files._PREFIX
    magic, version, nothing, length, _ = prefix.unpack(data[: prefix.size])
    found = json.loads(data[prefix.size : prefix.size + length])
    payload = data[files._payload_at(length) :]
    header = json.dumps(change(found) or found).encode()
    begin = prefix.pack(magic, version, nothing, len(header), xxhash.xxh3_128_digest(header)) + header
    path.write_bytes(begin.ljust(files._payload_at(len(header)), b"\0") + payload)


def entry(place: int, value: Any) -> Change:
    """Return a change of the first tensor's entry: operator, saved, key, dtype, offset, bytes, digest, place."""

    def change(found: dict[str, Any]) -> None:
        found["entries"][0][place] = value

    return change


@pytest.mark.parametrize(
    "change",
    [
        entry(1, 99), entry(1, "full"), entry(3, "load"), entry(3, "nn"), entry(3, ""), entry(3, "float1024"),
        entry(3, "__dict__"), entry(4, 1 << 60), entry(4, 1 << 200), entry(4, -64), entry(4, 3), entry(4, None),
        entry(5, 1 << 60), entry(5, 1 << 62), entry(5, -1), entry(5, 3), entry(5, "many"), entry(7, "first"),
        lambda found: found.update(record=[]), lambda found: found.update(record="x"),
        lambda found: found.update(record=7),
        lambda found: found.update(entries={}) or found["entries"].update(a=1),
        lambda found: found.update(entries=[1]), lambda found: found.update(entries=None),
        lambda found: found.update(whole=[1]), lambda found: found.update(on_disk=[]),
        lambda found: found.update(iteration="seven"), lambda found: found.update(rank=None),
        lambda found: found.update(version=99), lambda found: found.pop("version"), lambda found: found.pop("state"),
        lambda found: found.pop("contents"), lambda found: [found],
    ],
)  # fmt: skip
def test_a_snapshot_whose_header_was_edited_is_refused(snapshot: Path, change: Change) -> None:
    edit(snapshot, change)
    with within(LIMIT_S), pytest.raises(SnapshotError, match=snapshot.name):
        files.read_snapshot(snapshot)


def test_an_edit_of_nothing_is_read(snapshot: Path) -> None:
    edit(snapshot, lambda found: None)
    found = files.read_snapshot(snapshot)
    found.check("on disk")
    found.check_record()


@pytest.mark.parametrize("record", [None, {}, {"boundary": 1}, {"boundary": {}, "iteration": 3},
                                    {"@tensor": [99, "float32", [1]]}, {"@tensor": [0, "load", [1]]},
                                    {"@mapping": 3}, {"@bytes": "x"}, {"@array": [{}, "nothing"]}])  # fmt: skip
def test_a_record_of_another_type_is_refused(snapshot: Path, record: Any) -> None:
    edit(snapshot, lambda found: found.update(record=record))
    found = files.read_snapshot(snapshot)
    with pytest.raises(SnapshotError):
        found.check_record()


def test_a_length_beyond_the_file_takes_no_memory(snapshot: Path) -> None:
    data = bytearray(snapshot.read_bytes())
    data[16:24] = (1 << 29).to_bytes(8, "little")
    snapshot.write_bytes(data)
    with pytest.raises(SnapshotError, match=rf"{snapshot.name}.*\bheader\b"):
        files.read_header(snapshot)
