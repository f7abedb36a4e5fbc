"""Signals, spares that cannot start, temporary folders and edited scripts cost a running job no progress."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from moevement_cli.main import main
from moevement_core.run.run_record import RunRecord
from tests.launching import Launcher, finished, launch, logs
from tests.training import ROOT

SCRIPT = ROOT / "examples" / "plain_torch" / "train.py"
ITERATIONS = 100_000
Job = Launcher | subprocess.Popen[str]


def start(
    run_dir: Path, *words: str, script: Path = SCRIPT, before: tuple[str, ...] = (), spares: int | None = 1
) -> Job:
    """Start a job of two ranks and a spare in a process group of its own.

    Args:
        run_dir: run directory of the job.
        words: further flags.
        script: training script.
        before: command in front of the launcher, such as ``timeout``.
        spares: number of spares; with None, the first failure ends the job.
    """
    options = ["--trainer", "torch", "--nproc", "2", *(["--spares", str(spares)] if spares is not None else [])]
    arguments = [*options, str(script), "--iterations", str(ITERATIONS), *words, "--run-dir", str(run_dir)]
    job: Job
    if not before:
        job = launch(*arguments, leads_group=True)
    else:
        launcher = [*before, sys.executable, "-W", "ignore", "-m", "moevement_cli.main", "launch", *arguments]
        job = subprocess.Popen(
            launcher, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, start_new_session=True
        )
    _started.append(job)
    return job


_started: list[Job] = []


@pytest.fixture(autouse=True)
def _no_job_outlives_its_test() -> Iterator[None]:
    """Kill the jobs that a failed test leaves, which would take the processors from all later tests."""
    yield
    for job in _started:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
            job.wait()
    _started.clear()


def wait_for(job: Job, holds: Callable[[], bool], timeout_s: float = 240) -> None:
    """Wait until ``holds`` returns True; fail if the job ends before."""
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert job.poll() is None, finished(job)
        assert time.monotonic() < deadline
        time.sleep(0.05)


def newest(run_dir: Path) -> int:
    """Return the newest committed iteration; 0 before the first."""
    record = RunRecord(run_dir)
    return int((record.newest_metric() or {"iteration": 0})["iteration"]) if record.metrics_path.exists() else 0


def processes(run_dir: Path, role: str) -> list[int]:
    """Return the pids of the ranks (``active``) or spares."""
    path = RunRecord(run_dir).ranks_path
    return (
        [process["pid"] for process in json.loads(path.read_text()) if process["role"] == role] if path.exists() else []
    )


def check_orderly_end(run_dir: Path, least: int) -> None:
    """Check that no iteration was lost.

    Each has its line in the metrics, and the summary counts at least ``least``.
    """
    record = RunRecord(run_dir)
    iterations = [line["iteration"] for line in record.metrics()]
    assert iterations == list(range(1, len(iterations) + 1))
    assert record.summary()["iterations"] == len(iterations) >= least
    assert [event["event"] for event in record.events() if event["event"] in ("start", "restart")] == ["start"]


def test_the_launcher_has_no_thread_that_could_hold_a_lock_when_it_forks(tmp_path: Path) -> None:
    """Count the launcher's threads: there must be one.

    If another thread held the resolver's lock during a fork, the forked spare would wait for the lock forever.
    """
    job = start(tmp_path)
    wait_for(job, lambda: newest(tmp_path) >= 3 and len(processes(tmp_path, "spare")) == 1)
    assert psutil.Process(job.pid).num_threads() == 1
    job.send_signal(signal.SIGTERM)
    assert finished(job)[0] == 0


@pytest.mark.parametrize(("times", "spares"), [(1, 1), (2, 1), (1, None)])
def test_sigterm_to_the_group_ends_a_job_in_order(times: int, spares: int | None, tmp_path: Path) -> None:
    """Send SIGTERM as systemd, ``tini -g`` and dumb-init do, or twice, as batch systems do."""
    job = start(tmp_path, spares=spares)
    wait_for(job, lambda: newest(tmp_path) >= 5 and len(processes(tmp_path, "spare")) == (spares or 0))
    least = newest(tmp_path)
    for _ in range(times):
        os.killpg(job.pid, signal.SIGTERM)
    code, out, err = finished(job)
    assert (code, err) == (0, ""), f"{out}\n{logs(tmp_path)}"
    check_orderly_end(tmp_path, least)


@pytest.mark.full
def test_timeout_ends_a_job_in_order(tmp_path: Path) -> None:
    job = start(tmp_path, before=("timeout", "-s", "TERM", "40"))
    code, out, err = finished(job)
    assert code == 124, f"{out}\n{err}"  # the exit code of ``timeout``
    check_orderly_end(tmp_path, 1)


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGHUP, marks=pytest.mark.full)])
def test_signals_that_end_a_job_at_once_leave_its_record(number: signal.Signals, tmp_path: Path) -> None:
    job = start(tmp_path)
    wait_for(job, lambda: newest(tmp_path) >= 5)
    least = newest(tmp_path)
    os.killpg(job.pid, number)
    code, _, _ = finished(job)
    assert code == 128 + number
    iterations = [line["iteration"] for line in RunRecord(tmp_path).metrics()]
    assert iterations == list(range(1, len(iterations) + 1))
    assert len(iterations) >= least


def test_a_job_that_is_to_end_does_not_begin_again(tmp_path: Path) -> None:
    """Kill all ranks before they reach the boundary: the job ends with exit code 1 and keeps its record."""
    job = start(tmp_path)
    wait_for(job, lambda: newest(tmp_path) >= 5)
    ranks, least = processes(tmp_path, "active"), newest(tmp_path)
    for pid in ranks:
        os.kill(pid, signal.SIGSTOP)
    job.send_signal(signal.SIGTERM)
    time.sleep(0.5)  # enough for the launcher to handle the signal; the ranks are lost in any case
    for pid in ranks:
        os.kill(pid, signal.SIGKILL)
    code, out, err = finished(job)
    assert code == 1, f"{out}\n{err}"
    assert len(RunRecord(tmp_path).metrics()) >= least
    assert not (tmp_path / "summary.json").exists()


@pytest.mark.slow("failed starts are tried again after seconds")
def test_a_spare_that_cannot_start_ends_nothing(tmp_path: Path) -> None:
    """Remove a file that spares need: the job trains, and the launcher starts spares until the file is back."""
    needed, run_dir = tmp_path / "needed", tmp_path / "run"
    needed.touch()
    script = tmp_path / "needs.py"
    script.write_text(NEEDS.format(script=str(SCRIPT), needed=str(needed)))
    job = start(run_dir, script=script)
    wait_for(job, lambda: newest(run_dir) >= 5 and len(processes(run_dir, "spare")) == 1)
    (spare,) = processes(run_dir, "spare")
    needed.unlink()
    os.kill(spare, signal.SIGKILL)
    before = newest(run_dir)
    wait_for(job, lambda: len(list((run_dir / "logs").glob("spare_*.err"))) >= 3)  # one failed, another started
    needed.touch()
    wait_for(job, lambda: len(processes(run_dir, "spare")) == 1 and processes(run_dir, "spare") != [spare])
    job.send_signal(signal.SIGTERM)
    code, out, err = finished(job)
    assert (code, err) == (0, ""), f"{out}\n{logs(run_dir)}"
    assert str(needed) in out, "what the spare found wrong"
    check_orderly_end(run_dir, before)


NEEDS = """
from pathlib import Path

from moevement_core.errors import ConfigError

if not Path({needed!r}).exists():
    raise ConfigError("{needed} is not there")
exec(compile(open({script!r}).read(), {script!r}, "exec"), globals())
"""


@pytest.mark.full
def test_a_temporary_folder_that_is_removed_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the folder as cleaners of ``/tmp`` do, which delete files that have not changed for days."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    run_dir = tmp_path / "run"
    job = start(run_dir)
    wait_for(job, lambda: newest(run_dir) >= 5 and len(processes(run_dir, "spare")) == 1)
    folders = list((tmp_path / "tmp").iterdir())
    assert folders
    for folder in folders:
        shutil.rmtree(folder)
    survive_a_loss(job, run_dir)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system, which needs root")
@pytest.mark.builds
def test_a_temporary_folder_that_is_full_ends_nothing(tmp_path: Path) -> None:
    """Fill the folder: a rank that writes to a mapped file there would die by SIGBUS."""
    full = tmp_path / "tmp"
    full.mkdir()
    run_dir = tmp_path / "run"
    within = f'mount -t tmpfs -o size=4m tmpfs "{full}" && export TMPDIR="{full}" && exec "$@"'
    job = start(run_dir, before=("unshare", "-m", "sh", "-c", within, "sh"))
    wait_for(job, lambda: newest(run_dir) >= 5 and len(processes(run_dir, "spare")) == 1)
    (rank, *_) = processes(run_dir, "active")
    fill(Path(f"/proc/{rank}/root{full}/filled"))
    survive_a_loss(job, run_dir)


def fill(path: Path) -> None:
    """Write to a file until its file system is full."""
    with open(path, "wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(1 << 16)):
            pass


def survive_a_loss(job: Job, run_dir: Path) -> None:
    """Kill a rank, wait until the spare has replaced it and a new spare has started, then end the job."""
    before = newest(run_dir)
    killed, (spare,) = processes(run_dir, "active")[1], processes(run_dir, "spare")
    os.kill(killed, signal.SIGKILL)
    wait_for(job, lambda: killed not in processes(run_dir, "active") and newest(run_dir) > before + 5)
    wait_for(job, lambda: len(processes(run_dir, "spare")) == 1 and processes(run_dir, "spare") != [spare])
    job.send_signal(signal.SIGTERM)
    code, out, err = finished(job)
    assert (code, err) == (0, ""), f"{out}\n{err}\n{logs(run_dir)}"
    check_orderly_end(run_dir, before)


def test_an_edit_for_the_next_experiment_concerns_no_process_of_this_one(tmp_path: Path) -> None:
    """Edit script and configuration while a job runs: neither replacements nor their children read them again."""
    script, config = tmp_path / "train.py", tmp_path / "job.yaml"
    runs = {name: tmp_path / name for name in ("edited", "failure_free")}
    iterations: tuple[str, ...] = ()
    for name, run_dir in runs.items():
        script.write_text(SCRIPT.read_text())
        config.write_text("moevement-window: 4\nseed: 7\n")
        job = start(run_dir, "--config", str(config), *iterations, script=script)
        if name == "edited":
            wait_for(job, lambda: newest(tmp_path / "edited") >= 5)
            config.write_text("moevement-window: 4\nseed: 8\n")
            script.write_text("raise RuntimeError('of the next experiment')\n")
            lose_twice(job, run_dir)
            job.send_signal(signal.SIGTERM)
        code, out, err = finished(job)
        assert (code, err) == (0, ""), f"{out}\n{logs(run_dir)}"
        iterations = ("--iterations", str(newest(run_dir)))
    assert main(["verify", *map(str, runs.values())]) == 0


def lose_twice(job: Job, run_dir: Path) -> None:
    """Kill a rank, then its replacement; the second replacement is a process that started after the first kill."""
    wait_for(job, lambda: len(processes(run_dir, "spare")) == 1)
    for _ in range(2):
        wait_for(job, lambda: len(processes(run_dir, "active")) == 2)
        before = processes(run_dir, "active")
        os.kill(before[1], signal.SIGKILL)
        wait_for(job, partial(_are_others, run_dir, before))
    least = newest(run_dir) + 5
    wait_for(job, lambda: newest(run_dir) >= least)


def _are_others(run_dir: Path, before: list[int]) -> bool:
    return before[1] not in processes(run_dir, "active")


def test_an_exit_code_of_the_trainer_is_an_interruption(tmp_path: Path) -> None:
    """Exit with code 17, one of the codes of Megatron's rerun machine. No rank loses its state."""
    script = tmp_path / "exits.py"
    script.write_text(EXITS.format(script=str(SCRIPT)))
    words = ("--iterations", "20")
    runs: dict[str, Any] = {"failure_free": SCRIPT, "interrupted": script}
    for name, path in runs.items():
        code, out, err = finished(start(tmp_path / name, *words, script=path))
        assert (code, err) == (0, ""), f"{out}\n{logs(tmp_path / name)}"
    record = RunRecord(tmp_path / "interrupted")
    (failure,) = [event for event in record.events() if event["event"] == "failure"]
    assert failure["recovery"] is None, "every rank kept its state"
    assert any("17" in reason for reason in failure["failures"])
    assert [event["event"] for event in record.events() if event["event"] in ("start", "restart")] == ["start"]
    assert main(["verify", str(tmp_path / "failure_free"), str(tmp_path / "interrupted")]) == 0


EXITS = """
import runpy
import sys

import moevement_core as ft

reduce_left = 1


def exiting(trainer):
    original = trainer.reduce

    def reduce(self):
        global reduce_left
        if self.iteration == 7 and reduce_left:
            reduce_left = 0
            sys.exit(17)
        return original(self)

    trainer.reduce = reduce


sys.argv[0] = {script!r}
source = open({script!r}).read().replace('if __name__ == "__main__":', "exiting(ft.TorchBinding)\\nif True:")
exec(compile(source, {script!r}, "exec"), globals())
"""
