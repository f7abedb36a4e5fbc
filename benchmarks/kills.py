"""Benchmark that kills a rank of the laptop preset many times at random moments. It writes benchmarks/kills.md.

    python -m benchmarks.kills

The benchmark sends SIGKILL from outside the job, so a kill can hit any moment of an iteration. It uses the same moments
for recovery by replay, for redo, and for a job without spares that ends and restarts from its windows on disk. It
compares each run bit for bit with a failure-free run.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.environment import measured_on
from benchmarks.papers.common import table
from moevement_cli.examples import EXAMPLES
from moevement_core.run.run_record import RunRecord

OUTPUT = Path(__file__).with_suffix(".md")
PRETRAIN = EXAMPLES / "pretrain_moe"
EVERY = 7
"""Iterations between two kills."""


RESTARTS = 3
"""Number of kills of the job that restarts after each kill."""
WAYS = ("replay", "redo", "restart")


def main() -> None:
    """Measure each method of recovery, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=10, metavar="N")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="seed of killed ranks and moments")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        runs = Path(folder)
        iterations = EVERY * (arguments.kills + 1)
        print("without a failure ...", flush=True)
        _train(run_dir=runs / "free", iterations=iterations, spares=0, words=[], kills=[])
        iteration_s = _of_metrics(RunRecord(runs / "free"), "iteration_s")
        rows = []
        for way in arguments.ways:
            print(f"{way} ...", flush=True)
            draw = random.Random(arguments.seed)
            kills = [Kill(EVERY * (kill + 1), draw.uniform(0, iteration_s), draw.randrange(4))
                     for kill in range(arguments.kills)]  # fmt: skip
            if way == "restart":
                windows = str(runs / "windows")
                words = ["--moevement-persist-dir", windows, "--moevement-load", windows]
                to_next = _train(
                    run_dir=runs / way, iterations=iterations, spares=0, words=words, kills=kills[:RESTARTS]
                )
                row = _row_of_restarts(RunRecord(runs / way), to_next)
            else:
                _train(
                    run_dir=runs / way,
                    iterations=iterations,
                    spares=2,
                    words=["--moevement-recovery", way],
                    kills=kills,
                )
                row = _row(RunRecord(runs / way))
            verified = subprocess.run(_moevement("verify", str(runs / "free"), str(runs / way)), check=False)
            rows.append([way, *row, "equal" if verified.returncode == 0 else "DIFFERENT"])
    OUTPUT.write_text(report(rows, arguments.kills, arguments.seed), encoding="utf-8")


@dataclass(frozen=True)
class Kill:
    """Kill of one rank."""

    after: int
    """Last iteration committed before the kill."""
    delay_s: float
    """Seconds from the moment at which the benchmark sees that commit to the kill."""
    rank: int


def _moevement(*words: str) -> list[str]:
    return [str(Path(sys.executable).with_name("moevement")), *words]


def _start(run_dir: Path, iterations: int, spares: int, words: list[str]) -> subprocess.Popen[bytes]:
    config = PRETRAIN / "configs" / "laptop.yaml"
    options = ["--spares", str(spares)] if spares else []
    return subprocess.Popen(
        _moevement("launch", "--nproc", "4", *options, str(PRETRAIN / "pretrain_gpt.py"), "--config", str(config),
                   "--train-iters", str(iterations), "--run-dir", str(run_dir), *words),
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip


def _train(run_dir: Path, iterations: int, spares: int, words: list[str], kills: list[Kill]) -> list[tuple[float, int]]:
    """Train to the end, and return the time of each kill with the newest iteration at that time.

    A job without spares ends at each kill. The function then starts the job again.
    """
    record, done = RunRecord(run_dir), list[tuple[float, int]]()
    job, started = _start(run_dir, iterations, spares, words), 1
    while True:
        time.sleep(0.05)
        if job.poll() is not None:
            if job.returncode == 0:
                return done
            if spares or started > len(done):
                raise SystemExit(f"{run_dir.name} ended with exit code {job.returncode}")
            job, started = _start(run_dir, iterations, spares, words), started + 1
        newest = (record.newest_metric() or {"iteration": 0})["iteration"]
        if len(done) < len(kills) and newest >= kills[len(done)].after:
            kill = kills[len(done)]
            time.sleep(kill.delay_s)
            pids = {member["rank"]: member["pid"] for member in json.loads(record.ranks_path.read_text())}
            os.kill(pids[kill.rank], signal.SIGKILL)
            done.append((time.time(), (record.newest_metric() or {"iteration": 0})["iteration"]))


def _median(values: Iterable[float]) -> str:
    return f"{statistics.median(values):.2f}"


def _of_metrics(record: RunRecord, name: str) -> float:
    return float(statistics.median(line.get(name) or 0 for line in record.metrics()))


def _memory(record: RunRecord) -> str:
    nbytes = _of_metrics(record, "snapshot_memory_bytes") + _of_metrics(record, "log_memory_bytes")
    return f"{nbytes / 1e6:.1f} MB"


def _row(record: RunRecord) -> list[str]:
    at = {line["iteration"]: line["time"] for line in record.metrics()}
    failures = [event for event in record.events() if event["event"] == "failure" and event["recovery"]]
    to_next = [at[failure["recovery"]["until"] + 1] - failure["failed_at"] for failure in failures]
    parts = [_median(failure["parts"][name] for failure in failures) for name in failures[0]["parts"]]
    return [
        *parts, _median(failure["total_s"] for failure in failures), _median(to_next),
        _median([_of_metrics(record, "iteration_s")]),
        f"{sum(failure['recovery']['replayed'] == 0 for failure in failures)} of {len(failures)}",
        f"{sum(failure['recovery']['replayed'] for failure in failures)}", _memory(record),
    ]  # fmt: skip


def _row_of_restarts(record: RunRecord, kills: list[tuple[float, int]]) -> list[str]:
    at = {line["iteration"]: line["time"] for line in record.metrics()}
    starts = [event["iteration"] for event in record.events() if event["event"] == "start"][1:]
    lost = [newest - start for (_, newest), start in zip(kills, starts, strict=True)]
    return [
        *[""] * 7, _median(at[newest + 1] - when for when, newest in kills),
        _median([_of_metrics(record, "iteration_s")]),
        f"{sum(not iterations for iterations in lost)} of {len(kills)}", f"{sum(lost)}", _memory(record),
    ]  # fmt: skip


def report(rows: list[list[Any]], kills: int, seed: int) -> str:
    """Return the text of the page."""
    header = (
        "way", "detect", "abort", "regroup", "set up and fetch", "enter the loop", "restore", "total",
        "kill to next committed iteration", "of it an iteration", "kills without a repeated iteration",
        "iterations repeated", "host memory of a rank", "bits",
    )  # fmt: skip
    return f"""# The laptop preset under random kills

    python -m benchmarks.kills --kills {kills} --seed {seed}        (writes this file)

Four ranks (pipeline 2 x expert/data 2) and two spares, W = 3. After every {EVERY}th iteration, SIGKILL from outside the job ends a
random rank at a random moment. Numbers are medians in seconds. Memory is that of the last rank: snapshots, copies for two others, and logs.

{table(header, rows)}

All ranks, the spares and the benchmark itself share two cores. Shortly after a commit, the newest gradients have not reached
the peers yet. After a kill at such a moment, the stage of the lost rank replays one iteration. *restart* has no
spare: each of the first {RESTARTS} kills ends the job, and the benchmark restarts it at once from its windows on disk.

{measured_on("torch", "megatron-core")}, gloo.
"""


if __name__ == "__main__":
    main()
