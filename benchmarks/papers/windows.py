"""Comparison of planned and published W for the paper's models and precision rows. It writes papers/windows.md.

    python -m benchmarks.papers.windows

No constant is fitted. The page shows the bandwidth that the published W would need.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.environment import measured_on
from megatron.moevement.describe import describe
from moevement_cli.plan import PRESETS
from moevement_core.planning.alternatives import bandwidth_for
from moevement_core.planning.checkpoint_plan import CheckpointPlan, PlanInput
from moevement_core.planning.cluster import CLUSTERS, GB
from moevement_core.planning.job import JobShape
from moevement_core.precision import MIXED, TABLE_7, Regime

OUTPUT = Path(__file__).with_suffix(".md")
# Eight stages do not divide 28 layers, and the paper does not publish their placement.
H100_LAYOUT = "Ettt|tttt|ttt|tttt|ttt|tttt|ttt|ttttL"
H100_FLAGS = [
    "--pipeline-model-parallel-size", "8", "--pipeline-model-parallel-layout", H100_LAYOUT, "--micro-batch-size", "2",
]  # fmt: skip


@dataclass(frozen=True)
class Case:
    """Row of table 3 or 7."""

    label: str
    preset: str
    ranks: int
    cluster: str
    regime: Regime
    stall_s: float
    """Published checkpointing overhead of MoC per iteration, in seconds."""
    stall_share: float
    """Published checkpointing overhead of MoC as a share of an iteration.

    :attr:`stall_s` divided by this share is the iteration time, which is not published.
    """
    published: int
    """Published W_sparse, in iterations."""
    flags: tuple[str, ...] = ()

    @property
    def iteration_s(self) -> float:
        """Seconds of an iteration, rounded to two digits as the published numbers are."""
        return round(self.stall_s / self.stall_share, 2)


CASES = (
    Case(label="MoE-LLaVA", preset="moe_llava", ranks=96, cluster="moevement-a100", regime=MIXED, stall_s=0.14, stall_share=0.08, published=3),
    Case(label="GPT-MoE", preset="gpt_moe", ranks=96, cluster="moevement-a100", regime=MIXED, stall_s=0.18, stall_share=0.09, published=3),
    Case(label="QWen-MoE", preset="qwen_moe", ranks=96, cluster="moevement-a100", regime=MIXED, stall_s=0.19, stall_share=0.09, published=5),
    Case(label="DeepSeek-MoE", preset="deepseek_moe", ranks=96, cluster="moevement-a100", regime=MIXED, stall_s=0.22, stall_share=0.08, published=6),
    *(
        Case(label=f"DeepSeek-MoE, {regime}", preset="deepseek_moe", ranks=128, cluster="moevement-h100", regime=regime, stall_s=stall, stall_share=share, published=published, flags=tuple(H100_FLAGS))
        for regime, stall, share, published in zip(
            TABLE_7, (2.91, 8.89, 7.25, 2.92, 2.19), (0.97, 3.86, 3.45, 1.54, 1.29), (3, 6, 4, 3, 3), strict=True
        )
    ),
)  # fmt: skip


def main() -> None:
    """Plan every case, and write the page."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    shapes: dict[tuple, JobShape] = {}
    rows = []
    for case in CASES:
        key = (case.preset, case.ranks, case.flags)
        if key not in shapes:
            config = PRESETS / f"{case.preset}.yaml"
            shapes[key] = describe(case.preset, ["--config", str(config), *case.flags], case.ranks)
        rows.append(row(case, shapes[key]))
        print(rows[-1], flush=True)
    OUTPUT.write_text(report(rows), encoding="utf-8")


def row(case: Case, shape: JobShape) -> str:
    """Return one row of the table in Markdown."""
    cluster = CLUSTERS[case.cluster]
    inputs = PlanInput(shape, cluster, case.regime, case.iteration_s)
    both, copies_only = CheckpointPlan(inputs), CheckpointPlan(replace(inputs, replicas=0))
    low = bandwidth_for(both, case.published)
    high = bandwidth_for(both, case.published - 1)
    nic = cluster.replication_bytes_per_s / inputs.replicas
    return (
        f"| {case.label} | {case.iteration_s:.2f} s | {case.published} | {copies_only.size} | {both.size} | "
        f"{low / GB:.3f} to {high / GB:.3f} GB/s | {low / nic:.0%} to {high / nic:.0%} | "
        f"{low / cluster.d2h_bytes_per_s:.1%} to {high / cluster.d2h_bytes_per_s:.1%} |"
    )


def report(rows: list[str]) -> str:
    """Return the text of the page."""
    return f"""# W of the paper's models

    python -m benchmarks.papers.windows

Planned, not measured: arithmetic on shapes that Megatron builds, {measured_on("megatron-core")}. "Copies only" is the paper's own
budget (Algorithm 1 knows only the bandwidth from device to host). "Both" adds replication to two peers over the node's
NICs. The last three columns have the rate at which one rank's snapshots would have to be copied for the published W: in GB/s, as
share of the rank's part of the NICs with two replicas, and as share of its PCIe link.

| model, regime | iteration | W published | W, copies only | W, both | bandwidth for the published W | share of NIC | share of PCIe |
|---|---|---|---|---|---|---|---|
{chr(10).join(rows)}

`docs/windows.md` says which inputs are published, which are not, and what follows.
"""


if __name__ == "__main__":
    main()
