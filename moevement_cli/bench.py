"""Command ``moevement bench``, which measures on this machine."""

from __future__ import annotations

import argparse

from moevement_cli import bench_ettr, bench_overhead, bench_recovery, bench_replay


def add_to(parser: argparse.ArgumentParser) -> None:
    """Add the benchmarks and their arguments."""
    actions = parser.add_subparsers(title="benchmarks", metavar="BENCHMARK", required=True)
    bench_overhead.add_to(actions.add_parser("overhead", help="what snapshots cost, part by part"))
    bench_replay.add_to(
        actions.add_parser("replay", help="a replayed iteration against a normal one, as more operators are frozen")
    )
    bench_recovery.add_to(actions.add_parser("recovery", help="one stage that replays alone, against all stages"))
    bench_ettr.add_to(actions.add_parser("ettr", help="each strategy under the same schedule of kills"))
