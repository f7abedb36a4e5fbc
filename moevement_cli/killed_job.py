"""A job of this machine whose ranks are killed from outside, by a schedule of wall-clock times."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from moevement_cli.bench_run import failed
from moevement_core.run_record import RunRecord

LOOK_S = 0.1


@dataclass
class KilledJob:
    """What was seen of one."""

    record: RunRecord
    began_at: float = 0.0
    """When its first iteration was committed, seconds since the epoch."""
    kills: list[float] = field(default_factory=list)
    """When ranks were killed, likewise."""
    progress: list[tuple[float, int]] = field(default_factory=list)
    """Seconds after the beginning, and the iteration that was the newest then."""

    @property
    def training_s(self) -> float:
        """From the first iteration that was committed to the last."""
        return float(self.record.metrics()[-1]["time"] - self.began_at)


def run_killed(
    words: Sequence[str],
    run_dir: Path,
    kills_s: Sequence[float],
    draw: random.Random,
    seen: Callable[[int], None] = lambda iteration: None,
) -> KilledJob:
    """Run ``moevement launch`` to the end of its training.

    Args:
        words: its arguments.
        run_dir: where it leaves its record.
        kills_s: when one of its ranks is killed, seconds after the first commit, ascending; those that are due when
            the job is over never happen.
        draw: who it is.
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
        _watch(job, process, list(kills_s), draw, seen)
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()
    if process.returncode:
        raise failed(process.returncode, run_dir)
    return job


def _watch(
    job: KilledJob,
    process: subprocess.Popen[bytes],
    left: list[float],
    draw: random.Random,
    seen: Callable[[int], None],
) -> None:
    newest = -1
    while process.poll() is None:
        time.sleep(LOOK_S)
        line = job.record.newest_metric()
        if line is None:
            continue
        job.began_at = job.began_at or float(line["time"])
        if line["iteration"] != newest:
            newest = int(line["iteration"])
            job.progress.append((time.time() - job.began_at, newest))
            seen(newest)
        if left and time.time() - job.began_at >= left[0]:
            left.pop(0)
            _kill(job, draw)


def _kill(job: KilledJob, draw: random.Random) -> None:
    """One of the ranks, if it still lives: a spare may not have taken the rank yet."""
    ranks = [one for one in json.loads(job.record.ranks_path.read_text()) if one["role"] == "active"]
    try:
        os.kill(draw.choice(ranks)["pid"], signal.SIGKILL)
    except ProcessLookupError:
        return
    job.kills.append(time.time())
