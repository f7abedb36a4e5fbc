"""A single job at a time writes to a folder, even if holders of its lock die, freeze or race."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moevement_core.errors import ConfigError, FolderInUse
from moevement_core.util.lock import LOCK, FolderLock, Holder, acquire, other_holder

QUICK: dict[str, Any] = {"beat_s": 0.05, "stale_s": 0.6}


def take(folder: Path, job: str = "aaaa", **kwargs: Any) -> FolderLock:
    return acquire(folder, job, "--run-dir", **QUICK | {"report": lambda text: None} | kwargs)


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def leave_behind(folder: Path, **changes: Any) -> bytes:
    """Write and return the lock of a holder that will never write again."""
    folder.mkdir(exist_ok=True)
    data = replace(Holder.of_this_process("dead"), **changes).encode()
    (folder / LOCK).write_bytes(data)
    return data


def hold_for_ever(folder: str, ready: Any) -> None:
    take(Path(folder), "bbbb")
    ready.send(os.getpid())
    time.sleep(1000)


@pytest.fixture
def other(tmp_path: Path) -> Any:
    """Yield a process that holds the lock of ``tmp_path``."""
    context = multiprocessing.get_context("forkserver")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=hold_for_ever, args=(str(tmp_path), sender), daemon=True)
    process.start()
    receiver.recv()
    yield process
    process.kill()
    process.join()


def test_a_second_job_is_refused_in_one_line_that_says_who_and_what_to_do(tmp_path: Path, other: Any) -> None:
    before = (tmp_path / LOCK).stat().st_ino
    with pytest.raises(FolderInUse) as caught:
        take(tmp_path)
    assert isinstance(caught.value, ConfigError), "exit code 2"
    text = str(caught.value)
    assert re.search(rf"^--run-dir {re.escape(str(tmp_path))}\b.*\bjob bbbb\b.*\bpid {other.pid}\b.*\bfolder\b", text)
    assert "\n" not in text
    assert (tmp_path / LOCK).stat().st_ino == before


def test_it_is_refused_at_once_where_waiting_is_no_option(tmp_path: Path, other: Any) -> None:
    began = time.monotonic()
    with pytest.raises(FolderInUse):
        take(tmp_path, may_wait=False, stale_s=1000)
    assert time.monotonic() - began < 1


def test_a_holder_that_was_killed_on_this_host_gives_way_at_once(tmp_path: Path, other: Any) -> None:
    os.kill(other.pid, signal.SIGKILL)
    wait_until(lambda: Holder.decode((tmp_path / LOCK).read_bytes()).has_ended)  # type: ignore[union-attr]
    with take(tmp_path, stale_s=1000) as lock:
        assert other_holder(tmp_path, "aaaa") is None
        assert lock.lost is None
    assert not (tmp_path / LOCK).exists()


def test_a_frozen_holder_loses_the_lock_and_knows_it_when_it_wakes(tmp_path: Path) -> None:
    reports: list[str] = []
    frozen = take(tmp_path, "bbbb", beat_s=1.0, report=reports.append)
    with take(tmp_path, stale_s=0.3) as lock:
        wait_until(lambda: frozen.lost)
        assert "job aaaa" in str(frozen.lost)
        assert re.search(rf"{re.escape(str(tmp_path))}\b.*\bjob aaaa\b", reports[0])
        frozen.release()
        assert (tmp_path / LOCK).exists(), "it is not his to remove"
        assert lock.lost is None


def test_a_holder_of_another_host_is_watched_and_taken_over_when_it_is_silent(tmp_path: Path) -> None:
    leave_behind(tmp_path, machine="another", host="n7")
    reports: list[str] = []
    began = time.monotonic()
    with take(tmp_path, report=reports.append):
        assert time.monotonic() - began > QUICK["stale_s"]
    assert re.search(rf"--run-dir {re.escape(str(tmp_path))}\b.*\bjob dead\b.*\bn7\b", reports[0])


def test_a_process_of_the_same_job_takes_over_at_once_and_the_old_one_is_quiet(tmp_path: Path) -> None:
    reports: list[str] = []
    old = take(tmp_path, report=reports.append)
    with take(tmp_path, stale_s=1000) as new:
        wait_until(lambda: old.lost)
        assert not reports
        assert new.lost is None


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"job": 1}'])
def test_a_file_that_says_nothing_is_taken_over_when_nobody_writes_it(tmp_path: Path, content: bytes) -> None:
    (tmp_path / LOCK).write_bytes(content)
    with pytest.raises(FolderInUse, match=rf"--run-dir {re.escape(str(tmp_path))}\b.*\bstarting\b"):
        take(tmp_path, may_wait=False)
    with take(tmp_path) as lock:
        assert lock.lost is None


def test_a_process_id_that_is_used_again_is_not_taken_for_the_holder(tmp_path: Path) -> None:
    leave_behind(tmp_path, pid=os.getpid(), started="1")
    with take(tmp_path, stale_s=1000):
        pass


def test_of_many_observers_of_a_dead_holder_one_gets_it(tmp_path: Path) -> None:
    for attempt in range(5):
        folder = tmp_path / str(attempt)
        leave_behind(folder, machine="another")

        def take_or_not(number: int, folder: Path = folder) -> FolderLock | None:
            try:
                return take(folder, f"job{number}", stale_s=0.3)
            except FolderInUse:
                return None

        with ThreadPoolExecutor(6) as threads:
            locks = [lock for lock in threads.map(take_or_not, range(6)) if lock is not None]
        time.sleep(0.2)
        holding = [lock for lock in locks if lock.lost is None]
        assert len(holding) == 1
        for lock in locks:
            lock.release()
        assert not list(folder.iterdir()), "and nothing is left"


def test_a_lock_that_somebody_deleted_is_made_again(tmp_path: Path) -> None:
    with take(tmp_path) as lock:
        (tmp_path / LOCK).unlink()
        wait_until((tmp_path / LOCK).exists)
        with pytest.raises(FolderInUse):
            take(tmp_path, "bbbb")
        assert lock.lost is None


def test_a_released_folder_is_free(tmp_path: Path) -> None:
    take(tmp_path / "new").release()
    take(tmp_path / "new", "bbbb", stale_s=1000).release()
    assert not (tmp_path / "new" / LOCK).exists()
