"""Command ``moevement bench``, which measures the costs of saving and recovery in small jobs on this machine."""

from __future__ import annotations

import argparse

from moevement_cli import bench_ettr, bench_overhead, bench_recovery, bench_replay


def add_to(parser: argparse.ArgumentParser) -> None:
    """Add the benchmarks of ``moevement bench`` and their arguments."""
    actions = parser.add_subparsers(title="benchmarks", metavar="BENCHMARK", required=True)
    bench_overhead.add_to(actions.add_parser("overhead", help="cost of snapshots, part by part"))
    bench_replay.add_to(
        actions.add_parser(
            "replay", help="time of a replayed iteration relative to a normal one, as more operators are frozen"
        )
    )
    bench_recovery.add_to(actions.add_parser("recovery", help="replay of one stage compared with replay of all stages"))
    bench_ettr.add_to(actions.add_parser("ettr", help="ETTR of each strategy under the same schedule of kills"))
