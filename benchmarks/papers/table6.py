"""MoEvement's table 6, host memory, beside what the plan of the same jobs needs; writes benchmarks/papers/table6.md.

python -m benchmarks.papers.table6
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from benchmarks.environment import measured_on
from benchmarks.papers.common import scenario, table
from benchmarks.papers.published import MODELS, Model
from moevement_core.checkpoint_plan import CheckpointPlan
from moevement_core.simulator.strategies import Gemini, MoEvement

OUTPUT = Path(__file__).with_suffix(".md")
GB = 1e9


def main() -> None:
    """Compute and write."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    OUTPUT.write_text(report([row(model) for model in MODELS]), encoding="utf-8")


def row(model: Model) -> list[str]:
    """Published and ours, gigabytes of all nodes together."""
    costs = scenario(model.preset).costs()
    window = next(system.interval for system in model.systems if system.name == "moevement")
    costs = replace(costs, plan=CheckpointPlan(replace(costs.plan.given, window=window)))
    ranks, plan = costs.plan.given.job.ranks, costs.plan
    snapshots, replicas, _ = plan.host_memory
    # Ranks of all stages, each with its own log.
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


def report(rows: list[list[str]]) -> str:
    """The whole file."""
    header = (
        "model", "Gemini, published", "bytes a parameter", "MoEvement, snapshots (X)", "bytes a parameter", "logs (Y)",
        "increase", "ours: full state once", "ours: dense, two buffers, two peers", "ours: sparse, two peers",
        "ours: logs of one iteration", "ours: logs kept", "increase",
    )  # fmt: skip
    return f"""# Table 6 again

    python -m benchmarks.papers.table6        (writes this file)

Gigabytes of host memory of all nodes together; ours at the published W, planned as a live run reserves buffers: of the
heaviest slot, allocated once, each window kept until the next is on all peers, own snapshots and copies for two peers.

{table(header, rows)}

- Gemini's published memory is 26 bytes a parameter in all four rows. Full state in mixed precision is 12 (FP32 master
  weights and two moments) or 14 with the compute weights, so these are two copies of it, one of 12 and one of 14. Ours
  keeps two buffers on each of three hosts (the rank's own and two peers'), since a buffer that is being filled is of no
  use yet: 72 bytes a parameter.
- **The logs cannot follow from the batch.** 512 sequences of 2048 tokens cross 11 stage boundaries of DeepSeek-MoE forward
  and backward, 2048 values of 2 bytes a token: 94 GB in one iteration over all ranks, which the column "logs of one
  iteration" agrees with. 21.1 GB are published for all iterations that a recovery may replay: between a third and a
  twentieth of a single iteration in the four rows. (MoE-LLaVA trains on images, whose tokens are not published.)
- Buffers of the heaviest slot are what sparse snapshots cost us in memory: the first slot of a window holds compute
  weights of everything that comes later.

{measured_on("numpy")}.
"""


if __name__ == "__main__":
    main()
