"""Benchmark of the simulator itself on the paper's largest cluster. It writes benchmarks/simulator.md.

python -m benchmarks.simulator
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.environment import measured_on

OUTPUT = Path(__file__).with_suffix(".md")
JOB = ["simulate", "deepseek_671b", "--network-share", "1"]
SWEEP = [*JOB, "--strategy", "dense", "checkfreq", "gemini", "moc", "moevement", "--seeds", "20", "--json"]
ONE = [*JOB, "--strategy", "moevement", "--mtbf", "600", "--seeds", "1", "--json"]
REPEATS = 5


def main() -> None:
    """Run and time the commands, and write the page."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    one_s, _ = run(ONE)
    sweep_s, results = run(SWEEP)
    OUTPUT.write_text(report(one_s, sweep_s, results), encoding="utf-8")


def run(words: list[str]) -> tuple[float, dict[str, Any]]:
    """Run a command several times, and return its median seconds and its JSON output."""
    command = [str(Path(sys.executable).with_name("moevement")), *words]
    seconds = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds), json.loads(printed.splitlines()[-1])


def report(one_s: float, sweep_s: float, results: dict[str, Any]) -> str:
    """Return the text of the page."""
    rows = "\n".join(
        f"| {result['mtbf_s'] / 60:g} min | {result['strategy']} | {result['interval']} | "
        f"{result['ettr_formula']:.3f} | "
        f"{result['ettr']:.3f} ± {result['ettr_confidence']:.3f} |"
        for result in results["results"]
    )
    trainings = sum(len(result["failures"]) for result in results["results"])
    return f"""# The simulator

    moevement {" ".join(SWEEP)}        (python -m benchmarks.simulator writes this file)

One training of twelve hours on 16,384 GPUs, with a failure every ten minutes: {one_s:.2f} s for the whole command (most of
it to start Python). Five strategies at five rates with twenty seeds, {trainings} trainings: {sweep_s:.2f} s. One process,
medians of {REPEATS}.

| a failure every | strategy | interval | ETTR, formula | ETTR, simulated |
|---|---|---|---|---|
{rows}

What is assumed: examples/simulate/deepseek_671b.yaml, 1 s to detect, 10 s to regroup.

{measured_on("torch", "megatron-core")}.
"""


if __name__ == "__main__":
    main()
