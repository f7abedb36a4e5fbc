"""A window is loadable when every file of every rank is durable, and not a moment before."""

from __future__ import annotations

import errno
import os
import re
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from moevement_core.policy.schedule import Saved
from moevement_core.snapshot.agreement import Writing
from moevement_core.snapshot.buffer import Buffer
from moevement_core.snapshot.snapshot import Entry, Header, Snapshot, SnapshotLease, SnapshotPart, digest_of
from moevement_core.storage.files import file_name, read_snapshot
from moevement_core.storage.folder_store import FolderStore
from moevement_core.storage.manifest import MARKER, Kept, Manifest, make_window_folder, manifests, read_manifest
from moevement_core.storage.writer import Folder, WindowWriter
from tests.unit.storage.lending import Lender, settled

NO_SPACE = os.strerror(errno.ENOSPC)


@pytest.fixture
def lender() -> Lender:
    return Lender()


@pytest.fixture
def reports() -> list[str]:
    return []


def writer_to(folder: Path, lender: Lender, reports: list[str], **kwargs: Any) -> WindowWriter:
    return WindowWriter(
        Folder(FolderStore(folder), writes_manifest=True), "abcd", {"seed": 1}, (), lender,
        lambda s: {"iteration": s.iteration}, reports.append, **kwargs,
    )  # fmt: skip


@pytest.fixture
def writer(tmp_path: Path, lender: Lender, reports: list[str]) -> WindowWriter:
    return writer_to(tmp_path, lender, reports)


def windows(folder: Path) -> list[str]:
    deadline = time.monotonic() + 5
    while (names := [m.name for m in manifests(folder)]) == [] and time.monotonic() < deadline:
        time.sleep(0.001)
    return names


def close(writer: WindowWriter) -> None:
    writer.close(lambda writing: writing, 5)


def test_a_window_gets_its_manifest_when_all_ranks_have_it(
    writer: WindowWriter, tmp_path: Path, lender: Lender
) -> None:
    writer.begin(4, 5)
    assert settled(writer) is Writing.DURABLE
    assert not lender.out, "the buffers are given back"
    assert not manifests(tmp_path)
    writer.learn(Writing.BUSY)
    assert not manifests(tmp_path), "another rank is still writing"
    writer.learn(Writing.DURABLE)
    assert windows(tmp_path) == ["window_0000005_abcd"]
    manifest = manifests(tmp_path)[0]
    assert (manifest.first, manifest.last, manifest.reaches, manifest.progress) == (4, 5, 5, {"iteration": 5})
    assert manifest.settings == {"seed": 1}
    assert (tmp_path / manifest.name / file_name(0, 4)).exists()
    assert writer.writing is Writing.NOTHING
    close(writer)
    assert writer.newest == 5


@pytest.mark.parametrize(
    ("kept", "left"),
    [
        (Kept(), [10, 9]),
        (Kept(count=4), [10, 9, 8, 7]),
        (Kept(every=4), [10, 9, 8, 4, 1]),
        (Kept(count=3, every=5), [10, 9, 8, 5, 1]),
    ],
)
def test_as_many_windows_stay_as_the_user_asks_for(
    kept: Kept, left: list[int], tmp_path: Path, lender: Lender, reports: list[str]
) -> None:
    writer = writer_to(tmp_path, lender, reports, kept=kept)
    for iteration in range(1, 11):
        writer.begin(iteration, iteration)
        assert settled(writer) is Writing.DURABLE
        writer.learn(Writing.DURABLE)
    close(writer)
    assert [manifest.reaches for manifest in manifests(tmp_path)] == left


def test_windows_of_a_history_that_the_job_left_go(tmp_path: Path, lender: Lender, reports: list[str]) -> None:
    """Roll back to iteration 6 of a job that wrote windows to 10. Windows up to 6 stay, as far as they were asked for.

    Without the flag, all windows of the other job go as soon as this job has written one.
    """
    first = writer_to(tmp_path, lender, reports, kept=Kept(count=9))
    for iteration in range(2, 11, 2):
        first.begin(iteration, iteration)
        settled(first)
        first.learn(Writing.DURABLE)
    close(first)
    second = WindowWriter(
        Folder(FolderStore(tmp_path), True),
        "abcd.1",
        {},
        (),
        lender,
        lambda s: {},
        reports.append,
        kept=Kept(count=3),
        began_at=6,
    )
    second.begin(7, 7)
    settled(second)
    second.learn(Writing.DURABLE)
    close(second)
    assert [(m.reaches, m.job) for m in manifests(tmp_path)] == [(7, "abcd.1"), (6, "abcd"), (4, "abcd")]
    third = WindowWriter(
        Folder(FolderStore(tmp_path), True), "abcd.2", {}, (), lender, lambda s: {}, reports.append, began_at=7
    )
    third.begin(8, 8)
    settled(third)
    third.learn(Writing.DURABLE)
    close(third)
    assert [m.reaches for m in manifests(tmp_path)] == [8]


def test_a_window_that_was_never_finished_is_none_to_keep(tmp_path: Path, lender: Lender, reports: list[str]) -> None:
    """Leave an unfinished window of iteration 4, the first of its four, as a job does that fails in the middle."""
    make_window_folder(tmp_path, "window_0000004_abcd")
    writer = WindowWriter(
        Folder(FolderStore(tmp_path), True),
        "abcd.1",
        {},
        (),
        lender,
        lambda s: {},
        reports.append,
        kept=Kept(every=4),
        began_at=4,
    )
    for iteration in range(5, 10):
        writer.begin(iteration, iteration)
        settled(writer)
        writer.learn(Writing.DURABLE)
    close(writer)
    assert [m.reaches for m in manifests(tmp_path)] == [9, 8, 5]


def test_snapshots_of_a_durable_window_stay_in_memory_where_files_lack_operators(
    tmp_path: Path, lender: Lender, reports: list[str]
) -> None:
    kept: list[list[int]] = []

    def keep(leased: Sequence[SnapshotLease]) -> None:
        kept.append([lease.snapshot.iteration for lease in leased])

    writer = writer_to(tmp_path, lender, reports, leaves_out=True, keep=keep)
    writer.begin(4, 5)
    assert settled(writer) is Writing.DURABLE
    assert lender.out == [4, 5], "another rank may still fail to write the window"
    writer.learn(Writing.DURABLE)
    writer.begin(6, 7)
    assert settled(writer) is Writing.DURABLE
    writer.learn(Writing.FAILED)
    writer.begin(8, 9)
    assert settled(writer) is Writing.DURABLE
    assert kept == [[4, 5]]
    assert lender.out == [4, 5, 8, 9], "the window that another rank could not write is given back"
    writer.abandon()
    writer._thread.join(5)
    assert lender.out == [4, 5], "whoever keeps the durable window gives it back"


def test_one_at_a_time_and_each_once(writer: WindowWriter, lender: Lender) -> None:
    writer.begin(4, 5)
    writer.begin(6, 7)
    assert settled(writer) is Writing.DURABLE
    writer.learn(Writing.DURABLE)
    writer.begin(4, 5)
    assert writer.writing is Writing.NOTHING
    writer.begin(8, 9)
    assert settled(writer) is Writing.DURABLE
    close(writer)


class PartLender:
    """Source of snapshots of four operators. On disk, each holds the first operator and, in turn, one of the others."""

    def __call__(self, first: int, last: int) -> Sequence[SnapshotLease]:
        return [SnapshotLease(self.snapshot(iteration), lambda: None) for iteration in range(first, last + 1)]

    @staticmethod
    def snapshot(iteration: int) -> Snapshot:
        entries, pieces = list[Entry](), list[torch.Tensor]()
        for name in "abcd":
            data = torch.full((64,), iteration % 100, dtype=torch.uint8)
            entries.append(Entry(name, Saved.FULL, "0", "uint8", 64 * len(pieces), 64, digest_of(data)))
            pieces.append(data)
        without = tuple(name for place, name in enumerate("bcd") if place != iteration % 3)
        contents = "2" + "".join("4" if name in without else "2" for name in "bcd")
        header = Header(
            0, iteration, "s", 0, "2222", tuple(entries), None, iteration, None, SnapshotPart(contents, without)
        )  # fmt: skip
        return Snapshot(header, Buffer(torch.cat(pieces)))


def test_what_a_window_leaves_out_it_has_of_the_windows_before(
    tmp_path: Path, reports: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = WindowWriter(
        Folder(FolderStore(tmp_path), True), "abcd", {}, (), PartLender(), lambda s: {"iteration": s.iteration},
        reports.append, leaves_out=True,
    )  # fmt: skip

    def write(first: int) -> Path:
        writer.begin(first, first)
        assert settled(writer) is Writing.DURABLE, reports
        writer.learn(Writing.DURABLE)
        return tmp_path / f"window_{first:07d}_abcd"

    def versions(folder: Path) -> dict[str, int]:
        iterations = dict[str, int]()
        for path in sorted(folder.glob("rank_*")):
            snapshot = read_snapshot(path)
            snapshot.check("on disk")
            iterations |= {entry.operator: snapshot.iteration for entry in snapshot.header.entries}
        return iterations

    assert versions(write(9)) == {"a": 9, "b": 9, "c": 9, "d": 9}, "the first window has everything"
    assert versions(write(10)) == {"a": 10, "b": 9, "c": 10, "d": 9}
    assert versions(write(13)) == {"a": 13, "b": 9, "c": 13, "d": 9}
    last = write(14)
    assert versions(last) == {"a": 14, "b": 9, "c": 13, "d": 14}
    assert not (last / file_name(0, 10)).exists(), "nothing is newest there"
    monkeypatch.setattr(os, "link", lambda *paths: (_ for _ in ()).throw(OSError("no links here")))
    last = write(15)
    assert versions(last) == {"a": 15, "b": 15, "c": 13, "d": 14}
    close(writer)
    assert not reports
    newest = manifests(tmp_path)[0]
    assert (newest.first, newest.last) == (9, 15), "files of all iterations belong to it"


def write_three(writer: WindowWriter) -> None:
    for first in (4, 6, 8):
        writer.begin(first, first + 1)
        settled(writer)
        writer.learn(Writing.DURABLE)
    close(writer)


def test_two_windows_stay_and_those_of_other_runs_go(tmp_path: Path, lender: Lender, reports: list[str]) -> None:
    other = Manifest("ffff", 98, 99, 99, {}, {})
    (make_window_folder(tmp_path, other.name) / file_name(0, 98)).write_bytes(b"a snapshot")
    other.write(tmp_path)
    unfinished = make_window_folder(tmp_path, "window_0000003_abcd")
    (unfinished / f".{file_name(0, 3)}.4711").write_bytes(b"cut off")
    write_three(writer_to(tmp_path, lender, reports))
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "window_0000007_abcd", "window_0000007_abcd.json", "window_0000009_abcd", "window_0000009_abcd.json",
    ]  # fmt: skip


def test_what_is_not_provably_ours_is_never_deleted(tmp_path: Path, lender: Lender, reports: list[str]) -> None:
    """Delete only windows with the exact name and a manifest or marker, and no foreign files in own windows."""
    (tmp_path / "window_frames").mkdir()
    (tmp_path / "window_frames" / "photo.png").write_bytes(b"mine")
    (tmp_path / "window_0000099_ffff").mkdir()
    (tmp_path / "window_0000099_ffff" / "thesis.tex").write_text("mine")
    (tmp_path / "window_0000098_ffff.json").write_text("{}")
    (tmp_path / "window_sizes.json").write_text('{"width": 640}')
    elsewhere = make_window_folder(tmp_path / "elsewhere", "window_0000002_ffff")
    (elsewhere / file_name(0, 1)).write_bytes(b"linked to")
    (tmp_path / "window_0000002_ffff").symlink_to(elsewhere)
    with_notes = make_window_folder(tmp_path, "window_0000097_ffff")
    (with_notes / file_name(0, 1)).write_bytes(b"a snapshot")
    (with_notes / "notes.txt").write_text("mine")
    users = [
        "elsewhere", "window_0000002_ffff", "window_0000097_ffff", "window_0000098_ffff.json", "window_0000099_ffff",
        "window_frames", "window_sizes.json",
    ]  # fmt: skip
    write_three(writer_to(tmp_path, lender, reports))
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == sorted([*users, *(f"window_000000{at}_abcd{end}" for at in (7, 9) for end in ("", ".json"))])
    assert (tmp_path / "window_frames" / "photo.png").read_bytes() == b"mine"
    assert (tmp_path / "window_0000099_ffff" / "thesis.tex").exists()
    assert (elsewhere / file_name(0, 1)).exists()
    assert sorted(path.name for path in with_notes.iterdir()) == [MARKER, "notes.txt"]


def test_a_writer_whose_folder_another_job_has_taken_over_stops(
    tmp_path: Path, lender: Lender, reports: list[str]
) -> None:
    """Check that the writer writes no window or manifest, deletes nothing, and reports the reason."""
    holders: list[str] = []
    writer = writer_to(tmp_path, lender, reports, taken_over=lambda: next(iter(holders), None))
    writer.begin(4, 5)
    settled(writer)
    holders.append("job beef (pid 1 on n1)")
    writer.learn(Writing.DURABLE)
    writer.begin(6, 7)
    assert settled(writer) is Writing.FAILED
    writer.learn(Writing.FAILED)
    close(writer)
    assert re.search(r"\bmanifest\b.*\biteration 5\b.*\bjob beef\b", reports[0])
    assert re.search(r"\bwindow\b.*\biteration 6\b.*\bjob beef\b", reports[1])
    assert not manifests(tmp_path)
    assert not lender.out


def test_a_writer_that_meets_the_windows_of_a_newer_job_stops(
    writer: WindowWriter, tmp_path: Path, reports: list[str]
) -> None:
    writer.begin(4, 5)
    settled(writer)
    writer.learn(Writing.DURABLE)
    assert windows(tmp_path) == ["window_0000005_abcd"]
    newer = Manifest("beef", 1, 2, 2, {}, {})
    (make_window_folder(tmp_path, newer.name) / file_name(0, 2)).write_bytes(b"a snapshot")
    newer.write(tmp_path)
    writer.begin(6, 7)
    assert settled(writer) is Writing.FAILED
    close(writer)
    assert newer.name in reports[0]
    assert sorted(m.name for m in manifests(tmp_path)) == ["window_0000002_beef", "window_0000005_abcd"]
    assert (tmp_path / newer.name / file_name(0, 2)).exists()


def test_windows_of_an_earlier_start_of_the_job_are_replaced(
    tmp_path: Path, lender: Lender, reports: list[str]
) -> None:
    later = WindowWriter(Folder(FolderStore(tmp_path), True), "abcd.1", {}, (), lender, lambda s: {}, reports.append)
    later.begin(1, 2)
    settled(later)
    later.learn(Writing.DURABLE)
    earlier = Manifest("abcd", 1, 2, 2, {}, {})
    make_window_folder(tmp_path, earlier.name)
    earlier.write(tmp_path)  # late: its writer was stuck
    write_three(later)
    assert not reports
    assert {m.job for m in manifests(tmp_path)} == {"abcd", "abcd.1"}
    after = WindowWriter(Folder(FolderStore(tmp_path), True), "abcd.2", {}, (), lender, lambda s: {}, reports.append)
    write_three(after)
    assert {m.job for m in manifests(tmp_path)} == {"abcd.2"}


class Stall:
    """Disk that holds up every write until ``go_on`` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.go_on = threading.Event(), threading.Event()
        monkeypatch.setattr("moevement_core.storage.files.os.fsync", self)

    def __call__(self, descriptor: int) -> None:
        self.reached.set()
        assert self.go_on.wait(20)


@pytest.fixture
def stall(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stall]:
    stall = Stall(monkeypatch)
    yield stall
    stall.go_on.set()


def ended(writer: WindowWriter) -> None:
    deadline = time.monotonic() + 10
    while writer.is_alive:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_recovery_does_not_wait_for_a_disk_that_stalls(
    writer: WindowWriter, tmp_path: Path, lender: Lender, reports: list[str], stall: Stall
) -> None:
    writer.begin(4, 5)
    assert stall.reached.wait(10)
    began = time.monotonic()
    writer.abandon()
    assert time.monotonic() - began < 1
    assert lender.out == [4, 5], "its buffers are not used again while it writes"
    assert writer.is_alive
    stall.go_on.set()
    ended(writer)
    assert not lender.out
    assert not reports
    assert not manifests(tmp_path)
    folder = tmp_path / "window_0000005_abcd"
    assert [path.name for path in folder.iterdir()] == [MARKER], "nothing gets its name after the window was given up"


def test_what_a_stalled_writer_has_left_goes_with_the_next_window_and_does_it_no_harm(
    writer: WindowWriter, tmp_path: Path, lender: Lender, reports: list[str], stall: Stall
) -> None:
    writer.begin(4, 5)
    assert stall.reached.wait(10)
    writer.abandon()
    later = writer_to(tmp_path, lender, reports, left_behind=[writer])
    later.begin(6, 7)
    assert settled(later) is Writing.FAILED, "while the disk holds buffers no others are leased to it"
    assert re.search(r"\bwindow\b.*\biteration 6\b.*\bolder\b", reports[0])
    assert lender.out == [4, 5]
    later.learn(Writing.FAILED)
    stall.go_on.set()
    ended(writer)
    for first in (4, 8):  # the same window as the stalled one, and another
        again = writer_to(tmp_path, lender, reports, left_behind=[writer])
        again.begin(first, first + 1)
        assert settled(again) is Writing.DURABLE
        again.learn(Writing.DURABLE)
        close(again)
    close(later)
    assert [manifest.reaches for manifest in manifests(tmp_path)] == [9, 5]
    for manifest in manifests(tmp_path):
        files = sorted(path.name for path in (tmp_path / manifest.name).iterdir())
        assert files == [MARKER, *(file_name(0, at) for at in (manifest.first, manifest.last))]


def test_a_window_that_all_agreed_on_gets_its_manifest_though_a_failure_comes(
    writer: WindowWriter, tmp_path: Path
) -> None:
    writer.begin(4, 5)
    assert settled(writer) is Writing.DURABLE
    writer.learn(Writing.DURABLE)
    writer.abandon()
    ended(writer)
    assert windows(tmp_path) == ["window_0000005_abcd"]


def test_a_window_that_one_rank_cannot_write_is_given_up_by_all(
    writer: WindowWriter, tmp_path: Path, reports: list[str], lender: Lender, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, NO_SPACE)

    monkeypatch.setattr("moevement_core.storage.folder_store.write_snapshot", full)
    writer.begin(4, 5)
    assert settled(writer) is Writing.FAILED
    assert not lender.out
    assert re.search(rf"\bwindow\b.*\biteration 4\b.*{NO_SPACE}", reports[0])
    writer.learn(Writing.FAILED)
    assert (writer.failed, writer.writing) == (1, Writing.NOTHING)
    monkeypatch.undo()
    writer.begin(6, 7)
    settled(writer)
    writer.learn(Writing.DURABLE)
    assert windows(tmp_path) == ["window_0000007_abcd"]
    (again,) = reports[1:]
    assert re.search(r"\bwindows?\b.*\bagain\b.*\b1\b", again)
    close(writer)


def test_a_disk_that_stays_full_is_not_reported_with_every_window(
    writer: WindowWriter, tmp_path: Path, reports: list[str], lender: Lender, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moevement_core.storage.folder_store.write_snapshot", Mock(side_effect=OSError(28, "full")))
    for first in range(4, 24, 2):
        writer.begin(first, first + 1)
        assert settled(writer) is Writing.FAILED
        writer.learn(Writing.FAILED)
    assert [re.findall(r"\biteration (\d+)\b", text)[0] for text in reports] == ["4", "6", "10", "18"]
    assert re.search(r"\b8\b", reports[-1].replace(str(tmp_path), ""))
    assert not lender.out
    close(writer)


def test_a_late_answer_is_not_taken_for_the_next_window(writer: WindowWriter, tmp_path: Path) -> None:
    """Let another rank fail. This rank begins the next window after it has written the failed one and deleted it."""
    writer.begin(4, 5)
    writer.learn(Writing.BUSY)
    writer.begin(6, 7)
    assert settled(writer) is Writing.DURABLE
    writer.learn(Writing.FAILED)
    writer.begin(6, 7)
    assert settled(writer) is Writing.DURABLE
    close(writer)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["window_0000007_abcd", "window_0000007_abcd.json"]


def test_a_manifest_that_cannot_be_written_is_no_window(
    writer: WindowWriter, tmp_path: Path, reports: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, NO_SPACE)

    writer.begin(4, 5)
    settled(writer)
    writer.learn(Writing.DURABLE)
    assert windows(tmp_path) == ["window_0000005_abcd"]
    monkeypatch.setattr("moevement_core.storage.manifest.Manifest.write", full)
    writer.begin(6, 7)
    settled(writer)
    writer.learn(Writing.DURABLE)
    close(writer)
    assert re.search(rf"\bmanifest\b.*\biteration 7\b.*{NO_SPACE}", reports[0])
    assert writer.newest == 5


def test_any_error_of_the_disk_gives_every_buffer_back_and_the_next_window_is_tried(
    writer: WindowWriter, lender: Lender, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stale(*args: Any) -> None:
        raise RuntimeError("what nobody thought of")

    monkeypatch.setattr("moevement_core.storage.folder_store.sync_folder", stale)
    writer.begin(4, 5)
    assert settled(writer) is Writing.FAILED
    close(writer)
    assert not lender.out


def test_a_snapshot_that_is_gone_is_reported(writer: WindowWriter, lender: Lender, reports: list[str]) -> None:
    lender.missing = True
    writer.begin(4, 5)
    assert writer.writing is Writing.FAILED
    assert re.search(r"\bwindow\b.*\biteration 4\b.*\bsnapshots\b", reports[0])
    writer.learn(Writing.FAILED)
    close(writer)


def test_the_end_waits_for_the_window_under_way(writer: WindowWriter, tmp_path: Path) -> None:
    writer.begin(4, 5)
    close(writer)
    assert [manifest.name for manifest in manifests(tmp_path)] == ["window_0000005_abcd"]


def test_the_end_of_a_job_whose_other_rank_failed_leaves_no_manifest(writer: WindowWriter, tmp_path: Path) -> None:
    writer.begin(4, 5)
    writer.close(lambda writing: min(writing, Writing.FAILED), 5)
    assert not list(tmp_path.iterdir())


def test_what_is_no_manifest_is_passed_over(tmp_path: Path) -> None:
    for name, text in {"a": "{", "b": "[]", "c": '{"version": 7}', "d": '{"version": 1, "x": 2}'}.items():
        (tmp_path / f"window_{name}.json").write_text(text)
        with pytest.raises(Exception, match=f"window_{name}.json"):
            read_manifest(tmp_path / f"window_{name}.json")
    assert manifests(tmp_path) == []


def test_files_that_overlapping_windows_share_are_written_once(writer: WindowWriter, tmp_path: Path) -> None:
    for first in (4, 5):
        writer.begin(first, first + 1)
        assert settled(writer) is Writing.DURABLE
        writer.learn(Writing.DURABLE)
    close(writer)
    older, newer = (tmp_path / f"window_000000{number}_abcd" for number in (5, 6))
    shared = file_name(0, 5)
    assert (older / shared).stat().st_ino == (newer / shared).stat().st_ino
    read_snapshot(newer / shared).check("on disk")
    paths = {path.stat().st_ino: path for folder in (older, newer) for path in folder.glob("*.snapshot")}
    assert len(paths) == 3
    assert writer.written_bytes == sum(read_snapshot(path).header.payload_bytes for path in paths.values())
