"""Check that edited windows on disk, and a pipe, socket, device or folder in their place, are refused by name."""

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
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path.name)
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
        lambda fields: fields["progress"].update(consumed_train_samples=0),
        lambda fields: fields["progress"].update(iteration=4),
        lambda fields: fields["settings"].update(lr=2e-3),
        lambda fields: fields["settings"].pop("seed"),
        lambda fields: fields.update(first=4),
        lambda fields: fields.update(job="beef"),
        lambda fields: fields.update(digest="0" * 32),
        lambda fields: fields.update(digest=7),
        lambda fields: fields.update(more=1),
        lambda fields: fields.pop("digest"),
        lambda fields: fields.pop("reaches"),
    ],
)
def test_a_manifest_that_was_edited_is_refused(manifest: Path, change: Change) -> None:
    fields = json.loads(manifest.read_text())
    change(fields)
    manifest.write_text(json.dumps(fields))
    with pytest.raises(SnapshotError, match=manifest.name):
        read_manifest(manifest)
    assert not manifests(manifest.parent)
    _, refused = manifests_and_refused(manifest.parent)
    assert list(refused) == [manifest.stem], "whoever loads hears of it"


def test_blanks_and_order_are_no_edit(manifest: Path) -> None:
    fields = json.loads(manifest.read_text())
    manifest.write_text(json.dumps(dict(reversed(fields.items()))))
    assert read_manifest(manifest).is_sealed


def test_the_version_before_has_no_digest_and_is_loaded(manifest: Path) -> None:
    fields = {**json.loads(manifest.read_text()), "version": 1}
    del fields["digest"]
    manifest.write_text(json.dumps(fields))
    assert not read_manifest(manifest).is_sealed
    assert [loaded.reaches for loaded in manifests(manifest.parent)] == [5]


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
    content = {**json.loads(manifest.read_text()), "version": 1, **fields}
    del content["digest"]
    manifest.write_text(json.dumps(content))
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
        loaded, refused = manifests_and_refused(manifest.parent)
    assert not loaded
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
    """Change the header of a snapshot and recompute its digest, as a person who knows the format can."""
    data = path.read_bytes()
    prefix = files._PREFIX
    magic, version, nothing, length, _ = prefix.unpack(data[: prefix.size])
    fields = json.loads(data[prefix.size : prefix.size + length])
    payload = data[files.payload_at(prefix.size + length) :]
    header = json.dumps(change(fields) or fields).encode()
    begin = prefix.pack(magic, version, nothing, len(header), xxhash.xxh3_128_digest(header)) + header
    path.write_bytes(begin.ljust(files.payload_at(prefix.size + len(header)), b"\0") + payload)


def entry(place: int, value: Any) -> Change:
    """Return a change of the first tensor's entry: operator, saved, key, dtype, offset, bytes, digest, place."""

    def change(header: dict[str, Any]) -> None:
        header["entries"][0][place] = value

    return change


@pytest.mark.parametrize(
    "change",
    [
        entry(1, 99), entry(1, "full"), entry(3, "load"), entry(3, "nn"), entry(3, ""), entry(3, "float1024"),
        entry(3, "__dict__"), entry(4, 1 << 60), entry(4, 1 << 200), entry(4, -64), entry(4, 3), entry(4, None),
        entry(5, 1 << 60), entry(5, 1 << 62), entry(5, -1), entry(5, 3), entry(5, "many"), entry(7, "first"),
        lambda header: header.update(record=[]), lambda header: header.update(record="x"),
        lambda header: header.update(record=7),
        lambda header: header.update(entries={}) or header["entries"].update(a=1),
        lambda header: header.update(entries=[1]), lambda header: header.update(entries=None),
        lambda header: header.update(whole=[1]), lambda header: header.update(on_disk=[]),
        lambda header: header.update(iteration="seven"), lambda header: header.update(rank=None),
        lambda header: header.update(version=99), lambda header: header.pop("version"),
        lambda header: header.pop("state"), lambda header: header.pop("contents"), lambda header: [header],
    ],
)  # fmt: skip
def test_a_snapshot_whose_header_was_edited_is_refused(snapshot: Path, change: Change) -> None:
    edit(snapshot, change)
    with within(LIMIT_S), pytest.raises(SnapshotError, match=snapshot.name):
        files.read_snapshot(snapshot)


def test_an_edit_of_nothing_is_read(snapshot: Path) -> None:
    edit(snapshot, lambda header: None)
    loaded = files.read_snapshot(snapshot)
    loaded.check("on disk")
    loaded.check_record()


@pytest.mark.parametrize("record", [None, {}, {"boundary": 1}, {"boundary": {}, "iteration": 3},
                                    {"@tensor": [99, "float32", [1]]}, {"@tensor": [0, "load", [1]]},
                                    {"@mapping": 3}, {"@bytes": "x"}, {"@array": [{}, "nothing"]}])  # fmt: skip
def test_a_record_of_another_type_is_refused(snapshot: Path, record: Any) -> None:
    edit(snapshot, lambda header: header.update(record=record))
    loaded = files.read_snapshot(snapshot)
    with pytest.raises(SnapshotError):
        loaded.check_record()


def test_a_length_beyond_the_file_takes_no_memory(snapshot: Path) -> None:
    data = bytearray(snapshot.read_bytes())
    data[16:24] = (1 << 29).to_bytes(8, "little")
    snapshot.write_bytes(data)
    with pytest.raises(SnapshotError, match=rf"{snapshot.name}.*\bheader\b"):
        files.read_header(snapshot)
