"""Benchmark of how the parts of a recovery grow with the ranks of a job. It writes benchmarks/regroup.md.

    python -m benchmarks.regroup

A tiny MoE runs on 4 to 32 ranks of one machine. The benchmark kills one rank a few times, and redo restores it.
It also times how long one rank takes to make all of Megatron's process groups, in jobs of up to 16,384 ranks. For that
it uses torch's ``fake`` groups, which have no connections.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.environment import measured_on
from benchmarks.papers.common import table
from megatron.moevement import platform
from moevement_cli.bench_run import record_of
from moevement_core.simulator.regroup import regroup

OUTPUT = Path(__file__).with_suffix(".md")
RANKS = (4, 8, 16, 32)
LAYOUTS = ((4, 2, 2), (16, 2, 2), (512, 16, 8), (1536, 24, 8), (4096, 32, 8), (16384, 64, 8))
"""Ranks, pipeline stages and expert parallelism. Jobs of the first two run here; the paper has the others (section 5.4)."""
MODELLED = (32, 1024, 4096, 16_384)
"""Numbers of ranks for which the page has the model of the simulator."""
KILLS = 4
TINY = (
    "--num-layers", "2", "--hidden-size", "64", "--num-attention-heads", "4", "--ffn-hidden-size", "64",
    "--num-experts", "4", "--moe-ffn-hidden-size", "64", "--seq-length", "32", "--max-position-embeddings", "32",
    "--pipeline-model-parallel-size", "2", "--expert-model-parallel-size", "2", "--use-distributed-optimizer",
    "--moevement-sparse-ckpt", "--moevement-window", "3", "--moevement-replicas", "1",
    "--moevement-replicas-on-same-node", "--moevement-recovery", "redo",
)  # fmt: skip


def main() -> None:
    """Measure recoveries and groups, and write the page."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    platform.install()
    group_rows = [_made(*layout) for layout in LAYOUTS]
    rows = [_row(ranks) for ranks in RANKS]
    OUTPUT.write_text(report(rows, group_rows), encoding="utf-8")


def _row(ranks: int) -> list[str]:
    flags = [*TINY, "--global-batch-size", str(ranks // 2), "--train-iters", str(8 * (KILLS + 1))]
    for kill in range(1, KILLS + 1):
        flags += ["--moevement-inject", f"rank=1,iteration={8 * kill},phase=backward"]
    print(f"{ranks} ranks ...", flush=True)
    failures = [event for event in record_of(ranks, 1, flags)[0] if event["event"] == "failure"]

    def median(value: Any) -> str:
        return f"{statistics.median(map(value, failures)):.2f}"

    parts = [median(lambda failure, name=name: failure["parts"][name]) for name in failures[0]["parts"]]
    return [str(ranks), *parts, median(lambda failure: failure["total_s"]), str(len(failures))]


def _made(world: int, pipeline: int, expert: int) -> list[str]:
    """Make all groups of a job on rank 0, and return a row with the number of groups and the time."""
    from megatron.core import parallel_state  # the platform must be installed first

    print(f"groups of {world} ranks ...", flush=True)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    calls, members, others, original = 0, 0, 0, dist.new_group

    def counted(ranks: Sequence[int] | None = None, **kwargs: Any) -> Any:
        nonlocal calls, members, others
        calls += 1
        if ranks is None or 0 in ranks:
            members, others = members + 1, others + len(ranks or range(world)) - 1
        return original(ranks, **kwargs)

    with mock.patch.object(dist, "new_group", counted):
        began, began_cpu = time.perf_counter(), time.process_time()
        parallel_state.initialize_model_parallel(
            pipeline_model_parallel_size=pipeline, expert_model_parallel_size=expert, create_gloo_process_groups=False
        )
        seconds, cpu_s = time.perf_counter() - began, time.process_time() - began_cpu
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    return [f"{world:,}", f"{pipeline}", f"{expert}", f"{calls:,}", f"{members}", f"{others:,}", f"{seconds:.2f}",
            f"{cpu_s:.2f}"]  # fmt: skip


def modelled() -> list[list[str]]:
    """Return rows with the parts of regrouping by the simulator's model, in seconds."""
    rows = []
    for ranks in MODELLED:
        parts = regroup(ranks)
        seconds = (parts.fixed_s, parts.exchange_s, parts.coordinator_s, parts.groups_s, parts.connect_s, parts.total_s)
        rows.append([f"{ranks:,}", *(f"{value:.2f}" for value in seconds)])
    return rows


def report(rows: list[list[str]], groups_made: list[list[str]]) -> str:
    """Return the text of the page."""
    header = (
        "ranks", "detect", "abort", "regroup", "set up and fetch", "enter the loop", "restore", "total", "kills",
    )  # fmt: skip
    return f"""# How a recovery grows with ranks

    python -m benchmarks.regroup        (writes this file)

A tiny MoE (pipeline 2 x expert 2 x data). One rank is killed {KILLS} times in a backward pass, and restored by redo. Numbers are
medians in seconds. All ranks share two cores. So the work of each rank (make its groups, look for references to old groups,
enter the loop) takes longer here with every additional rank, but not on separate machines. These rows cannot show how
the time for connections over a network grows.

{table(header, rows)}

## On separate machines

The model of the simulator (`moevement_core/simulator/regroup.py`) for the time from the detection of a failure until ranks have process
groups: *fixed* is the sum of *abort*, *regroup* and *enter the loop* of the first row above, *groups* follows from the table below, and
*coordinator* from [scale.md](scale.md). That communicators connect in a time linear in the ranks is published for NCCL, not measured here;
hops and links of the tree are assumed. The class `Constants` says where each number is from.

{table(("ranks", "fixed", "exchanges over the tree", "coordinator", "groups", "connect", "total"), modelled())}

## What making groups takes at scale

The table has the time of `initialize_model_parallel` on rank 0 over torch's `fake` groups. Every rank calls `new_group` for every
group of the job. So the time grows with the number of groups, although the rank is a member of only twenty. Connections to the
other members (NCCL makes them at a group's first collective) and requests to the store come on top.

{table(("ranks", "pipeline", "expert", "calls of new_group", "groups it is in", "members of these", "seconds", "processor"), groups_made)}

A recovery makes all process groups again, even those without a lost rank. Over gloo, survivors have shut down the sockets of
groups to stop waiting. A group that was interrupted in a collective cannot be used again, with NCCL either. To find out which
groups were idle, a rank would have to ask all others. Making groups is part of *regroup*.

{measured_on("torch", "megatron-core")}, gloo.
"""


if __name__ == "__main__":
    main()
