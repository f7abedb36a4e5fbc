"""Live benchmark of the five regimes of MoEvement's table 7. It writes benchmarks/regimes.md.

python -m benchmarks.regimes
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.environment import measured_on
from benchmarks.papers.common import table
from benchmarks.papers.published import HOURS, TABLE_7, Precision
from megatron.moevement.bench import overhead as script
from megatron.moevement.describe import describe
from moevement_cli.bench_overhead import summarise
from moevement_cli.bench_run import model_words, record_of, samples_of
from moevement_core.planning.checkpoint_plan import CheckpointPlan, PlanInput
from moevement_core.planning.cluster import Cluster
from moevement_core.planning.job import JobShape
from moevement_core.precision import TABLE_7 as REGIMES

OUTPUT = Path(__file__).with_suffix(".md")
RANKS, BLOCKS, BLOCK_ITERATIONS, KILLS = 3, 5, 3, 3
BUDGET_SHARE = 5
"""Full state of row 2, divided by the bytes that an iteration may save. Row 2 is the heaviest: 12 bytes per parameter."""
PHASES = ("forward", "backward", "reduce", "backward", "gather")
MODEL = (
    "--hidden-size", "256", "--moe-ffn-hidden-size", "512", "--ffn-hidden-size", "512", "--use-distributed-optimizer",
    "--global-batch-size", str(RANKS), "--moevement-sparse-ckpt", "--moevement-replicas", "1",
    "--moevement-ranks-per-node", "1",
)  # fmt: skip
_AWARE = ("--use-precision-aware-optimizer",)
_FP8 = ("--fp8-format", "hybrid", "--fp8-param-gather", "--fp8-recipe", "delayed")
FLAGS: tuple[tuple[str, ...], ...] = (
    ("--fp16", "--initial-loss-scale", "4096", "--accumulate-allreduce-grads-in-fp32", *_AWARE,
     "--main-params-dtype", "fp16", "--exp-avg-dtype", "fp16", "--exp-avg-sq-dtype", "fp16"),
    _FP8,
    (*_FP8, *_AWARE, "--main-params-dtype", "fp16"),
    (*_FP8, *_AWARE, "--main-params-dtype", "fp16", "--exp-avg-dtype", "fp8", "--exp-avg-sq-dtype", "fp16"),
    (*_FP8, *_AWARE, "--main-params-dtype", "fp8", "--exp-avg-dtype", "fp8", "--exp-avg-sq-dtype", "fp16"),
)  # fmt: skip
"""Megatron's flags for each row of the table."""


@dataclass(frozen=True)
class Row:
    """Results of one regime."""

    regime: str
    expert_bytes: tuple[int, int]
    """Bytes of the full state and of the compute weights of an expert, all ranks together."""
    non_expert_bytes: tuple[int, int]
    """Bytes of the full state and of the compute weights of the rest of a layer, all ranks together."""
    rank_bytes: tuple[int, int]
    """Bytes of the full state and of the compute weights that the heaviest rank owns."""
    window: int
    overhead: dict[str, Any]
    recovery_s: float
    """Median seconds from a kill to the next committed iteration, without that iteration."""
    repeated: float
    """Median number of iterations that a recovery replayed."""
    kills: int


def main() -> None:
    """Measure each regime, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.add_argument("--row", type=int, choices=range(1, len(FLAGS) + 1), help="measure only this row, print JSON")
    arguments = parser.parse_args()
    jobs = [describe("regimes", model_words([*MODEL, *flags]), RANKS) for flags in FLAGS]
    assert [str(job.regime) for job in jobs] == [str(regime) for regime in REGIMES]
    budget = max(rank.full for job in jobs for rank in job.stages[0].rank_bytes(job.regime)) / BUDGET_SHARE
    if arguments.row:
        print(json.dumps(asdict(measure(jobs[arguments.row - 1], FLAGS[arguments.row - 1], budget))))
        return
    rows = []
    for number in range(1, len(FLAGS) + 1):  # each row in a new process, as a user would run it
        print(f"row {number} of {len(FLAGS)} ...", flush=True)
        command = [sys.executable, "-m", "benchmarks.regimes", "--row", str(number)]
        ran = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        rows.append(Row(**json.loads(ran.stdout.splitlines()[-1])))
    arguments.output.write_text(report(rows, budget), encoding="utf-8")


def measure(job: JobShape, flags: tuple[str, ...], budget: float) -> Row:
    """Plan the window of a regime at ``budget`` bytes per iteration, run two jobs with it, and return the results."""
    cluster = Cluster(gpus_per_node=1, d2h_bytes_per_s=budget, network_bytes_per_s=budget)
    plan = CheckpointPlan(PlanInput(job, cluster, job.regime, iteration_s=1.0, replicas=1))
    words = [*MODEL, *flags, "--moevement-window", str(plan.size)]
    iterations = BLOCKS * len(script.MODES) * BLOCK_ITERATIONS + 1
    samples = samples_of(
        script, RANKS, [*words, "--train-iters", str(iterations)], {script.BLOCK_ENV: str(BLOCK_ITERATIONS)}
    )
    recovery_s, repeated, kills = _killed(words, plan.size)
    own = job.stages[0].rank_bytes(job.regime)
    shapes = {shape.name: shape for shape in job.stages[0].operators}
    of_operators = [
        job.regime.state_bytes(shapes[name].tensors) for name in ("layers.1.experts.0", "layers.1.non_expert")
    ]
    expert, non_expert = of_operators
    return Row(
        regime=str(job.regime), expert_bytes=(expert.full, expert.compute), non_expert_bytes=(non_expert.full, non_expert.compute),
        rank_bytes=(max(rank.full for rank in own), max(rank.compute for rank in own)), window=plan.size, overhead=summarise(list(samples)),
        recovery_s=recovery_s, repeated=repeated, kills=kills,
    )  # fmt: skip


def _killed(words: list[str], window: int) -> tuple[float, float, int]:
    """Run a job with kills, and return median seconds, median replayed iterations, and the number of failures.

    The job kills rank 1 several times. A spare takes over the rank each time.
    """
    every = 2 * window + 1
    flags = [*words, "--train-iters", str((KILLS + 1) * every)]
    for kill in range(1, KILLS + 1):
        flags += ["--moevement-inject", f"rank=1,iteration={kill * every},phase={PHASES[(kill - 1) % len(PHASES)]}"]
    events, metrics = record_of(RANKS, 1, flags)
    failures = [event for event in events if event["event"] == "failure"]
    committed_at = {line["iteration"]: line["time"] for line in metrics}
    iteration_s = statistics.median(line["iteration_s"] or 0.0 for line in metrics)
    seconds = [
        committed_at[failure["recovery"]["until"] + 1] - failure["failed_at"] - iteration_s for failure in failures
    ]
    repeated = [failure["recovery"]["replayed"] for failure in failures]
    return statistics.median(seconds), statistics.median(repeated), len(failures)


def report(rows: list[Row], budget: float) -> str:
    """Return the text of the page."""
    sizes = [
        [row.regime, *(f"{full:,}, {compute:,}" for full, compute in (row.expert_bytes, row.non_expert_bytes)),
         f"{row.rank_bytes[0] / 1e6:.2f}, {row.rank_bytes[1] / 1e6:.2f}"]
        for row in rows
    ]  # fmt: skip
    runs = []
    for row, published in zip(rows, TABLE_7, strict=True):
        overhead = row.overhead
        captured, sent = ("{1:.3f} ({0:.3f} to {2:.3f})".format(*overhead[name]) for name in _RATIOS)
        runs.append(
            [row.regime, f"{row.window}", f"{published.window}", f"{overhead['iteration_s']:.2f} s", captured, sent,
             f"{overhead['copied_mb']:.2f}", f"{1e3 * overhead['capture_cpu_s']:.1f} ms",
             f"{row.recovery_s:.1f} s, {row.repeated:g} of {row.kills} kills", _published_s(published)]
        )  # fmt: skip
    first = ("compute/master/moments", "an expert, bytes: full, compute", "a layer without its experts", "a rank, MB")
    second = (
        "compute/master/moments", "W", "W published", "an iteration", "captured, over off", "captured and sent, over off",
        "copied an iteration, MB", "capture, processor time", "a failure costs; iterations repeated", "published",
    )  # fmt: skip
    return f"""# The regimes of table 7, live

    python -m benchmarks.regimes        (writes this file)

An MoE of 14 M parameters on {RANKS} data-parallel ranks with the distributed optimizer and one replica. FP8 is this project's own, in
plain torch. It slows iterations down, so nothing here says how fast FP8 is. Bytes come from a plan; a test
compares them with the live tensors of every rank in each of these regimes. Full state is master weights, moments
and their scales. (Row 2 uses torch's Adam, so it has step counters as well.) Compute weights are FP8 codes and scales of linear
layers, and BF16 values of everything else.

{table(first, sizes)}

W is the smallest window whose slots fit into a budget of {budget / 1e6:.2f} MB an iteration (a fifth of row 2's full state).
The plan computes it with state cut evenly over ranks. The live runs use the same W, although their ranks own a little more or less. The
paper's W is for other bandwidths and iteration times. In one run, blocks take turns: snapshots off, captured, and captured and sent. Ratios
compare neighbouring blocks; they are medians with quartiles. In another run, a rank is killed {KILLS} times, and a spare takes
over. The table has the seconds from the kill to the next committed iteration, without that iteration. The published seconds are
those of all recoveries in {HOURS} hours, divided by the number of failures (one an hour, on 128 GPUs).

{table(second, runs)}

Row 5 needs `--main-params-dtype fp8`, which this project has, and Megatron's parser and Transformer Engine's Adam do not. A
weight changes only if a step is at least half the distance to the next FP8 number. So the job learns next to nothing, but
it recovers exactly.

{measured_on("torch", "megatron-core")}, gloo. {RANKS} ranks share the cores with the copies and each other.
"""


_RATIOS = ("capture_ratio", "replicate_ratio")


def _published_s(published: Precision) -> str:
    return f"{published.recovery_s['moevement'][0] / HOURS:.1f} s"


if __name__ == "__main__":
    main()
