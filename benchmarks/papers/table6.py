"""Comparison of MoEvement's table 6, host memory, with our plan of the same jobs. It writes papers/table6.md.

python -m benchmarks.papers.table6
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.environment import measured_on
from benchmarks.papers.common import scenario, table
from benchmarks.papers.published import MODELS, Model
from moevement_core.planning.checkpoint_plan import CheckpointPlan
from moevement_core.planning.planned_memory import PlannedMemory
from moevement_core.policy.window import WindowKind
from moevement_core.simulator.costs import GeminiCost, MoEvementCost
from moevement_core.strategies.config import RecoveryKind

OUTPUT = Path(__file__).with_suffix(".md")
GB = 1e9


def main() -> None:
    """Compute the tables, and write the page."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    rows = [cells for model in MODELS for cells in protected(model)]
    alike = [like_for_like(model) for model in MODELS]
    OUTPUT.write_text(report([row(model) for model in MODELS], rows, alike), encoding="utf-8")


def row(model: Model) -> list[str]:
    """Return the published and our numbers of a model, in gigabytes of all nodes together."""
    costs = scenario(model.preset).costs()
    window = next(system.interval for system in model.systems if system.name == "moevement")
    costs = replace(costs, plan=CheckpointPlan(replace(costs.plan.inputs, window=window)))
    ranks, plan = costs.plan.inputs.job.ranks, costs.plan
    snapshots, replicas, _ = PlannedMemory(plan).of_rank
    # The logs of all ranks of all stages.
    logs = sum(PlannedMemory(plan).logs(stage) for stage in plan.stages) * costs.plan.inputs.job.ranks_of_stage
    an_iteration = sum(stage.log_bytes for stage in plan.stages) * costs.plan.inputs.job.ranks_of_stage
    dense = GeminiCost(costs, 3600.0).host_bytes * ranks
    sparse = MoEvementCost(costs).host_bytes * ranks
    state = costs.job_bytes
    return [
        model.preset, f"{model.gemini_gb:.1f}", f"{model.gemini_gb * GB / model.parameters:.1f}",
        f"{model.sparse_gb:.1f}", f"{model.sparse_gb * GB / model.parameters:.1f}", f"{model.logs_gb:.1f}",
        f"{(model.sparse_gb + model.logs_gb) / model.gemini_gb - 1:+.1%}", f"{state / GB:.0f}", f"{dense / GB:.0f}",
        f"{(snapshots + replicas) * ranks / GB:.0f}", f"{an_iteration / GB:.0f}", f"{logs / GB:.0f}",
        f"{sparse / dense - 1:+.0%}",
    ]  # fmt: skip


def like_for_like(model: Model) -> list[str]:
    """Return the memory of two windows on the own host alone, in gigabytes and in bytes a parameter.

    One of the windows is persisted and one is in flight (MoEvement, section 3.2). There are no copies on peers, no
    records and no reserve for snapshots that are late.
    """
    costs = scenario(model.preset).costs()
    window = next(system.interval for system in model.systems if system.name == "moevement")
    assert window is not None, "the paper has a window for each model"
    plan = CheckpointPlan(replace(costs.plan.inputs, window=window))
    of_window = sum(stage.window_bytes for stage in plan.stages) * costs.plan.inputs.job.ranks_of_stage
    each = 2 * of_window / model.parameters
    return [
        model.preset, str(window), f"{model.sparse_gb:.1f}", f"{model.sparse_gb * GB / model.parameters:.1f}",
        f"{2 * of_window / GB:.1f}", f"{each:.1f}", f"{24 + 2 * (window - 1)}",
    ]  # fmt: skip


WAYS: dict[str, dict[str, Any]] = {
    "aligned, replay": {},
    "rolling, replay": {"kind": WindowKind.ROLLING},
    "redo": {"recovery": RecoveryKind.REDO},
}
PROTECTIONS: dict[str, dict[str, Any]] = {
    "copies:2": {"replicas": 2},
    "copies:2, own dropped": {"replicas": 2, "keeps_own_copies": False},
    "parity:4+1": {"replicas": 1, "members": 4},
    "parity:8+2": {"replicas": 2, "members": 8},
    "parity:9+3": {"replicas": 3, "members": 9},
}


def protected(model: Model) -> Iterator[list[str]]:
    """Yield a row for each kind of window, and for redo.

    Each cell is the host memory of a protection, divided by that of dense checkpoints that survive as many lost nodes.
    """
    costs = scenario(model.preset).costs()
    window = next(system.interval for system in model.systems if system.name == "moevement")
    for way, options in WAYS.items():
        cells = []
        for protection in PROTECTIONS.values():
            plan = CheckpointPlan(replace(costs.plan.inputs, window=window, **options, **protection))
            own, kept, logs = PlannedMemory(plan).of_rank
            dense = 2 * max(stage.full_bytes for stage in plan.stages) * (1 + plan.inputs.replicas)
            cells.append(f"{(own + kept) / dense:.2f} ({(own + kept + logs) / dense:.2f})")
        yield [model.preset, str(window), way, *cells]


def report(rows: list[list[str]], protected_rows: list[list[str]], alike: list[list[str]]) -> str:
    """Return the text of the page."""
    header = (
        "model", "Gemini, published", "bytes a parameter", "MoEvement, snapshots (X)", "bytes a parameter", "logs (Y)",
        "increase", "ours: full state once", "ours: dense, two buffers, two peers", "ours: sparse, two peers",
        "ours: logs of one iteration", "ours: logs kept", "increase",
    )  # fmt: skip
    return f"""# Table 6 again

    python -m benchmarks.papers.table6        (writes this file)

Gigabytes of host memory of all nodes together. Our numbers are planned for the published W and aligned windows, with the memory
that a live run allocates: for all snapshots that a rank keeps at a time, its own and copies for two peers (docs/memory.md).

{table(header, rows)}

## Like for like: two windows on the own host

The published memory of sparse snapshots is that of one persisted window and one in-flight window on the own host, without copies on
peers. With operators of equal size, a window of W slots has 12 bytes of full state a parameter, and (W - 1) / 2 times 2 bytes of
compute weights. Two windows then have 24 + 2 (W - 1) bytes.

{table(("model", "W", "published, GB", "bytes a parameter", "ours, GB", "bytes a parameter", "24 + 2 (W - 1)"), alike)}

For W = 3 the published numbers are these. For W = 5 and 6 they are lower than the formula, which the paper does not explain.
Operators differ in size, so our windows differ from the formula too.

## With other protections

Each cell has the memory of the heaviest rank for snapshots, its own and those of others, divided by that of dense checkpoints in
memory that survive the loss of as many nodes. These have two buffers of full state on the rank and on each peer. Numbers in
brackets include the boundary log. Dense checkpoints need no log, because all ranks roll back. W is the published one.

{table(("model", "W", "windows", *PROTECTIONS), protected_rows)}

- At most as much as dense checkpoints: rolling windows with own copies dropped (within 2%), and every kind of window with parity
  for two nodes. **More**: windows with own copies kept (1.3 to 1.7), and redo with copies (1.1 with own copies dropped). Redo keeps FP32
  gradients, a third of the full state, for each iteration since an operator's newest full state.
- At most 0.6 of dense checkpoints: rolling windows with parity:9+3 (two groups of six on twelve nodes). Aligned windows have 0.60 to
  0.67, and redo 0.67 to 0.82, because no part of a sum is freed early. parity:4+1 needs more: a rank's own window and the next one are
  2.5 times its full state, and a dense rank has 2 times.
- Earlier, all buffers had the size of the heaviest slot (2026-11-21, +131% to +296% with logs), which took 16 times the full state.
  With the same copies, 8 to 10 times are left.
- Logs are the larger part if W is imposed and the bandwidth would allow a smaller one (2 for three of the models).

- Gemini's published memory is 26 bytes a parameter in all four rows. Full state in mixed precision is 12 bytes (FP32 master
  weights and two moments), or 14 with the compute weights. So the 26 bytes are two copies, one of 12 and one of 14. Ours
  keeps two buffers on each of three hosts (the rank's own and two peers'), because a buffer that is being filled cannot be
  used yet: 72 bytes a parameter.
- **The logs cannot follow from the batch.** 512 sequences of 2048 tokens cross 11 stage boundaries of DeepSeek-MoE forward
  and backward, with 2048 values of 2 bytes a token. That is 94 GB in one iteration over all ranks, and the column "logs of one
  iteration" agrees. But 21.1 GB are published for all iterations that a recovery may replay. In the four rows, the published
  numbers are between a third and a twentieth of a single iteration. (MoE-LLaVA trains on images, whose tokens are not published.)

{measured_on("numpy")}.
"""


if __name__ == "__main__":
    main()
