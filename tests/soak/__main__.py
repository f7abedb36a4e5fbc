"""Kill random ranks of the laptop model at random moments, from outside, hundreds of times, and compare every run.

``python -m tests.soak --kills 200 --folder runs/soak`` runs job after job, all layouts in turn, until 200 ranks were
killed. Each job is compared with a failure-free one. ``FOLDER/jobs.jsonl`` has the jobs that are over, and a later call
goes on from there.
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
from collections import Counter
from pathlib import Path
from statistics import median
from typing import Any

from moevement_core.run.run_record import RunRecord

ROOT = Path(__file__).parents[2]
LAPTOP = [
    str(ROOT / "examples" / "pretrain_moe" / "pretrain_gpt.py"), "--config",
    str(ROOT / "examples" / "pretrain_moe" / "configs" / "laptop.yaml"),
]  # fmt: skip
LAYOUTS: dict[str, list[str]] = {
    "PP2xEP2": [],
    "PP4": ["--pipeline-model-parallel-size", "4", "--expert-model-parallel-size", "1"],
    "PP2xDP2": ["--expert-model-parallel-size", "1"],
    "VPP2xEP2": ["--num-layers-per-virtual-pipeline-stage", "1"],
    "EP2xDP2": ["--pipeline-model-parallel-size", "1"],
}
GUARDS: dict[str, list[str]] = {
    "copies": [],
    "parity": ["--moevement-protection", "parity:3+1"],
    "parity-2": ["--moevement-protection", "parity:2+2"],
    "peers-alone": ["--moevement-keep-own", "never"],
}
"""Flags of each protection of snapshots. With own snapshots dropped there are no windows on disk, as these are written
from own snapshots."""
QUICK = ["--hidden-size", "64", "--ffn-hidden-size", "64", "--moe-ffn-hidden-size", "64", "--seq-length", "64",
         "--max-position-embeddings", "64"]  # fmt: skip


def run(words: list[str], options: list[str], run_dir: Path) -> subprocess.Popen[bytes]:
    """Start a job; its output goes to a file beside its folder."""
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    with run_dir.with_suffix(".console").open("wb") as console:
        return subprocess.Popen(
            [sys.executable, "-m", "moevement_cli.main", "launch", "--nproc", "4", *options, *LAPTOP, *words,
             "--run-dir", str(run_dir)],
            stdout=console, stderr=console, cwd=ROOT,
        )  # fmt: skip


def digest(run_dir: Path) -> str | None:
    """Return the digest of the final state; None if the run did not come to its end."""
    record = RunRecord(run_dir)
    return record.summary()["state_digest"]["all"] if record.summary_path.exists() else None


def failure_free(name: str, words: list[str], iterations: int, folder: Path) -> str:
    """Return the digest of a failure-free run, which runs once."""
    run_dir = folder / f"failure_free_{name}_{iterations}"
    if digest(run_dir) is None:
        run(words, [], run_dir).wait()
    result = digest(run_dir)
    assert result is not None, f"the run without kills failed: {run_dir}.console"
    return result


def recovered(words: list[str], run_dir: Path, draw: random.Random, most: int, mean_s: float) -> dict[str, Any]:
    """Run a job and kill its ranks; return its results as fields of a line."""
    if "--moevement-keep-own" not in words:
        # If all four ranks die before one is replaced, memory has no state left. Then the job needs windows on disk.
        windows = str(run_dir.with_suffix(".windows"))
        words = [*words, "--moevement-persist-dir", windows, "--moevement-load", windows]
    process, kills = run(words, ["--spares", "2"], run_dir), 0
    record, moments = RunRecord(run_dir), list[str]()
    next_at = None
    while process.poll() is None:
        time.sleep(0.02)
        if next_at is None:
            if record.metrics_path.exists() and record.newest_metric():
                next_at = time.monotonic() + draw.expovariate(1 / mean_s)
            continue
        if kills >= most or time.monotonic() < next_at:
            continue
        ranks = [rank for rank in json.loads(record.ranks_path.read_text()) if rank["role"] == "active"]
        chosen = draw.sample(ranks, min(len(ranks), 2 if draw.random() < 0.15 else 1))
        for rank in chosen:
            try:
                os.kill(rank["pid"], signal.SIGKILL)
                kills += 1
                moments.append(f"{rank['rank']}")
            except ProcessLookupError:
                pass  # killed a moment ago, and not yet replaced
        next_at = time.monotonic() + draw.expovariate(1 / mean_s)
    failures = [event for event in record.events() if event["event"] == "failure"]
    return {
        "kills": kills, "rc": process.returncode, "digest": digest(run_dir), "recoveries": len(failures),
        "by_kind": dict(Counter(kind(event) for event in failures)),
        "starts": [event["iteration"] for event in record.events() if event["event"] == "start"],
        "total_s": [event["total_s"] for event in failures],
        "parts": [event["parts"] for event in failures],
    }  # fmt: skip


def kind(event: dict[str, Any]) -> str:
    """Return the kind of a recovery, in words."""
    recovery = event["recovery"]
    if recovery is None:
        return "no state lost"
    if recovery["redone"] and not recovery["replayed"]:
        return "lost ranks alone, no iteration repeated"
    replayed = [stage for stage, count in recovery["replayed_by_stage"].items() if count]
    stages = len(recovery["replayed_by_stage"])
    if len(replayed) == stages:
        return "all stages"
    return f"{len(replayed)} of {stages} stages"


def main() -> int:
    """Run jobs under kills until enough ranks were killed; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--folder", type=Path, default=Path("runs/soak"))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--iterations", type=int, default=200, help="of each job (default: 200)")
    parser.add_argument("--kills-per-job", type=int, default=20, help="at most (default: 20)")
    parser.add_argument("--mean-s", type=float, default=5.0, help="between kills (default: 5)")
    parser.add_argument("--recovery", default="replay", help="as --moevement-recovery (default: replay)")
    parser.add_argument("--guard", choices=GUARDS, default="copies", help="of snapshots (default: copies)")
    parser.add_argument("--quick", action="store_true", help="of a model a quarter the size")
    arguments = parser.parse_args()
    folder = arguments.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "jobs.jsonl"
    jobs = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    while (done := sum(job["kills"] for job in jobs)) < arguments.kills:
        number = len(jobs)
        draw = random.Random(f"{arguments.seed}/{number}")
        name, layout = list(LAYOUTS.items())[number % len(LAYOUTS)]
        words = [*layout, "--train-iters", str(arguments.iterations), "--lr-decay-iters", "1000"]
        words += QUICK if arguments.quick else []
        wanted = failure_free(name, words, arguments.iterations, folder)
        most = min(arguments.kills_per_job, arguments.kills - done)
        guard = ["--moevement-recovery", arguments.recovery, *GUARDS[arguments.guard]]
        result = recovered([*words, *guard], folder / f"job_{number}", draw, most, arguments.mean_s)
        job = {
            "job": number,
            "layout": name,
            "seed": f"{arguments.seed}/{number}",
            **result,
            "equal": result["digest"] == wanted,
        }
        jobs.append(job)
        with log.open("a") as file:
            file.write(json.dumps(job) + "\n")
        print(
            f"job {number} ({name}): {job['kills']} kills, {job['recoveries']} recoveries, equal: {job['equal']}",
            flush=True,
        )
    print(summary(jobs))
    return 0 if all(job["equal"] for job in jobs) else 1


def summary(jobs: list[dict[str, Any]]) -> str:
    """Return a table of kills, recoveries and results, summed over all jobs."""
    kinds = sum((Counter(job["by_kind"]) for job in jobs), Counter())
    times = sorted(seconds for job in jobs for seconds in job["total_s"])
    rows: list[tuple[str, Any]] = [
        ("jobs", len(jobs)),
        ("kills", sum(job["kills"] for job in jobs)),
        ("recoveries", sum(job["recoveries"] for job in jobs)),
        *((f"... {name}", count) for name, count in sorted(kinds.items())),
        ("begun again from windows on disk, all ranks having died", sum(sum(map(bool, job["starts"])) for job in jobs)),
        ("begun again from the start, nothing being there yet", sum(job["starts"].count(0) - 1 for job in jobs)),
        ("jobs that did not come to their end", sum(job["digest"] is None for job in jobs)),
        ("jobs whose digest equals the failure-free run's", sum(job["equal"] for job in jobs)),
    ]
    if times:
        rows.append(("seconds from failure to resumption, median", f"{times[len(times) // 2]:.2f}"))
        rows.append(("... largest", f"{times[-1]:.2f}"))
        parts = [parts for job in jobs for parts in job["parts"]]
        names = dict.fromkeys(name for failure in parts for name in failure)  # an interrupted recovery has more parts
        rows += [
            (f"... {name}, median", f"{median(failure.get(name, 0.0) for failure in parts):.2f}") for name in names
        ]
    lines = ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
