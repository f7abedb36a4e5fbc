"""MoEvement's table 3 against its own formula and against our simulator; writes benchmarks/papers/table3.md.

    python -m benchmarks.papers.table3

Nothing is fitted. Published intervals and overheads are put into the formula of section 2.4, and our simulator is run with
the bandwidths that the paper states; both stand beside what was published.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import dataclass
from pathlib import Path

from benchmarks.environment import measured_on
from moevement_core.cli.simulate import SCENARIOS
from moevement_core.simulator.failures import FailureModel
from moevement_core.simulator.scenario import load
from moevement_core.simulator.strategies import STRATEGIES, CheckFreq, Costs, Dense, Strategy
from moevement_core.simulator.training import train

OUTPUT = Path(__file__).with_suffix(".md")
HOURS = 12
MTBFS_S = (7200, 3600, 1800, 1200, 600)
SEEDS = 20


@dataclass(frozen=True)
class Published:
    """One system on one model: overhead of an iteration as a share, and by MTBF total recovery seconds and ETTR."""

    system: str
    interval: int
    """Iterations; for MoEvement its window."""
    overhead: float
    recovery_s: tuple[float, ...]
    ettr: tuple[float, ...]


@dataclass(frozen=True)
class Model:
    """A model of the table; the iteration time is what its overheads in seconds and in percent say together."""

    preset: str
    ranks: int
    iteration_s: float
    systems: tuple[Published, ...]


MODELS = (
    Model("moe_llava", 96, 1.75, (
        Published("checkfreq", 57, 0.02, (1265, 2530, 5059, 7589, 11178), (0.945, 0.914, 0.853, 0.792, 0.712)),
        Published("moevement", 3, 0.01, (11, 24, 57, 74, 117), (0.981, 0.979, 0.975, 0.971, 0.964)),
    )),
    Model("gpt_moe", 96, 2.0, (
        Published("checkfreq", 78, 0.01, (1424, 2848, 4486, 8543, 13086), (0.937, 0.903, 0.834, 0.765, 0.687)),
        Published("moevement", 3, 0.01, (18, 28, 78, 105, 161), (0.979, 0.976, 0.971, 0.966, 0.959)),
    )),
    Model("qwen_moe", 96, 2.1, (
        Published("checkfreq", 113, 0.02, (1170, 2340, 4680, 7020, 10040), (0.927, 0.898, 0.841, 0.783, 0.703)),
        Published("moevement", 5, 0.02, (17, 33, 83, 140, 207), (0.981, 0.977, 0.970, 0.963, 0.957)),
    )),
    Model("deepseek_moe", 96, 2.75, (
        Published("checkfreq", 124, 0.03, (992, 1984, 3967, 5951, 9402), (0.902, 0.877, 0.827, 0.777, 0.672)),
        Published("moevement", 6, 0.02, (22, 43, 104, 167, 241), (0.975, 0.970, 0.965, 0.956, 0.951)),
    )),
)  # fmt: skip


def main() -> None:
    """Compute and write."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    OUTPUT.write_text(report([row for model in MODELS for row in rows_of(model, costs_of(model))]), encoding="utf-8")


def costs_of(model: Model) -> Costs:
    """The job at the paper's bandwidths; 0.2 GB/s of storage a GPU, 1 s to detect and 10 s to regroup are assumed."""
    return load(SCENARIOS / f"{model.preset}.yaml").costs()


def rows_of(model: Model, costs: Costs) -> list[str]:
    """A line for each system and failure rate."""
    rows = []
    for published in model.systems:
        for mtbf_s, total_s, ettr in zip(MTBFS_S, published.recovery_s, published.ettr, strict=True):
            each_s = total_s * mtbf_s / (HOURS * 3600)
            formula = 1 / (1 + published.overhead) / (1 + each_s / mtbf_s)
            if published.system == "checkfreq":
                expected_s = published.interval / 2 * model.iteration_s
                # At the published interval and overhead; lag and load are our strategy's.
                stall_s, ours_ = published.overhead * model.iteration_s * published.interval, CheckFreq(costs)
                strategy: Strategy = Dense(costs, published.interval, stall_s, ours_.lag, ours_.fetch_s)
            else:
                expected_s = 1.5 * published.interval * model.iteration_s
                strategy = STRATEGIES["moevement"](costs, mtbf_s)
            draws = [FailureModel(mtbf_s, 12).draw(HOURS * 3600, seed) for seed in range(SEEDS)]
            ours = statistics.fmean(train(strategy.fresh(), one, HOURS * 3600).ettr for one in draws)
            cells = (
                model.preset, published.system, f"{mtbf_s / 60:g} min", f"{each_s:.1f}", f"{expected_s:.0f}",
                f"{ettr:.3f}", f"{formula:.3f}", f"{formula - ettr:+.3f}", f"{ours:.3f}", f"{ours - ettr:+.3f}",
            )  # fmt: skip
            rows.append(f"| {' | '.join(cells)} |")
    return rows


def report(rows: list[str]) -> str:
    """The whole file."""
    return f"""# Table 3 again

    python -m benchmarks.papers.table3        (writes this file)

**Recovery seconds for each failure**: as published (total over the number of failures in {HOURS} hours), and as the paper's own
expectations have them (half an interval for CheckFreq, 3/2 W for MoEvement, times the iteration time). **ETTR**: as
published; by the formula of section 2.4 from the published overhead and the published recovery seconds; and by our
simulator. There CheckFreq runs at the published interval and overhead, with the lag of a write at 0.2 GB/s a GPU and a load
as fast, MoEvement as our plan has it at the paper's bandwidths; both with 1 s to detect and 10 s to regroup; {SEEDS} trainings
each.

| model | system | MTBF | recovery, published | expected | ETTR, published | by its formula | off by | simulated | off by |
|---|---|---|---|---|---|---|---|---|---|
{chr(10).join(rows)}

What cannot follow from what is published:

- The formula gives more than the published ETTR in all rows but one: by up to 5 hundredths for failures every 2 hours, and
  by 7 to 13 for CheckFreq every 10 minutes. Overhead and recovery are all that the formula has: something else was lost.
- MoEvement's recovery seconds are a few for a failure, where 3/2 W iterations take 8 to 25; even one stage alone, without
  bubble and with fewer weight gradients, does not replay that fast. Detection and regrouping are not in them either.
- Iteration times are not published. Those used here are what overheads in seconds and in percent say together.

{measured_on("megatron-core")}.
"""


if __name__ == "__main__":
    main()
