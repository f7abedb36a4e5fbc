"""Comparison of redo with sparse windows on the paper's cluster and on 16,384 GPUs. It writes papers/redo.md.

    python -m benchmarks.papers.redo

The page has the four models of MoEvement's table 3 on the paper's cluster, and a larger scenario of this repository.
All rows have a failure every ten minutes. No row is fitted. The page gives the source of each constant.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.environment import measured_on
from benchmarks.papers import common
from benchmarks.papers.common import scenario, simulated, table
from moevement_core.simulator.costs import Costs, MoEvementCost, StrategyCost

OUTPUT = Path(__file__).with_suffix(".md")
MTBF_S = 600.0
PRESETS = ("moe_llava", "gpt_moe", "qwen_moe", "deepseek_moe", "deepseek_671b")
SYSTEMS = ("gemini", "moevement", "moevement-rolling", "redo")
HEADER = (
    "scenario", "GPUs", "way", "W", "carried", "to peers an iteration", "host memory of a rank", "overhead",
    "iterations again", "a recovery", "of it notice, regroup", "fetch", "ETTR, formula", "simulated",
)  # fmt: skip


def main() -> None:
    """Compute the table, and write the page."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    rows = [row for preset in PRESETS for costs in [scenario(preset).costs()] for row in rows_of(preset, costs)]
    OUTPUT.write_text(report(rows), encoding="utf-8")


def rows_of(preset: str, costs: Costs) -> list[list[str]]:
    """Return a row for each strategy."""
    return [_row(preset, common.SYSTEMS[name](costs, MTBF_S)) for name in SYSTEMS]


def _row(preset: str, strategy: StrategyCost) -> list[str]:
    costs = strategy.costs
    plan = costs.plan
    is_sparse = isinstance(strategy, MoEvementCost)
    return [
        preset, f"{plan.inputs.job.ranks:,}", strategy.name, str(plan.size if is_sparse else strategy.interval),
        ("yes" if plan.is_carried else "no") if is_sparse else "-",
        f"{plan.inputs.replicas * strategy.copied_bytes / 1e9:.2f} GB", f"{strategy.host_bytes / 1e9:.1f} GB",
        f"{strategy.overhead_s / costs.iteration_s:.1%}", f"{strategy.expected_rollback:.1f}",
        f"{strategy.expected_recovery_s():.1f} s", f"{costs.detect_s + costs.regroup_s:.1f} s",
        f"{strategy.fetch_s:.1f} s", f"{strategy.analytic_ettr(MTBF_S):.3f}", f"{simulated(strategy, MTBF_S):.3f}",
    ]  # fmt: skip


def report(rows: list[list[str]]) -> str:
    """Return the text of the page."""
    return f"""# Redo beside replay, at the scale of the papers

    python -m benchmarks.papers.redo        (writes this file)

A failure every ten minutes. **carried**: yes if each slot is copied and sent within one iteration. **iterations again**: expected
number of iterations that a recovery repeats; the interrupted iteration counts half. Recovery seconds are expected values. ETTR is
by the formula of MoEvement's section 2.4, and simulated (20 trainings).

{table(HEADER, rows)}

Constants:

- Bandwidths, layouts and iteration times are those of the scenarios (examples/simulate, each with its source).
- 1 s to notice a failure and 10 s to regroup are assumed for all systems. On one host with four ranks, both together took
  1.3 s (see the README's block); nobody has measured them at these scales.
- Gradients are FP32, as Megatron reduces them with `--bf16`. An update reads and writes the full state at half of the 2 TB/s in
  NVIDIA's data sheet of the A100 with 80 GB.

Results:

- Redo needs the newest snapshot, not a whole window. It repeats only iterations whose snapshots peers do not have yet: one and a
  half at these links. With an aligned window, a recovery repeats 3/2 W iterations and the lag. If W is 1, both are the same.
- Slots with gradients are larger, so W is larger on narrow links. If gradients alone fill the link, redo is not carried and falls
  behind; `--moevement-recovery auto` then uses sparse windows.
- If W is small, noticing and regrouping are the larger part of a recovery, both for redo and for replay.

{measured_on("numpy")}.
"""


if __name__ == "__main__":
    main()
