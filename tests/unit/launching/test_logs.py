"""Logs of a job's processes are rotated while they are written, and a reader loses no line by a rotation."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from moevement_core.launching.children import Child, Program
from moevement_core.launching.logs import LogFolder
from moevement_core.run.progress import Progress


def test_a_file_is_rotated_under_its_writer(tmp_path: Path) -> None:
    script = "import sys\nfor line in sys.stdin: print(line.strip() * 50, flush=True)"
    path = tmp_path / "rank_0.out"
    with path.open("a") as out:
        writer = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=out, text=True)
    assert writer.stdin is not None
    folder = LogFolder(tmp_path, most_bytes=400)
    for letter in "abcdefgh":
        before = path.stat().st_size
        print(letter, file=writer.stdin, flush=True)
        while path.stat().st_size == before:
            time.sleep(0.005)
        folder.keep_to_bounds({"rank_0"})
        assert path.stat().st_size <= 400
    writer.stdin.close()
    assert writer.wait(10) == 0
    assert path.read_text() == ""
    rotated = path.with_name("rank_0.out.1").read_text()
    assert rotated == "".join(letter * 50 + "\n" for letter in "abcdefgh"), "no byte of zeros, and nothing twice"


def test_output_of_those_that_ended_last_is_kept(tmp_path: Path) -> None:
    for number in range(12):
        for stream in ("out", "err"):
            path = tmp_path / f"spare_{number}.{stream}"
            path.write_text("x")
            os.utime(path, (number, number))
    (tmp_path / "mine.txt").write_text("x")
    LogFolder(tmp_path, kept_ended=3).keep_to_bounds({"spare_0"})
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["mine.txt", *(f"spare_{n}.{s}" for n in ("0", "10", "11", "9") for s in ("err", "out"))]


def test_a_folder_that_is_gone_is_no_harm(tmp_path: Path) -> None:
    LogFolder(tmp_path / "gone").keep_to_bounds(())


def test_a_process_that_starts_empties_its_files(tmp_path: Path) -> None:
    for name in ("rank_0.out", "rank_0.err", "rank_0.out.1"):
        (tmp_path / name).write_text("of an earlier job")
    child = Child("rank_0", Program(command=[sys.executable, "-c", "print('here')"]), {}, tmp_path)
    deadline = time.monotonic() + 20
    while child.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert child.lines_of("out") == ["here"]
    assert not (tmp_path / "rank_0.out.1").exists()


def test_lines_are_shown_after_a_rotation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "rank_0.out"
    log.write_text("moevement: INFO rank 0: first, and longer\n")
    with Progress(tmp_path, 9, log) as progress:
        progress.update()
        log.write_text("moevement: INFO rank 0: second\n")
        progress.update()
        progress.update()
    shown = capsys.readouterr().out
    assert shown.count("first") == shown.count("second") == 1


def test_processes_that_ended_leave_no_descriptor() -> None:
    """Check the number of open descriptors; leaks would use up all of them in a job of ten thousand failures."""

    def count() -> int:
        return len(os.listdir("/proc/self/fd"))

    children = [Child("rank_0", Program(function=int), {}, None)]
    deadline = time.monotonic() + 30
    while children[0].poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    before = count()
    children += [Child(f"rank_{number}", Program(function=int), {}, None) for number in range(1, 5)]
    while any(child.poll() is None for child in children) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [child.poll() for child in children] == [0] * 5
    assert count() == before
