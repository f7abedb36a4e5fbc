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
from moevement_core.policy.window import WindowKind
from moevement_core.simulator.strategies import Gemini, MoEvement
from moevement_core.strategies.config import Recovery

OUTPUT = Path(__file__).with_suffix(".md")
GB = 1e9


def main() -> None:
    """Compute the tables, and write the page."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    rows = [cells for model in MODELS for cells in protected(model)]
    OUTPUT.write_text(report([row(model) for model in MODELS], rows), encoding="utf-8")


def row(model: Model) -> list[str]:
    """Return the published and our numbers of a model, in gigabytes of all nodes together."""
    costs = scenario(model.preset).costs()
    window = next(system.interval for system in model.systems if system.name == "moevement")
    costs = replace(costs, plan=CheckpointPlan(replace(costs.plan.inputs, window=window)))
    ranks, plan = costs.plan.inputs.job.ranks, costs.plan
    snapshots, replicas, _ = plan.host_memory
    # The logs of all ranks of all stages.
    logs = sum(plan.log_memory(stage) for stage in plan.stages) * costs.ranks_of_stage
    an_iteration = sum(stage.log_bytes for stage in plan.stages) * costs.ranks_of_stage
    dense = Gemini(costs, 3600.0).host_bytes * ranks
    sparse = MoEvement(costs).host_bytes * ranks
    state = costs.job_bytes
    return [
        model.preset, f"{model.gemini_gb:.1f}", f"{model.gemini_gb * GB / model.parameters:.1f}",
        f"{model.sparse_gb:.1f}", f"{model.sparse_gb * GB / model.parameters:.1f}", f"{model.logs_gb:.1f}",
        f"{(model.sparse_gb + model.logs_gb) / model.gemini_gb - 1:+.1%}", f"{state / GB:.0f}", f"{dense / GB:.0f}",
        f"{(snapshots + replicas) * ranks / GB:.0f}", f"{an_iteration / GB:.0f}", f"{logs / GB:.0f}",
        f"{sparse / dense - 1:+.0%}",
    ]  # fmt: skip


WAYS: dict[str, dict[str, Any]] = {
    "aligned, replay": {},
    "rolling, replay": {"kind": WindowKind.ROLLING},
    "redo": {"recovery": Recovery.REDO},
}
PROTECTIONS: dict[str, dict[str, Any]] = {
    "copies:2": {"replicas": 2},
    "copies:2, own dropped": {"replicas": 2, "keeps_own_copies": False},
    "parity:4+1": {"replicas": 1, "members": 4},
    "parity:8+2": {"replicas": 2, "members": 8},
    "parity:9+3": {"replicas": 3, "members": 9},
}


def protected(model: Model) -> Iterator[list[str]]:
    """Yield a row for each way to recover.

    Its cells have the bytes of each protection divided by those of dense checkpoints that survive as many nodes.
    """
    costs = scenario(model.preset).costs()
    window = next(system.interval for system in model.systems if system.name == "moevement")
    for way, options in WAYS.items():
        cells = []
        for protection in PROTECTIONS.values():
            plan = CheckpointPlan(replace(costs.plan.inputs, window=window, **options, **protection))
            own, kept, logs = plan.host_memory
            dense = 2 * max(stage.full_bytes for stage in plan.stages) * (1 + plan.inputs.replicas)
            cells.append(f"{(own + kept) / dense:.2f} ({(own + kept + logs) / dense:.2f})")
        yield [model.preset, str(window), way, *cells]


def report(rows: list[list[str]], protected_rows: list[list[str]]) -> str:
    """Return the text of the page."""
    header = (
        "model", "Gemini, published", "bytes a parameter", "MoEvement, snapshots (X)", "bytes a parameter", "logs (Y)",
        "increase", "ours: full state once", "ours: dense, two buffers, two peers", "ours: sparse, two peers",
        "ours: logs of one iteration", "ours: logs kept", "increase",
    )  # fmt: skip
    return f"""# Table 6 again

    python -m benchmarks.papers.table6        (writes this file)

Gigabytes of host memory of all nodes together; ours at the published W, planned as a live run sets it aside: bytes of
as many snapshots as are kept at a time, own ones and copies for two peers (docs/memory.md), aligned windows.

{table(header, rows)}

## With other protections

Snapshots of the heaviest rank, own and what it keeps for others, over dense checkpoints in memory that survive the loss of
as many nodes (two buffers of full state on the rank and on each of as many peers); in brackets with the boundary log, of
which dense checkpoints need none because all ranks roll back. At the published W.

{table(("model", "W", "windows", *PROTECTIONS), protected_rows)}

- At or below dense: rolling windows with own copies dropped (within 2%), every kind of window with parity for two nodes.
  **Not** with own copies kept (1.3 to 1.7), and not redo with copies (1.1 with own copies dropped): gradients are FP32, a third of the full state for
  each iteration since an operator's newest one.
- At most 0.6 of dense: rolling windows with parity:9+3 (which is two groups of six on twelve nodes); aligned ones 0.60 to
  0.67, redo 0.67 to 0.82, since no part of a sum goes early. parity:4+1 is not: a rank's own window and the one that is being made are 2.5 times its full
  state, of which a dense rank has 2.
- Of the 16 times full state that buffers of the heaviest slot took (2026-11-21, +131% to +296% with logs), 8 to 10 are left
  with the same copies.
- Logs are the larger part where W is imposed and bandwidth would allow a smaller one (2 for three of the models).

- Gemini's published memory is 26 bytes a parameter in all four rows. Full state in mixed precision is 12 (FP32 master
  weights and two moments) or 14 with the compute weights, so these are two copies of it, one of 12 and one of 14. Ours
  keeps two buffers on each of three hosts (the rank's own and two peers'), since a buffer that is being filled is of no
  use yet: 72 bytes a parameter.
- **The logs cannot follow from the batch.** 512 sequences of 2048 tokens cross 11 stage boundaries of DeepSeek-MoE forward
  and backward, 2048 values of 2 bytes a token: 94 GB in one iteration over all ranks, which the column "logs of one
  iteration" agrees with. 21.1 GB are published for all iterations that a recovery may replay: between a third and a
  twentieth of a single iteration in the four rows. (MoE-LLaVA trains on images, whose tokens are not published.)

{measured_on("numpy")}.
"""


if __name__ == "__main__":
    main()
