"""How the parts of a recovery grow with the ranks of a job; writes benchmarks/regroup.md.

    python -m benchmarks.regroup

A tiny MoE on 4, 8 and 16 ranks of one machine; one rank is killed a few times and restored by redo.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

from benchmarks.environment import measured_on
from benchmarks.papers.common import table
from moevement_cli.bench_run import record_of

OUTPUT = Path(__file__).with_suffix(".md")
RANKS = (4, 8, 16)
KILLS = 4
TINY = (
    "--num-layers", "2", "--hidden-size", "64", "--num-attention-heads", "4", "--ffn-hidden-size", "64",
    "--num-experts", "4", "--moe-ffn-hidden-size", "64", "--seq-length", "32", "--max-position-embeddings", "32",
    "--pipeline-model-parallel-size", "2", "--expert-model-parallel-size", "2", "--use-distributed-optimizer",
    "--moevement-sparse-ckpt", "--moevement-window", "3", "--moevement-replicas", "1",
    "--moevement-replicas-on-same-node", "--moevement-recovery", "redo",
)  # fmt: skip


def main() -> None:
    """Measure and write."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    rows = [_row(ranks) for ranks in RANKS]
    OUTPUT.write_text(report(rows), encoding="utf-8")


def _row(ranks: int) -> list[str]:
    flags = [*TINY, "--global-batch-size", str(ranks // 2), "--train-iters", str(8 * (KILLS + 1))]
    for kill in range(1, KILLS + 1):
        flags += ["--moevement-inject", f"rank=1,iteration={8 * kill},phase=backward"]
    print(f"{ranks} ranks ...", flush=True)
    failures = [one for one in record_of(ranks, 1, flags)[0] if one["event"] == "failure"]

    def median(value: Any) -> str:
        return f"{statistics.median(map(value, failures)):.2f}"

    parts = [median(lambda one, name=name: one["parts"][name]) for name in failures[0]["parts"]]
    return [str(ranks), *parts, median(lambda one: one["total_s"]), str(len(failures))]


def report(rows: list[list[str]]) -> str:
    """The whole file."""
    header = (
        "ranks", "detect", "abort", "regroup", "set up and fetch", "enter the loop", "restore", "total", "kills",
    )  # fmt: skip
    return f"""# How a recovery grows with ranks

    python -m benchmarks.regroup        (writes this file)

A tiny MoE (pipeline 2 x expert 2 x data), one rank killed {KILLS} times in a backward pass and restored by redo; medians,
seconds. All ranks share the two cores, so what each rank does by itself (make its groups, look for references to old ones,
enter the loop) takes longer with every rank here, and would not on machines of their own; what these rows cannot show is how
connections over a network grow.

{table(header, rows)}

All process groups are made again, also those without a lost rank. Gloo's survivors have had their sockets shut down (that is
how they are freed from waiting), and a group that was interrupted in a collective cannot be used again, with NCCL neither:
which of them were idle nobody knows without asking all ranks. Making them is part of *regroup*.

{measured_on("torch", "megatron-core")}, gloo.
"""


if __name__ == "__main__":
    main()
