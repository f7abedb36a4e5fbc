"""A job of this machine whose ranks are killed from outside, by a schedule of wall-clock times."""

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
from moevement_core.run_record import RunRecord
from moevement_core.simulator.failures import Failure

LOOK_S = 0.1


@dataclass
class KilledJob:
    """What was seen of one."""

    record: RunRecord
    began_at: float = 0.0
    """When its first iteration was committed, seconds since the epoch."""
    kills: list[Failure] = field(default_factory=list)
    """Which ranks were killed, seconds after the first commit."""
    progress: list[tuple[float, int]] = field(default_factory=list)
    """Seconds after the beginning, and the iteration that was the newest then."""

    @property
    def training_s(self) -> float:
        """From the first iteration that was committed to the last."""
        return float(self.record.metrics()[-1]["time"] - self.began_at)


def run_killed(
    words: Sequence[str],
    run_dir: Path,
    failures: Sequence[Failure],
    seen: Callable[[int], None] = lambda iteration: None,
) -> KilledJob:
    """Run ``moevement launch`` to the end of its training.

    Args:
        words: its arguments.
        run_dir: where it leaves its record.
        failures: which ranks (each a node of its own) are killed, seconds after the first commit, ascending; those that
            are due when the job is over never happen.
        seen: called with the newest iteration, now and then.

    Raises:
        ConfigError: the job did not come to its end.
    """
    job = KilledJob(RunRecord(run_dir))
    argv = [sys.executable, "-m", "moevement_cli.main", "launch", *words, "--run-dir", str(run_dir)]
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    with run_dir.with_suffix(".console").open("wb") as console:
        process = subprocess.Popen(argv, stdout=console, stderr=console)
    try:
        watch(job, lambda: process.poll() is not None, kill_here, failures, seen)
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
    """Look at a job until it is over, and kill.

    Args:
        job: that has been started; what is seen of it is added.
        is_over: whether it has ended.
        kill: ends a process of ``ranks.json``; raises :class:`ProcessLookupError` where it has ended already.
        failures: as in :func:`run_killed`.
        seen: likewise.
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
    """One of this machine."""
    os.kill(process["pid"], signal.SIGKILL)


def _kill(job: KilledJob, ranks: Sequence[int], kill: Callable[[dict[str, Any]], None]) -> None:
    """Those of the ranks that still live: a spare may not have taken a rank yet."""
    killed = []
    for one in json.loads(job.record.ranks_path.read_text()):
        if one["role"] == "active" and one["rank"] in ranks:
            try:
                kill(one)
            except ProcessLookupError:
                continue
            killed.append(one["rank"])
    if killed:
        job.kills.append(Failure(time.time() - job.began_at, tuple(killed)))
