"""Computation of the GPU hours that jobs lose in a month, by the formula. It writes the table of docs/worth_it.md.

    python -m benchmarks.worth_it

The table is computed, not measured, so it does not depend on the machine.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from moevement_cli.jobs import SCENARIOS
from moevement_cli.units import span
from moevement_core.simulator.costs import MoEvementCost
from moevement_core.simulator.failure_rate import mean_time_between_failures_s
from moevement_core.simulator.scenario import load
from moevement_core.simulator.training import Spares
from moevement_core.simulator.worth import LEAST_SHARE, MONTH_H, MOST_SPARES, lost_share, lost_today

PAGE = Path(__file__).parents[1] / "docs" / "worth_it.md"
BEGIN, END = "<!-- table of python -m benchmarks.worth_it -->\n", "<!-- end of the table -->\n"
SCENARIO = SCENARIOS / "qwen3_30b_a3b.yaml"
GPUS = (64, 256, 1024, 4096)
RATES = (1, 10)
"""Failure rates as multiples of the rate of Llama 3's training."""
EVERY = 500
POOL = Spares(None, repair_s=86_400.0, provided_s=600.0)


def main() -> None:
    """Write the table into the page."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


def with_table(page: str) -> str:
    """Return the page with the table in its place."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table()}\n\n{END}{after}"


def table() -> str:
    """Return the table in Markdown, with a row for each size and failure rate."""
    rows = [
        "| GPUs | failures apart | today, every 500 | today, best interval | MoEvement | spare nodes | saved over every 500 | over the best | worth it |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    return "\n".join([*rows, *(_row(gpus, rate) for rate in RATES for gpus in GPUS)])


def _row(gpus: int, rate: int) -> str:
    costs = load(SCENARIO, ranks=gpus).costs()
    mtbf_s, hours = mean_time_between_failures_s(gpus) / rate, gpus * MONTH_H
    strategy = MoEvementCost(costs)
    sparse_share, spares = min(
        (lost_share(strategy, mtbf_s, replace(POOL, count=count)), count) for count in range(MOST_SPARES + 1)
    )
    today_share, best_share = (lost_today(costs, mtbf_s, POOL.provided_s, every) for every in (EVERY, None))
    return (
        f"| {gpus:,} | {span(mtbf_s)} | {today_share * hours:,.0f} | {best_share * hours:,.0f} | "
        f"{sparse_share * hours:,.0f} | {spares} | "
        f"{today_share - sparse_share:.2%} | {best_share - sparse_share:.2%} | "
        f"{'yes' if best_share - sparse_share > LEAST_SHARE else 'no'} |"
    )


if __name__ == "__main__":
    main()
