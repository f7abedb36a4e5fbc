"""Benchmark of ordering and scheduling up to 100,000 operators on one core. It writes policy.md.

    python -m benchmarks.policy

A training builds the table of operators once, and makes orders and schedules at window boundaries. So the time of the
table has its own column.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks.environment import measured_on
from moevement_core.operators import Operator, OperatorKind, OperatorTable, StateBytes, expert_name
from moevement_core.policy.popularity import order_operators
from moevement_core.policy.reorder import ReorderTrigger
from moevement_core.policy.window import Budget, WindowKind, choose_window, find_window_size
from moevement_core.strategies import SparseSchedule

OUTPUT = Path(__file__).with_suffix(".md")
FULL, COMPUTE = 12_000_000, 2_000_000


def main() -> None:
    """Measure each size and window, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--operators", type=int, nargs="+", default=[1_000, 10_000, 100_000])
    parser.add_argument("--output", type=Path, default=OUTPUT)
    arguments = parser.parse_args()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    rows = []
    for count in arguments.operators:
        for kind in WindowKind:
            for slots in (3, 6, 30):
                rows.append(measure(count, kind, slots, arguments.repeats))
                print(rows[-1], flush=True)
    arguments.output.write_text(report(rows, arguments.repeats), encoding="utf-8")


def measure(count: int, kind: WindowKind, slots: int, repeats: int) -> str:
    """Return one row of the table: times for a window of about ``slots`` slots over ``count`` operators."""
    generator = np.random.default_rng(0)
    began = time.perf_counter()
    table = OperatorTable(
        Operator(expert_name(i // 64, i % 64), OperatorKind.EXPERT, StateBytes(COMPUTE, FULL, 0)) for i in range(count)
    )
    table_s = time.perf_counter() - began
    counts = generator.integers(0, 100_000, count).astype(np.float64)
    trigger = ReorderTrigger(table)
    trigger.ordered(counts)
    moved = counts * generator.uniform(0.8, 1.2, count)
    # A slot holds the compute weights of nearly all operators, and the full state of one part of them.
    budget = Budget(1.0, COMPUTE * count + (FULL - COMPUTE) * count / slots, replicas=0)
    order = order_operators(table, counts)
    window = choose_window(table, order, budget, kind)

    def decide() -> None:
        new_order = order_operators(table, counts)
        schedule = SparseSchedule(table, new_order, choose_window(table, new_order, budget, kind))
        _ = schedule.slot_of_operator, schedule.id, schedule.contents_of_slot(1)

    algorithm_1_s = _median(
        lambda: find_window_size(
            operators=count,
            iteration_s=1.0,
            compute_bytes=COMPUTE,
            master_bytes=FULL,
            optimizer_bytes=0,
            bytes_per_s=budget.bytes,
        ),
        repeats,
    )
    parts = [
        _median(lambda: order_operators(table, counts), repeats),
        _median(lambda: trigger.should_reorder(moved), repeats),
        _median(decide, repeats),
        algorithm_1_s,
    ]
    times = " | ".join(f"{part * 1e3:.1f}" for part in parts)
    return f"| {count:,} | {kind} | {window.size} | {times} | {table_s * 1e3:.0f} |"


def _median(call: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def report(rows: list[str], repeats: int) -> str:
    """Return the text of the page."""
    lines = "\n".join(rows)
    return f"""# Deciding

    python -m benchmarks.policy

Milliseconds on one core, median of {repeats}. "Order and schedule" is all that a reorder computes: order by popularity, window,
slots, contents of a snapshot, and the id of the schedule. The MoEvement paper has about 100 ms for a reorder (section 3.5).

| operators | window | W | order | reorder trigger | order and schedule | Algorithm 1, window only | table, once a run |
|---|---|---|---|---|---|---|---|
{lines}

{measured_on("numpy")}.
"""


if __name__ == "__main__":
    main()
