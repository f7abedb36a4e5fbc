"""Benchmark that runs `moevement bench overhead` and writes benchmarks/overhead.md.

python -m benchmarks.overhead
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.environment import measured_on

OUTPUT = Path(__file__).with_suffix(".md")
COMMAND = [
    "bench", "overhead", "--blocks", "5", "--block-iterations", "4", "--micro-batches", "2", "--replicas", "1", "--json",
]  # fmt: skip
ROWS = (
    ("captured, over off", lambda r: "{1:.3f} ({0:.3f} to {2:.3f})".format(*r["capture_ratio"])),
    (
        "captured and sent to peers, over off",
        lambda r: "{1:.3f} ({0:.3f} to {2:.3f})".format(*r["replicate_ratio"]),
    ),
    ("rounds of all three modes", lambda r: f"{r['rounds']}"),
    ("stall in front of the optimizer step", lambda r: f"{1e3 * r['stall_s']:.1f} ms"),
    ("training thread: boundary record, issuing copies", lambda r: f"{1e3 * r['training_thread_s']:.1f} ms"),
    ("copied an iteration, one rank", lambda r: f"{r['copied_mb']:.1f} MB"),
    ("acknowledged by peers an iteration, one rank", lambda r: f"{r['replicated_mb']:.1f} MB"),
    ("capture in all, processor time of an iteration", lambda r: f"{1e3 * r['capture_cpu_s']:.1f} ms"),
    ("copy, processor time", lambda r: f"{r['copy_cpu_ms_per_mb']:.3f} ms/MB"),
    ("digest, processor time", lambda r: f"{r['digest_cpu_ms_per_mb']:.3f} ms/MB"),
    ("digest of the whole state, once in a window, processor time", lambda r: f"{1e3 * r['whole_cpu_s']:.1f} ms"),
    ("capture costs less than 1% from", lambda r: f"{r['below_1_percent_from_s']:.2f} s an iteration"),
)


def main() -> None:
    """Run the benchmark, and write the page."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    command = [str(Path(sys.executable).with_name("moevement")), *COMMAND]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    OUTPUT.write_text(report(json.loads(printed.splitlines()[-1])), encoding="utf-8")


def report(results: dict[str, Any]) -> str:
    """Return the text of the page, from the command's JSON."""
    lengths = list(results["lengths"].values())
    head = " | ".join(
        f"{length['iteration_s']:.2f} s an iteration ({name})" for name, length in results["lengths"].items()
    )
    rows = "\n".join(f"| {label} | {' | '.join(text(length) for length in lengths)} |" for label, text in ROWS)
    return f"""# What snapshots cost

    moevement {" ".join(COMMAND)}        (python -m benchmarks.overhead writes this file)

An MoE of 57 M parameters trains in BF16 on {results["nproc"]} data-parallel ranks with the distributed optimizer. A rank has 228 MB of full state. The
window is 6 ({results["replicas"]} replica(s); each rank counts as a node). *replay* has aligned sparse windows. *redo* has FP32 gradients
in place of compute weights. Each has one run, in which blocks take turns: snapshots off, captured, and captured and sent.
Ratios compare neighbouring blocks; they are medians with quartiles. Here the copy thread and training share the same two cores,
so the processor time of capturing is the most that it can take of an iteration.

| | {head} |
|---|{"---|" * len(lengths)}
{rows}

{measured_on("torch", "megatron-core")}, gloo. {results["nproc"]} ranks share two cores. The same machine sends, receives,
checks and keeps every byte, in {results["nproc"] * results["replicas"]} streams at once. So the second ratio is the cost of replication on *this* machine, and says
little about nodes with NICs. Other programs ran at the same time, so the ratios spread widely; the processor times are more
reliable. Nothing was measured on a GPU.
"""


if __name__ == "__main__":
    main()
