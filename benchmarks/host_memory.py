"""Benchmark of the host memory of snapshots in a live job, compared with the plan. It writes benchmarks/host_memory.md.

python -m benchmarks.host_memory        (about ten minutes on two cores)

Each job runs without checkpoints and with each protection. The benchmark reads the anonymous resident memory of every
rank until the end. It compares the memory that snapshots add with the estimate that the job prints at its start, and
with `moevement plan`. MALLOC_MMAP_THRESHOLD_ makes malloc return freed memory at once. By default, malloc keeps some
freed memory, and the amount depends on the order of allocations. Here it was 0.3 to 0.4 GB of a rank's 1.1 GB, which is
more than snapshots add.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.environment import measured_on
from benchmarks.papers.common import table

ROOT = Path(__file__).parents[1]
OUTPUT = Path(__file__).with_suffix(".md")
LAPTOP = ROOT / "examples" / "pretrain_moe" / "configs" / "laptop.yaml"
ITERATIONS = 18
EXACT_MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
SIZES = ("--hidden-size", "384", "--ffn-hidden-size", "768", "--moe-ffn-hidden-size", "768", "--seq-length", "32",
         "--max-position-embeddings", "32", "--micro-batch-size", "1", "--moevement-reorder-threshold", "1000")  # fmt: skip


@dataclass(frozen=True)
class Job:
    """Job of the laptop preset with other sizes."""

    name: str
    ranks: int
    words: tuple[str, ...]


@dataclass(frozen=True)
class Guard:
    """Protection of snapshots, as flags of a job and of ``moevement plan``."""

    name: str
    live: tuple[str, ...]
    planned: tuple[str, ...]


JOBS = (
    Job("laptop", 4, (*SIZES, "--global-batch-size", "4")),
    Job("laptop, eight ranks", 8, (*SIZES, "--global-batch-size", "8", "--expert-model-parallel-size", "4")),
)
GUARDS = (
    Guard("copies:2", ("--moevement-keep-own", "always"), ()),
    Guard("copies:2, own dropped", ("--moevement-keep-own", "never"), ("--keep-own", "never")),
    Guard("parity:3+1", ("--moevement-protection", "parity:3+1"), ("--protection", "parity:3+1")),
    Guard("copies:2, redo", ("--moevement-keep-own", "always", "--moevement-recovery", "redo"), ()),
)
_ANONYMOUS = re.compile(r"^RssAnon:\s+(\d+) kB", re.MULTILINE)


def main() -> None:
    """Measure each job, and write the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.host_memory", description=__doc__)
    parser.add_argument("--rounds", type=int, default=1, help="runs of each job and protection (default: 1)")
    arguments = parser.parse_args()
    rows = [row for job in JOBS for row in rows_of(job, arguments.rounds)]
    OUTPUT.write_text(report(rows, arguments.rounds), encoding="utf-8")


def rows_of(job: Job, rounds: int) -> Iterator[list[str]]:
    """Yield a row for each protection: megabytes of a rank as planned, as the job reports them, and as measured."""
    without = [run(job, ("--moevement-strategy", "none"))[0] for _ in range(rounds)]
    for guard in GUARDS:
        more, reported = [], 0.0
        for base_bytes in without:
            live_bytes, reported = run(job, guard.live)
            more.append(statistics.fmean(live_bytes) - statistics.fmean(base_bytes))
            print(
                f"{job.name}, {guard.name}: {more[-1] / 1e6:.0f} MB more, {reported * 1e3:.0f} MB reported", flush=True
            )
        planned, measured = plan(job, guard), statistics.median(more)
        yield [
            job.name, guard.name, f"{planned / 1e6:.0f}", f"{1e3 * reported:.0f}", f"{measured / 1e6:.0f}",
            f"{measured / planned - 1:+.1%}",
        ]  # fmt: skip


def run(job: Job, words: tuple[str, ...]) -> tuple[list[int], float]:
    """Run a job. Return the peak anonymous memory of each rank in bytes, and the need that the job reports in GB."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        console = (Path(folder) / "console").open("w+")
        process = subprocess.Popen(
            [sys.executable, "-m", "moevement_cli.main", "launch", "--nproc", str(job.ranks),
             "examples/pretrain_moe/pretrain_gpt.py", "--config", str(LAPTOP), "--train-iters", str(ITERATIONS),
             "--eval-iters", "0", *job.words, *words, "--run-dir", str(run_dir)],
            cwd=ROOT, env=os.environ | EXACT_MALLOC, stdout=console, stderr=subprocess.STDOUT,
        )  # fmt: skip
        most = [0] * job.ranks
        while process.poll() is None:
            time.sleep(0.1)
            for rank, pid in _pids(run_dir):
                most[rank] = max(most[rank], _anonymous(pid))
        console.seek(0)
        text = console.read()
        assert process.returncode == 0, text[-3000:]
        reported = re.search(r"host memory: rank \d+ needs ([\d.]+) GB", text)
        return most, float(reported[1]) if reported else 0.0


def _pids(run_dir: Path) -> Iterator[tuple[int, int]]:
    try:
        for member in json.loads((run_dir / "ranks.json").read_text()):
            yield member["rank"], member["pid"]
    except (OSError, ValueError, KeyError):
        return


def _anonymous(pid: int) -> int:
    try:
        match = _ANONYMOUS.search(Path(f"/proc/{pid}/status").read_text())
    except OSError:
        return 0
    return int(match[1]) * 1024 if match else 0


def plan(job: Job, guard: Guard) -> int:
    """Return the host memory of the heaviest rank in bytes, according to `moevement plan`."""
    out = subprocess.run(
        [sys.executable, "-m", "moevement_cli.main", "plan", str(LAPTOP), "--ranks", str(job.ranks),
         "--iteration-time", "1", "--d2h-bandwidth", "10", "--network-bandwidth", "10", "--gpus-per-node", "1",
         "--window", "3", "--json", *guard.planned, *job.words],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    planned = json.loads(out.splitlines()[-1])
    memory = (planned["redo"] if "redo" in guard.name else planned)["host_memory_bytes"]
    return int(memory["snapshots"] + memory["replicas"] + memory["logs"])


def report(rows: list[list[str]], rounds: int) -> str:
    """Return the text of the page."""
    header = ("job", "protection", "planned", "reported at the start", "measured", "measured over planned")
    return f"""# Host memory, planned and measured

    python -m benchmarks.host_memory --rounds {rounds}        (writes this file)

Megabytes of a rank. *planned*: by `moevement plan`. *reported at the start*: by the job, from the live tensors, for the rank
that needs the most. *measured*: peak anonymous resident memory of a process, less that of the same job without snapshots, as a
mean over ranks (median of {rounds}). The model is the laptop preset at three times its width, with sequences of 32 and W = 3. The order of operators is
constant, and every rank counts as a node. malloc returns freed memory at once. `moevement plan` cuts operators evenly over the
ranks that share them. In a live job, a slot of a rank has whole experts, and a share of the distributed optimizer has more of
some layers than of others.

{table(header, rows)}

{measured_on("torch", "numpy")}.
"""


if __name__ == "__main__":
    main()
