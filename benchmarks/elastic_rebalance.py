"""Live benchmark of the gain and the cost of expert slots that follow the loads. It writes elastic_rebalance.md.

    python -m benchmarks.elastic_rebalance                 (eight minutes)

The benchmark trains the laptop preset on four data-parallel ranks, with six slots for eight experts each, without an
auxiliary loss that would even out the loads. In the first training, the placement for equal loads never changes. In
each other training, the job checks the loads at a fixed interval of iterations.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.environment import measured_on
from benchmarks.papers.common import table
from moevement_core.run.run_record import RunRecord

OUTPUT = Path(__file__).with_suffix(".md")
ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "examples" / "pretrain_moe"
NEVER = 1_000_000
SLOTS = 6
"""Slots for experts on each rank. With four, each of the eight experts would have its two replicas, and none could move."""


def main() -> None:
    """Measure each interval, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=160, metavar="N", help="of each (default: 160)")
    parser.add_argument("--every", type=int, nargs="+", default=[NEVER, 40, 20], metavar="N", help="check intervals")
    arguments = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for every in arguments.every:
            record = _train(Path(folder, str(every)), every, arguments.iterations)
            rows.append(_row(record, every))
            print(*rows[-1], sep=" | ", file=sys.stderr, flush=True)
    OUTPUT.write_text(report(rows, arguments.iterations), encoding="utf-8")


def _train(run_dir: Path, every: int, iterations: int) -> RunRecord:
    words = [
        "--nproc", "4", "--spares", "0", str(SCRIPT / "pretrain_gpt.py"), "--config",
        str(SCRIPT / "configs" / "laptop.yaml"),
        "--pipeline-model-parallel-size", "1", "--expert-model-parallel-size", "1", "--moe-aux-loss-coeff", "0",
        "--train-iters", str(iterations), "--eval-iters", "0", "--moevement-elastic", "--moevement-expert-slots", str(SLOTS),
        "--moevement-rebalance-interval", str(every), "--run-dir", str(run_dir),
    ]  # fmt: skip
    subprocess.run(
        [sys.executable, "-m", "moevement_cli.main", "launch", *words], check=True, cwd=ROOT, stdout=subprocess.DEVNULL
    )
    return RunRecord(run_dir)


def _row(record: RunRecord, every: int) -> list[str]:
    lines = record.metrics()
    half = [line["expert_imbalance"] for line in lines[len(lines) // 2 :] if line.get("expert_imbalance") is not None]
    resized = [event for event in record.events() if event["event"] == "resized"]
    seconds = [event["seconds"]["total"] for event in resized]
    return [
        "never" if every == NEVER else f"{every}",
        f"{statistics.mean(half):.2f}",
        f"{len(resized)}",
        f"{statistics.median(seconds):.2f}" if seconds else "",
        f"{statistics.mean(event['moved_bytes'] for event in resized) / 1e6:.1f}" if resized else "",
        f"{statistics.median(line['iteration_s'] for line in lines[8:] if line.get('iteration_s')):.2f}",
        f"{lines[-1]['loss']:.3f}",
    ]


def report(rows: list[list[str]], iterations: int) -> str:
    """Return the text of the page."""
    header = [
        "checked every", "slowest rank over an even one, second half", "rebalances", "s each, median", "MB moved each",
        "s an iteration, median", "loss at the end",
    ]  # fmt: skip
    return f"""# Experts that follow their loads, live

    python -m benchmarks.elastic_rebalance        (writes this file)

The laptop preset trains {iterations} iterations on four data-parallel ranks with {SLOTS} slots for eight experts each, without an
auxiliary loss. The second column is the time of the expert part of an iteration, relative to even loads, if every rank has
its own processors. Here four ranks share two cores, so the time of an iteration does not show it. A rebalance interrupts all
ranks. *s each* is the time from the interruption to the next iteration, most of it to build new models.

{table(header, rows)}

On recorded routing of a model that trains for longer: [elastic.md](elastic.md).

{measured_on("torch", "megatron-core")}
"""


if __name__ == "__main__":
    main()
