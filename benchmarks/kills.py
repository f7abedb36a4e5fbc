"""A rank of the laptop preset is killed again and again, at random moments; writes benchmarks/kills.md.

    python -m benchmarks.kills

From outside, by SIGKILL, so that a kill finds the job anywhere in an iteration. The same moments by replay and by redo; both
runs are compared with a failure-free one, bit for bit.
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
from pathlib import Path
from typing import Any

from benchmarks.environment import measured_on
from benchmarks.papers.common import table
from moevement_cli.examples import EXAMPLES
from moevement_core.run_record import RunRecord

OUTPUT = Path(__file__).with_suffix(".md")
PRETRAIN = EXAMPLES / "pretrain_moe"
EVERY = 7
"""Iterations from one kill to the next."""
LONGEST_S = 1.0
"""After an iteration is over a kill comes so much later at most."""


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=10, metavar="N")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="of who is killed, and when")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        runs = Path(folder)
        _train(runs / "free", arguments.kills, [], None)
        rows = []
        for way in ("replay", "redo"):
            words = ["--moevement-recovery", way]
            _train(runs / way, arguments.kills, words, random.Random(arguments.seed))
            verified = subprocess.run(_moevement("verify", str(runs / "free"), str(runs / way)), check=False)
            rows.append([way, *_row(RunRecord(runs / way)), "equal" if verified.returncode == 0 else "DIFFERENT"])
    OUTPUT.write_text(report(rows, arguments.kills, arguments.seed), encoding="utf-8")


def _moevement(*words: str) -> list[str]:
    return [str(Path(sys.executable).with_name("moevement")), *words]


def _train(run_dir: Path, kills: int, words: list[str], moments: random.Random | None) -> None:
    config = PRETRAIN / "configs" / "laptop.yaml"
    job = subprocess.Popen(
        _moevement("launch", "--nproc", "4", "--spares", "2", str(PRETRAIN / "pretrain_gpt.py"), "--config", str(config),
                   "--train-iters", str(EVERY * (kills + 1)), "--run-dir", str(run_dir), *words),
        stdout=subprocess.DEVNULL,
    )  # fmt: skip
    left = [EVERY * (kill + 1) for kill in range(kills)] if moments is not None else []
    record = RunRecord(run_dir)
    while job.poll() is None:
        time.sleep(0.05)
        if moments is not None and left and ((record.newest_metric() or {"iteration": 0})["iteration"]) >= left[0]:
            left.pop(0)
            time.sleep(moments.uniform(0, LONGEST_S))
            rank = moments.randrange(4)
            pids = {one["rank"]: one["pid"] for one in json.loads(record.ranks_path.read_text())}
            os.kill(pids[rank], signal.SIGKILL)
    if job.returncode:
        raise SystemExit(f"{run_dir.name} ended with {job.returncode}")


def _row(record: RunRecord) -> list[str]:
    metrics = list(record.metrics())
    at = {line["iteration"]: line["time"] for line in metrics}
    failures = [event for event in record.events() if event["event"] == "failure" and event["recovery"]]

    def median(values: list[float]) -> str:
        return f"{statistics.median(values):.2f}"

    def of_metrics(name: str) -> float:
        return float(statistics.median(line.get(name) or 0 for line in metrics))

    to_next = [at[one["recovery"]["until"] + 1] - one["failed_at"] for one in failures]
    parts = [median([one["parts"][name] for one in failures]) for name in failures[0]["parts"]]
    return [
        *parts, median([one["total_s"] for one in failures]), median(to_next), f"{of_metrics('iteration_s'):.2f}",
        f"{sum(one['recovery']['replayed'] == 0 for one in failures)} of {len(failures)}",
        f"{sum(one['recovery']['replayed'] for one in failures)}",
        f"{(of_metrics('snapshot_memory_bytes') + of_metrics('log_memory_bytes')) / 1e6:.1f} MB",
    ]  # fmt: skip


def report(rows: list[list[Any]], kills: int, seed: int) -> str:
    """The whole file."""
    header = (
        "way", "detect", "abort", "regroup", "set up and fetch", "enter the loop", "restore", "total",
        "kill to next committed iteration", "of it an iteration", "kills without a repeated iteration",
        "iterations repeated", "host memory of a rank", "bits",
    )  # fmt: skip
    return f"""# The laptop preset under random kills

    python -m benchmarks.kills --kills {kills} --seed {seed}        (writes this file)

Four ranks (pipeline 2 x expert/data 2), two spares, W = 3; a random rank is killed by SIGKILL from outside, up to {LONGEST_S:g} s after
every {EVERY}th iteration. Medians, seconds; memory is that of the last rank, snapshots, copies for two others, and logs.

{table(header, rows)}

All ranks and spares share two cores. A kill shortly after a commit finds the newest gradients still on their way: then the
stage of the lost rank replays one iteration.

{measured_on("torch", "megatron-core")}, gloo.
"""


if __name__ == "__main__":
    main()
