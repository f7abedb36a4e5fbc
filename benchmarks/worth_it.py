"""GPU hours that jobs of several sizes lose in a month, by the formula; writes the table of docs/worth_it.md.

    python -m benchmarks.worth_it

Computed, not measured: nothing depends on the machine that it runs on.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from moevement_cli.jobs import SCENARIOS
from moevement_cli.units import span
from moevement_core.simulator.failure_rate import mean_time_between_failures_s
from moevement_core.simulator.scenario import load
from moevement_core.simulator.strategies import MoEvement
from moevement_core.simulator.training import Spares
from moevement_core.simulator.worth import LEAST_SHARE, MONTH_H, MOST_SPARES, lost_share, lost_today

PAGE = Path(__file__).parents[1] / "docs" / "worth_it.md"
BEGIN, END = "<!-- table of python -m benchmarks.worth_it -->\n", "<!-- end of the table -->\n"
SCENARIO = SCENARIOS / "qwen3_30b_a3b.yaml"
GPUS = (64, 256, 1024, 4096)
RATES = (1, 10)
"""Failures, over those of Llama 3's training."""
EVERY = 500
POOL = Spares(None, repair_s=86_400.0, provided_s=600.0)


def main() -> None:
    """Write the table into the page."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


def with_table(page: str) -> str:
    """Return a page with the table in its place."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table()}\n\n{END}{after}"


def table() -> str:
    """Return a row for each size and failure rate."""
    rows = [
        "| GPUs | failures apart | today, every 500 | today, best interval | MoEvement | spare nodes | saved over every 500 | over the best | worth it |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    return "\n".join([*rows, *(_row(gpus, rate) for rate in RATES for gpus in GPUS)])


def _row(gpus: int, rate: int) -> str:
    costs = load(SCENARIO, ranks=gpus).costs()
    mtbf_s, hours = mean_time_between_failures_s(gpus) / rate, gpus * MONTH_H
    strategy = MoEvement(costs)
    ours, spares = min(
        (lost_share(strategy, mtbf_s, replace(POOL, count=count)), count) for count in range(MOST_SPARES + 1)
    )
    yours, best = (lost_today(costs, mtbf_s, POOL.provided_s, every) for every in (EVERY, None))
    return (
        f"| {gpus:,} | {span(mtbf_s)} | {yours * hours:,.0f} | {best * hours:,.0f} | {ours * hours:,.0f} | {spares} | "
        f"{yours - ours:.2%} | {best - ours:.2%} | {'yes' if best - ours > LEAST_SHARE else 'no'} |"
    )


if __name__ == "__main__":
    main()
