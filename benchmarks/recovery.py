"""Benchmark that runs `moevement bench recovery` and writes benchmarks/recovery.md.

python -m benchmarks.recovery
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.environment import measured_on

OUTPUT = Path(__file__).with_suffix(".md")
COMMAND = ["bench", "recovery", "--rounds", "4", "--kills", "5", "--json"]
NAMES = {"stage": "one stage alone", "all": "all stages", "peers": "all stages, own copies dropped"}
Row = tuple[str, Callable[[dict[str, float], dict[str, float]], str]]
ROWS: tuple[Row, ...] = (
    ("seconds an iteration", lambda kind, normal: f"{kind['wall_s']:.2f}"),
    ("over a normal one", lambda kind, normal: f"{kind['wall_s'] / normal['wall_s']:.2f}"),
    ("processor seconds of all ranks, an iteration", lambda kind, normal: f"{kind['cpu_s']:.2f}"),
    ("over a normal one", lambda kind, normal: f"{kind['cpu_s'] / normal['cpu_s']:.2f}"),
    ("iterations replayed", lambda kind, normal: f"{kind['replayed']:.1f}"),
    ("report, plan and fetch", lambda kind, normal: f"{1e3 * kind['fetch_s']:.0f} ms"),
    ("fed from logs", lambda kind, normal: f"{kind['fed_mb']:.1f} MB"),
    ("measured", lambda kind, normal: f"{kind['count']:.0f}"),
)


def main() -> None:
    """Run the benchmark, and write the page."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    command = [str(Path(sys.executable).with_name("moevement")), *COMMAND]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    OUTPUT.write_text(report(json.loads(printed.splitlines()[-1])), encoding="utf-8")


def report(results: dict[str, Any]) -> str:
    """Return the text of the page, from the command's JSON."""
    kinds = [results["measured"][kind] for kind in ("normal", "stage", "all")]
    ways = results["killed"]
    killed = "\n".join(
        f"| {name} | {' | '.join(f'{parts[name]:.2f}' for parts in ways.values())} |"
        for name in next(iter(ways.values()))
    )
    rows = "\n".join(f"| {label} | {' | '.join(text(kind, kinds[0]) for kind in kinds)} |" for label, text in ROWS)
    return f"""# One stage that replays alone, against all stages

    moevement {" ".join(COMMAND)}        (python -m benchmarks.recovery writes this file)

An MoE of {results["stages"]} layers on {results["stages"]} pipeline stages of one rank each, with {results["micro_batches"]} micro-batches an iteration and an aligned window of
{results["window"]}. In one run, a stage in the middle and all stages lose their memory in turns. Each recovery restores all
bits; the benchmark compares every byte. Numbers are medians, for a replay per replayed iteration.

| | normal iteration | one stage alone | all stages |
|---|---|---|---|
{rows}

A stage that replays alone has no pipeline bubble, and has the machine for itself. Here {results["stages"]} ranks share two cores, so the
ratio of wall seconds is too favourable. The ratio of processor seconds, which includes ranks that wait, is more
reliable. Frozen operators need no weight gradients, and a normal iteration also captures a snapshot. Only memory is lost, and
processes stay. So detection, restart and regrouping are not in these numbers.

**With processes killed**: in four jobs with one spare, SIGKILL ends a rank of stage {results["stages"] // 2}, {results["kills"]} times, in turns in forward, backward,
reduction and gather. The first job recovers by redo. In the second, the stage of the rank replays. In the third, the logs
may use no memory, so all stages roll back. In the fourth, all stages roll back from copies on their peers
(`--moevement-keep-own never`). Numbers are medians in seconds, with the default values of Megatron's `--inprocess-*`
timeouts. Memory and traffic are those of the last rank.

| | {" | ".join(NAMES.get(way, way) for way in ways)} |
|---|{"---|" * len(ways)}
{killed}

{measured_on("torch", "megatron-core")}, gloo; nothing was measured on a GPU.
"""


if __name__ == "__main__":
    main()
