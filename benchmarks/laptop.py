"""Benchmark of the laptop preset: startup time, iteration time and memory. It writes benchmarks/laptop.md.

    make bench

The benchmark repeats the demo's run a few times. Forked and fresh ranks alternate, because a laptop's clock is not
steady.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.environment import measured_on

ROOT = Path(__file__).parents[1]
MODES = {"forked": [], "fresh": ["--fresh-interpreters"]}


@dataclass(frozen=True)
class Measured:
    """Measurements of one run."""

    first_iteration_s: float
    """Seconds from the command to the end of iteration 1."""
    iteration_s: float
    """Median seconds of an iteration, without the first five."""
    tokens_per_s: float
    peak_gib: float
    """Largest sum of the proportional set sizes of all processes, in GiB."""


def main() -> None:
    """Measure forked and fresh ranks, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=40)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "laptop.md")
    arguments = parser.parse_args()
    measured: dict[str, list[Measured]] = {mode: [] for mode in MODES}
    for repeat in range(arguments.repeats):
        for mode, options in MODES.items():
            measured[mode].append(measure(options, arguments.iterations))
            print(f"{repeat + 1}/{arguments.repeats} {mode}: {measured[mode][-1]}", flush=True)
    arguments.output.write_text(report(measured, arguments.repeats, arguments.iterations), encoding="utf-8")
    print(f"written: {arguments.output}")


def measure(options: list[str], iterations: int) -> Measured:
    """Train ``iterations`` iterations of the laptop preset on four ranks, and return the measurements."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        command = [
            sys.executable, "-m", "moevement_cli.main", "launch", "--nproc", "4", *options,
            "examples/pretrain_moe/pretrain_gpt.py", "--config", "examples/pretrain_moe/configs/laptop.yaml",
            "--train-iters", str(iterations), "--eval-iters", "0", "--run-dir", str(run_dir),
        ]  # fmt: skip
        started_s = time.time()
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        peak = _PeakMemory(process.pid)
        if process.wait() != 0:
            raise RuntimeError(f"the run ended with code {process.returncode}; run it by hand: {' '.join(command)}")
        lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        steady = lines[5:]
        return Measured(
            first_iteration_s=lines[0]["time"] - started_s,
            iteration_s=statistics.median(line["iteration_s"] for line in steady),
            tokens_per_s=statistics.median(line["tokens_per_s"] for line in steady),
            peak_gib=peak.stop() / 2**30,
        )


class _PeakMemory:
    """Sampler of the proportional set size of a process tree, which counts a page that forked ranks share only once."""

    def __init__(self, pid: int) -> None:
        self._peak = 0
        self._done = threading.Event()
        self._process = psutil.Process(pid)
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()

    def _sample(self) -> None:
        while not self._done.wait(0.5):
            total = 0
            try:
                for process in [self._process, *self._process.children(recursive=True)]:
                    total += process.memory_full_info().pss
            except psutil.Error:
                continue
            self._peak = max(self._peak, total)

    def stop(self) -> int:
        """Stop the sampler, and return the largest number of bytes."""
        self._done.set()
        self._thread.join()
        return self._peak


def report(measured: dict[str, list[Measured]], repeats: int, iterations: int) -> str:
    """Return the text of the page: the table, and the command that measures it again."""

    def median(mode: str, name: str) -> float:
        return statistics.median(getattr(sample, name) for sample in measured[mode])

    def spread(mode: str, name: str) -> str:
        values = [getattr(sample, name) for sample in measured[mode]]
        return f"{median(mode, name):.2f} ({min(values):.2f} to {max(values):.2f})"

    rows = [
        ("command to end of iteration 1 (s)", "first_iteration_s"),
        ("iteration (s)", "iteration_s"),
        ("tokens/s", "tokens_per_s"),
        ("peak memory of all processes (GiB)", "peak_gib"),
    ]
    table = "\n".join(f"| {label} | {spread('forked', name)} | {spread('fresh', name)} |" for label, name in rows)
    return (
        "# The laptop preset\n\n"
        "`make bench` (`benchmarks/laptop.py`) trains `examples/pretrain_moe/configs/laptop.yaml` on four ranks "
        f"(pipeline 2 x expert/data 2), {iterations} iterations, {repeats} times each way, interleaved.\n"
        "The preset takes a snapshot every iteration and sends it to two peers. Median and range. "
        "Forked ranks come from one process that has imported Megatron; each fresh rank imports Megatron itself.\n\n"
        f"| | forked (default) | fresh interpreters |\n|---|---|---|\n{table}\n\n"
        f"{measured_on('torch', 'megatron-core')}, gloo.\n"
    )


if __name__ == "__main__":
    main()
