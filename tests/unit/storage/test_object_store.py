"""Windows in an object store: whatever the store does, no window is trusted that is not whole."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from moevement_core.errors import SnapshotError
from moevement_core.snapshot.agreement import Writing
from moevement_core.storage import object_store
from moevement_core.storage.files import file_name
from moevement_core.storage.manifest import Kept, is_window_name
from moevement_core.storage.object_store import ATTEMPTS, ObjectStore
from moevement_core.storage.writer import Folder, WindowWriter
from tests.faulty_store import Faults, FaultyFileSystem, register
from tests.unit.storage.lending import Lender, settled

URL = "faulty://bucket/job"


@pytest.fixture(autouse=True)
def faults(monkeypatch: pytest.MonkeyPatch) -> Iterator[Faults]:
    register()
    FaultyFileSystem.store.clear()
    FaultyFileSystem.faults = Faults()
    monkeypatch.setattr(object_store, "PAUSE_S", 0.001)
    yield FaultyFileSystem.faults
    FaultyFileSystem.store.clear()


def store() -> ObjectStore:
    return ObjectStore(URL)


@pytest.fixture
def lender() -> Lender:
    return Lender()


@pytest.fixture
def reports() -> list[str]:
    return []


def writer_to(lender: Lender, reports: list[str], job: str = "abcd", **kwargs: Any) -> WindowWriter:
    return WindowWriter(
        Folder(store(), writes_manifest=True), job, {"seed": 1}, (), lender, lambda s: {"iteration": s.iteration},
        reports.append, **kwargs,
    )  # fmt: skip


@pytest.fixture
def writer(lender: Lender, reports: list[str]) -> Iterator[WindowWriter]:
    new = writer_to(lender, reports)
    yield new
    close(new)


def close(writer: WindowWriter) -> None:
    writer.close(lambda writing: writing, 5)


def write(writer: WindowWriter, first: int) -> Writing:
    """Write the window from snapshot ``first`` on, and return the progress on which the ranks agree."""
    writer.begin(first, first + 1)
    writing = settled(writer)
    writer.learn(writing)
    deadline = time.monotonic() + 5
    while writing is Writing.DURABLE and writer.newest != first + 1 and time.monotonic() < deadline:
        time.sleep(0.001)
    return writing


def objects() -> list[str]:
    return sorted(name.removeprefix("/bucket/job/") for name in FaultyFileSystem.store)


def windows() -> list[int]:
    return [manifest.reaches for manifest in store().manifests()]


def test_a_window_comes_back(writer: WindowWriter, lender: Lender) -> None:
    assert write(writer, 4) is Writing.DURABLE
    close(writer)
    folder = "window_0000005_abcd"
    files = [file_name(0, 4), file_name(0, 5)]
    assert objects() == [f"{folder}.json", f"{folder}/rank_00000.json", *(f"{folder}/{name}" for name in files)]
    reader = store()
    assert [entry.iteration for entry in reader.stored(folder, 0, None)] == [4, 5]
    snapshot, original = reader.read(folder, files[1]), lender.toy.snapshot(5, 5, {})
    snapshot.check("in the store")
    assert torch.equal(snapshot.buffer.view(0, snapshot.buffer.nbytes), torch.cat(original.packed()[1]))
    assert reader.record(folder, files[1]) == original.record()
    assert reader.sizes(folder).keys() == set(files)
    assert reader.written_at(folder) is not None
    assert not lender.out


def test_requests_of_a_window_do_not_grow(faults: Faults, lender: Lender, reports: list[str]) -> None:
    """Count the requests of the first rank and of another rank: they depend on nothing but the window's snapshots."""
    first = writer_to(lender, reports, kept=Kept(count=20))
    counts = []
    for begin in range(4, 24, 2):
        write(first, begin)
        time.sleep(0.02)  # until the writer has deleted old windows
        counts.append(dict(faults.requests))
        faults.requests.clear()
    close(first)
    assert counts[2] == counts[9]
    assert (counts[9]["write"], counts[9]["list"]) == (4, 5)  # two snapshots, an index, a manifest
    other = WindowWriter(Folder(store(), False), "abcd", {}, (), lender, lambda s: {}, reports.append)
    other.begin(30, 31)
    settled(other)
    assert faults.requests == {"write": 3, "info": 3}
    close(other)


def test_a_write_that_fails_once_is_repeated(
    writer: WindowWriter, faults: Faults, caplog: pytest.LogCaptureFixture
) -> None:
    faults.failing_writes = 1
    assert write(writer, 4) is Writing.DURABLE
    assert windows() == [5]
    (line,) = caplog.messages
    assert URL in line
    assert "503" in line


def test_a_write_that_always_fails_costs_the_window_only(
    writer: WindowWriter, faults: Faults, reports: list[str], lender: Lender
) -> None:
    faults.failing_writes = ATTEMPTS
    assert write(writer, 4) is Writing.FAILED
    assert "503" in reports[0]
    assert windows() == []
    assert write(writer, 6) is Writing.DURABLE
    assert windows() == [7]
    close(writer)
    assert not lender.out
    assert {name.partition(".")[0].partition("/")[0] for name in objects()} == {"window_0000007_abcd"}


def test_a_slow_store_holds_nothing_up(writer: WindowWriter, faults: Faults) -> None:
    faults.write_s = 0.2
    began = time.monotonic()
    writer.begin(4, 5)
    writer.learn(Writing.BUSY)
    writer.begin(6, 7)
    assert time.monotonic() - began < faults.write_s
    assert writer.writing is Writing.BUSY
    assert settled(writer) is Writing.DURABLE


@pytest.mark.parametrize("times", [1, ATTEMPTS])
def test_a_torn_write_is_noticed_before_the_window_counts(writer: WindowWriter, faults: Faults, times: int) -> None:
    faults.torn_writes = times
    assert write(writer, 4) is (Writing.DURABLE if times < ATTEMPTS else Writing.FAILED)
    assert windows() == [5] * (times < ATTEMPTS)


def test_an_object_that_is_not_seen_at_once_is_asked_for_again(writer: WindowWriter, faults: Faults) -> None:
    faults.unseen = 1
    assert write(writer, 4) is Writing.DURABLE


def test_a_list_without_the_newest_windows_deletes_none_of_them(writer: WindowWriter, faults: Faults) -> None:
    faults.unlisted = {".json"}
    for first in (4, 6, 8):
        assert write(writer, first) is Writing.DURABLE
    faults.unlisted = set()
    close(writer)
    assert windows() == [9, 7]


def test_a_new_process_asks_for_a_manifest_that_the_list_lacks(
    writer: WindowWriter, faults: Faults, lender: Lender, reports: list[str]
) -> None:
    assert write(writer, 4) is Writing.DURABLE
    close(writer)
    faults.unlisted = {".json"}
    again = writer_to(lender, reports)
    again.begin(6, 7)
    assert settled(again) is Writing.DURABLE
    close(again)
    faults.unlisted = set()
    assert 5 in windows(), "a window with a manifest was taken for an unfinished one"


@pytest.mark.parametrize("left", [0, 30, 500, -1])
def test_an_object_that_was_cut_off_later_is_refused(writer: WindowWriter, left: int) -> None:
    assert write(writer, 4) is Writing.DURABLE
    name = f"/bucket/job/window_0000005_abcd/{file_name(0, 5)}"
    data = FaultyFileSystem.store[name].getvalue()
    FaultyFileSystem().pipe_file(name, data[:left])
    with pytest.raises(SnapshotError, match=file_name(0, 5)):
        store().read("window_0000005_abcd", file_name(0, 5))


def test_a_deleted_object_is_refused(writer: WindowWriter) -> None:
    assert write(writer, 4) is Writing.DURABLE
    del FaultyFileSystem.store[f"/bucket/job/window_0000005_abcd/{file_name(0, 4)}"]
    with pytest.raises(SnapshotError, match=file_name(0, 4)):
        store().read("window_0000005_abcd", file_name(0, 4))
    del FaultyFileSystem.store["/bucket/job/window_0000005_abcd/rank_00000.json"]
    assert store().stored("window_0000005_abcd", 0, None) == []


def test_an_object_of_another_attempt_is_refused(writer: WindowWriter, lender: Lender) -> None:
    assert write(writer, 4) is Writing.DURABLE
    lender.toy.step(1, None)
    writer._folder.store.write("window_0000005_abcd", lender.toy.snapshot(5, 5, {"norm": 2.0}), lambda: True)
    with pytest.raises(SnapshotError, match=file_name(0, 5)):
        store().read("window_0000005_abcd", file_name(0, 5))


@pytest.mark.parametrize("change", [{"version": 9}, {"digest": "0"}, {"files": [{}]}, {"files": 3}, None])
def test_a_damaged_index_is_no_index(writer: WindowWriter, change: dict[str, Any] | None) -> None:
    assert write(writer, 4) is Writing.DURABLE
    name = "/bucket/job/window_0000005_abcd/rank_00000.json"
    content = json.loads(FaultyFileSystem.store[name].getvalue())
    FaultyFileSystem().pipe_file(name, b"[" if change is None else json.dumps(content | change).encode())
    assert store().stored("window_0000005_abcd", 0, None) == []


def test_a_damaged_manifest_is_no_window(writer: WindowWriter) -> None:
    assert write(writer, 4) is Writing.DURABLE
    data = FaultyFileSystem.store["/bucket/job/window_0000005_abcd.json"].getvalue()
    FaultyFileSystem().pipe_file("/bucket/job/window_0000005_abcd.json", data[: len(data) // 2])
    readable, refused = store().manifests_and_refused()
    assert (readable, refused.keys()) == ([], {"window_0000005_abcd"})


def test_other_objects_stay(lender: Lender, reports: list[str]) -> None:
    foreign = ["notes.txt", "window_1.json", "window_0000005_abcd/notes.txt", "window_0000001_abcd/notes.txt"]
    for name in foreign:
        FaultyFileSystem().pipe_file(f"/bucket/job/{name}", b"mine")
    writer = writer_to(lender, reports)
    for first in (4, 6, 8, 10):
        assert write(writer, first) is Writing.DURABLE
    close(writer)
    assert windows() == [11, 9]
    left = [name for name in objects() if not is_window_name(name.partition("/")[0].removesuffix(".json"))]
    assert left == ["notes.txt", "window_1.json"]
    assert set(foreign) <= set(objects())


def test_a_second_job_in_the_same_place_stops_the_writing(
    writer: WindowWriter, lender: Lender, reports: list[str]
) -> None:
    assert write(writer, 4) is Writing.DURABLE
    other = writer_to(Lender(), [], job="ef01")
    other.begin(4, 5)
    settled(other)
    assert write(writer, 6) is Writing.FAILED
    assert "ef01" in reports[0]
    close(other)


def test_windows_that_overlap_share_objects_by_copies_in_the_store(
    writer: WindowWriter, faults: Faults, lender: Lender
) -> None:
    assert write(writer, 4) is Writing.DURABLE
    writer.begin(5, 6)
    assert settled(writer) is Writing.DURABLE
    assert faults.requests["copy"] == 1
    reader = store()
    assert [entry.iteration for entry in reader.stored("window_0000006_abcd", 0, None)] == [5, 6]
    reader.read("window_0000006_abcd", file_name(0, 5)).check("in the store")


def test_ranks_of_another_layout_are_listed(writer: WindowWriter) -> None:
    assert write(writer, 4) is Writing.DURABLE
    assert [entry.owner for entry in store().stored("window_0000005_abcd", 3, lambda owner: owner == 0)] == [0, 0]
    assert store().stored("window_0000005_abcd", 3, lambda owner: owner == 7) == []


def test_a_store_that_cannot_be_reached_is_an_error_without_credentials(faults: Faults) -> None:
    faults.is_unreachable = True
    with pytest.raises(OSError, match="StoreUnreachable") as failed:
        store().manifests()
    text = str(failed.value)
    assert "sesame" not in text
    assert "sig=" not in text
    assert "\n" not in text
    with pytest.raises(OSError, match="StoreUnreachable"):
        store().probe("probe")


def test_a_probe_leaves_nothing() -> None:
    first, other = store(), store()
    first.probe("probe")
    other.find_probe("probe")
    first.end_probe("probe")
    assert objects() == []
    with pytest.raises(FileNotFoundError):
        other.find_probe("probe")


def test_a_writer_that_waits_for_the_store_is_abandoned(
    writer: WindowWriter, faults: Faults, lender: Lender, reports: list[str]
) -> None:
    faults.write_s = 0.3
    writer.begin(4, 5)
    while not faults.requests["write"]:
        time.sleep(0.001)
    began = time.monotonic()
    writer.abandon()
    assert time.monotonic() - began < faults.write_s
    deadline = time.monotonic() + 5
    while writer.is_alive and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not writer.is_alive
    assert not lender.out
    assert windows() == []
