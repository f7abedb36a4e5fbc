"""Jobs that a benchmark runs on this machine. The benchmark watches a job, and kills ranks of it at given times."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moevement_cli.bench_run import failed
from moevement_core.run.run_record import RunRecord
from moevement_core.simulator.failures import Failure

LOOK_S = 0.1


@dataclass
class KilledJob:
    """Record of a job whose ranks are killed, with the kills and the progress that the watching process saw."""

    record: RunRecord
    began_at: float = 0.0
    """Time of the first commit, in seconds since the epoch. 0.0 before the first commit."""
    kills: list[Failure] = field(default_factory=list)
    """Kills so far. The field ``nodes`` of a kill holds ranks, and its time is in seconds after the first commit."""
    progress: list[tuple[float, int]] = field(default_factory=list)
    """Pairs of a time, in seconds after the first commit, and the newest committed iteration at that time."""

    @property
    def training_s(self) -> float:
        """Seconds from the first committed iteration to the last."""
        return float(self.record.metrics()[-1]["time"] - self.began_at)


def run_killed(
    words: Sequence[str],
    run_dir: Path,
    failures: Sequence[Failure],
    seen: Callable[[int], None] = lambda iteration: None,
) -> KilledJob:
    """Run ``moevement launch`` to the end of its training.

    Args:
        words: arguments of ``moevement launch``, without ``--run-dir``.
        run_dir: run directory of the job. The console output of the job goes to a file beside the directory.
        failures: kills in the order of time, in seconds after the first commit. The field ``nodes`` of a failure holds
            ranks. Kills that are due after the end of the job do not happen.
        seen: function called with the newest committed iteration when it has changed. The metrics are read every
            ``LOOK_S`` seconds.

    Raises:
        ConfigError: the job failed before the end of training.
    """
    job = KilledJob(RunRecord(run_dir))
    argv = [sys.executable, "-m", "moevement_cli.main", "launch", *words, "--run-dir", str(run_dir)]
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    with run_dir.with_suffix(".console").open("wb") as console:
        process = subprocess.Popen(argv, stdout=console, stderr=console)
    try:
        watch(job, is_over=lambda: process.poll() is not None, kill=kill_here, failures=failures, seen=seen)
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()
    if process.returncode:
        raise failed(process.returncode, run_dir)
    return job


def watch(
    job: KilledJob,
    is_over: Callable[[], bool],
    kill: Callable[[dict[str, Any]], None],
    failures: Sequence[Failure],
    seen: Callable[[int], None] = lambda iteration: None,
) -> None:
    """Watch a job until it ends, and kill ranks of the job at scheduled times.

    Args:
        job: job that has started. The function adds progress and kills to it.
        is_over: function that returns True once the job has ended.
        kill: function that ends a process, given its entry in ``ranks.json``. It raises :class:`ProcessLookupError` if
            the process has ended already.
        failures: schedule of kills, as in :func:`run_killed`.
        seen: callback, as in :func:`run_killed`.
    """
    left, newest = list(failures), -1
    while not is_over():
        time.sleep(LOOK_S)
        line = job.record.newest_metric()
        if line is None:
            continue
        job.began_at = job.began_at or float(line["time"])
        if line["iteration"] != newest:
            newest = int(line["iteration"])
            job.progress.append((time.time() - job.began_at, newest))
            seen(newest)
        if left and time.time() - job.began_at >= left[0].at_s:
            _kill(job, left.pop(0).nodes, kill)


def kill_here(process: dict[str, Any]) -> None:
    """Kill a process of this machine, given its entry in ``ranks.json``."""
    os.kill(process["pid"], signal.SIGKILL)


def _kill(job: KilledJob, ranks: Sequence[int], kill: Callable[[dict[str, Any]], None]) -> None:
    """Kill the processes that hold ``ranks`` now. No process holds a failed rank until a spare takes it over."""
    killed = []
    for member in json.loads(job.record.ranks_path.read_text()):
        if member["role"] == "active" and member["rank"] in ranks:
            try:
                kill(member)
            except ProcessLookupError:
                continue
            killed.append(member["rank"])
    if killed:
        job.kills.append(Failure(time.time() - job.began_at, tuple(killed)))
