"""Kill random ranks of elastic jobs at random moments; the launcher restarts their processes, which join again.

``python -m tests.soak.elastic --kills 60 --folder runs/soak_elastic`` runs job after job, all kinds in turn. No job may
restart while memory has its state. Every iteration is committed once, and after each change of size all digests are
equal. Losses differ from those of a failure-free run only by the rounding of sums in another order. A later call
continues from ``FOLDER/jobs.jsonl``.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from statistics import fmean, median
from typing import Any

from moevement_core.run.run_record import RunRecord
from tests.soak.__main__ import QUICK, run

BATCH = ["--global-batch-size", "48", "--micro-batch-size", "4", "--expert-model-parallel-size", "1"]
ELASTIC = ["--moevement-elastic", "--moevement-join-wait", "1", "--moevement-recovery", "redo"]
KINDS: dict[str, list[str]] = {
    "shards": ["--pipeline-model-parallel-size", "1"],
    "slots": ["--pipeline-model-parallel-size", "1", "--moevement-expert-slots", "8",
              "--moevement-rebalance-interval", "20"],
    "stages": ["--pipeline-model-parallel-size", "2"],
}  # fmt: skip
APART = 0.05
"""Largest relative difference between losses of an iteration, in BF16."""


def killed(process: subprocess.Popen[bytes], record: RunRecord, draw: random.Random, most: int, mean_s: float) -> int:
    """Kill random ranks until the job is over; return the number of kills."""
    kills, next_at = 0, None
    while process.poll() is None:
        time.sleep(0.02)
        if next_at is None:
            if record.metrics_path.exists() and record.newest_metric():
                next_at = time.monotonic() + draw.expovariate(1 / mean_s)
            continue
        if kills >= most or time.monotonic() < next_at:
            continue
        ranks = [rank for rank in json.loads(record.ranks_path.read_text()) if rank["role"] == "active"]
        # One at a time: with a distributed optimizer, two lost ranks may have the only shard and its only copy.
        for rank in draw.sample(ranks, 1) if len(ranks) > 1 else ():
            try:
                os.kill(rank["pid"], signal.SIGKILL)
                kills += 1
            except ProcessLookupError:
                pass  # killed a moment ago
        next_at = time.monotonic() + draw.expovariate(1 / mean_s)
    return kills


def judged(run_dir: Path, baseline: RunRecord) -> dict[str, Any]:
    """Return the errors in the record of a job, and the job's restarts and changes of size."""
    record = RunRecord(run_dir)
    wrong = []
    lines, wanted = record.metrics(), {line["iteration"]: line["loss"] for line in baseline.metrics()}
    if [line["iteration"] for line in lines] != sorted(wanted):
        wrong.append("iterations")
    pairs = [(line["loss"], wanted[line["iteration"]]) for line in lines if line["loss"] is not None]
    if any(abs(loss / expected - 1) > APART for loss, expected in pairs):
        wrong.append("losses")
    resized = [event for event in record.events() if event["event"] == "resized"]
    if any(not event["digests_equal"] for event in resized):
        wrong.append("digests")
    restarts = [event["text"] for event in record.events() if event["event"] == "restart"]
    return {
        "wrong": wrong, "restarts": restarts, "sizes": [event["world_size"] for event in resized],
        "total_s": [event["seconds"]["total"] for event in resized],
        "apart": fmean(abs(loss / expected - 1) for loss, expected in pairs) if pairs else None,
    }  # fmt: skip


def main() -> int:
    """Run jobs under kills until enough ranks were killed; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak.elastic", description=__doc__)
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--folder", type=Path, default=Path("runs/soak_elastic"))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--iterations", type=int, default=120, help="of each job (default: 120)")
    parser.add_argument("--kills-per-job", type=int, default=10, help="at most (default: 10)")
    parser.add_argument("--mean-s", type=float, default=5.0, help="between kills (default: 5)")
    arguments = parser.parse_args()
    folder = arguments.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "jobs.jsonl"
    jobs = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    while (done := sum(job["kills"] for job in jobs)) < arguments.kills:
        number = len(jobs)
        seed = f"{arguments.seed}/{number}"
        name, kind = list(KINDS.items())[number % len(KINDS)]
        words = [*BATCH, *kind, *QUICK, *ELASTIC, "--train-iters", str(arguments.iterations), "--eval-iters", "0"]
        baseline = RunRecord(folder / f"failure_free_{name}_{arguments.iterations}")
        if not baseline.summary_path.exists():
            run(words, ["--spares", "0"], baseline.folder).wait()
        run_dir = folder / f"job_{number}"
        process = run(words, ["--spares", "0", "--respawn-after", "1"], run_dir)
        most = min(arguments.kills_per_job, arguments.kills - done)
        kills = killed(process, RunRecord(run_dir), random.Random(seed), most, arguments.mean_s)
        job = {"job": number, "kind": name, "seed": seed, "kills": kills, "rc": process.returncode}
        job |= (
            judged(run_dir, baseline) if process.returncode == 0 else {"wrong": ["end"], "total_s": [], "restarts": []}
        )
        jobs.append(job)
        with log.open("a") as file:
            file.write(json.dumps(job) + "\n")
        print(json.dumps(job), flush=True)
    seconds = [duration_s for job in jobs for duration_s in job["total_s"]]
    for name, value in (
        ("jobs", len(jobs)), ("kills", done), ("changes of size", len(seconds)),
        ("restarts", sum(len(job["restarts"]) for job in jobs)), ("wrong", [job for job in jobs if job["wrong"]]),
        ("seconds of a change, median", f"{median(seconds):.2f}" if seconds else ""),
    ):  # fmt: skip
        print(f"{name}: {value}")
    return 0 if not any(job["wrong"] for job in jobs) else 1


if __name__ == "__main__":
    sys.exit(main())
