"""Computation of MoC-System's sizes, scaling and lost tokens (its sections 6.2 and 6.3). It writes benchmarks/papers/moc.md and moc.png.

python -m benchmarks.papers.moc
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.environment import measured_on
from benchmarks.papers import checkpoint_sizes, two_levels
from benchmarks.papers.common import table
from benchmarks.papers.fault_overhead import Faults, saving_s
from moevement_cli.plotting import figure
from moevement_core.planning.checkpoint_plan import CheckpointPlan, PlanInput
from moevement_core.planning.cluster import Cluster
from moevement_core.planning.transformer import Layout, Transformer, describe
from moevement_core.simulator.costs import Costs, MoCCost
from moevement_core.simulator.iteration import from_machines

OUTPUT = Path(__file__).with_suffix(".md")
GB = 1e9
A800 = Cluster(8, 1 * GB, 100 * GB, storage_bytes_per_s=25 * GB, flops=312e12, utilization=0.2, link_bytes_per_s=200 * GB,
               memory_bytes_per_s=2000 * GB)  # fmt: skip
H100 = Cluster(8, 2 * GB, 200 * GB, storage_bytes_per_s=25 * GB, flops=989e12, utilization=0.2, link_bytes_per_s=450 * GB,
               memory_bytes_per_s=3350 * GB)  # fmt: skip
GPUS = (8, 16, 32, 64, 128, 256, 512, 1024)
MTBF_S, RESTART_S = 3600.0, 120.0
"""Mean seconds between failures and seconds of a restart, for the table of the total overhead."""


@dataclass(frozen=True)
class Point:
    """Times and bytes of one configuration."""

    label: str
    compute_s: float
    full_s: float
    """Seconds of a snapshot of the full state."""
    partial_s: float
    """Seconds of a snapshot with an eighth of the experts."""
    full_bytes: float
    partial_bytes: float
    """Bytes that all ranks write with an eighth of the experts. :attr:`full_bytes` is the same with all experts."""

    @property
    def durations(self) -> tuple[float, float, float]:
        """Seconds of an iteration with a blocking, an asynchronous, and a partial asynchronous snapshot."""
        return self.compute_s + self.full_s, max(self.compute_s, self.full_s), max(self.compute_s, self.partial_s)


def main() -> None:
    """Compute and draw the figure, and write the page."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    by_panel = {name: list(points) for name, points in panels()}
    with figure(OUTPUT.with_suffix(".png"), 4, (24, 9), rows=2) as axes:
        for axis, (name, points) in zip(axes, by_panel.items(), strict=False):
            draw(axis, name, points)
        sizes = by_panel["a. DP and EP, A800"]
        axes[5].plot([place.label for place in sizes], [place.full_bytes / 1e12 for place in sizes], label="everything")
        axes[5].plot(
            [place.label for place in sizes], [place.partial_bytes / 1e12 for place in sizes], label="an eighth"
        )
        axes[5].set(title="f. persisted, TB", xlabel="GPUs", yscale="log")
        two_levels.draw(axes[6:])
        for axis in axes:
            axis.grid(alpha=0.3)
            axis.legend(fontsize=7)
    OUTPUT.write_text(report(by_panel), encoding="utf-8")


def panels() -> Iterator[tuple[str, Iterator[Point]]]:
    """Yield the name and the points of each panel of the figure."""
    yield "a. DP and EP, A800", (point(str(gpus), gpus, A800) for gpus in GPUS)
    yield "b. DP, EP and TP 4, A800", (point(str(gpus), gpus, A800, tensor=4) for gpus in GPUS[1:])
    yield "c. DP and EP, H100", (point(str(gpus), gpus, H100) for gpus in GPUS)
    yield (
        "d. sequence length, 256 A800",
        (point(str(length), 256, A800, length=length) for length in (512, 1024, 2048, 4096, 8192)),
    )
    yield "e. hidden size, 256 A800", (point(str(hidden), 256, A800, hidden=hidden) for hidden in (1024, 2048, 3072))


def point(label: str, gpus: int, cluster: Cluster, *, tensor: int = 1, length: int = 2048, hidden: int = 2048) -> Point:
    """Return the point of a LLaMA-like MoE of 24 layers, with an expert per layer on each GPU or tensor group."""
    experts = gpus // tensor
    model = Transformer(
        num_layers=24, hidden_size=hidden, num_attention_heads=16, kv_channels=128, vocab_size=32000, seq_length=length,
        num_experts=experts, moe_router_topk=min(2, experts), moe_ffn_hidden_size=4 * hidden,
    )  # fmt: skip
    layout = Layout(ranks=gpus, tensor=tensor, expert=experts, global_batch_size=16 * experts, micro_batch_size=16)
    job = describe(label, model, layout)
    time = from_machines(job, cluster)
    costs = Costs(
        plan=CheckpointPlan(PlanInput(job, cluster, job.regime, time.total_s, replicas=0)),
        time=time,
        storage_bytes_per_s=25 * GB,
        detect_s=1,
        regroup_s=10,
    )
    part = MoCCost(costs, max(1, experts // 8))
    return Point(
        label, compute_s=time.total_s, full_s=costs.copy_s(costs.full_bytes), partial_s=costs.copy_s(part.copied_bytes), full_bytes=costs.job_bytes,
        partial_bytes=costs.job_bytes * part.copied_bytes / costs.full_bytes,
    )  # fmt: skip


def draw(axis: Any, name: str, points: list[Point]) -> None:
    """Draw the seconds of an iteration over the points."""
    for number, label in enumerate(("blocking", "async, everything", "async, an eighth of the experts")):
        axis.plot(
            [place.label for place in points], [place.durations[number] for place in points], marker="o", label=label
        )
    axis.plot([place.label for place in points], [place.compute_s for place in points], ":", label="no checkpoint")
    axis.set(title=f"{name}: seconds of an iteration", yscale="log")


OVERHEAD = (
    "GPUs", "saving, s", "of an eighth, s", "interval", "full", "an eighth, same interval", "an eighth, same ratio",
    "its interval", "cheaper",
)  # fmt: skip


def overhead_rows(points: list[Point]) -> list[list[str]]:
    """Return rows with the total overhead of full and partial checkpoints, as shares of training time."""
    rows = []
    for place in points:
        faults = Faults(place.compute_s / MTBF_S, RESTART_S, place.compute_s)
        full_s, partial_s = (saving_s(snapshot_s, place.compute_s) for snapshot_s in (place.full_s, place.partial_s))
        full = faults.best_interval(full_s)
        closer = max(1, round(full * partial_s / full_s)) if full_s else full
        row = [place.label, f"{full_s:.2f}", f"{partial_s:.2f}", str(full)]
        for saved_s, interval in ((full_s, full), (partial_s, full), (partial_s, closer)):
            row.append(f"{faults.total_s(saved_s, interval, iterations=1) / place.compute_s:.2%}")
        rows.append([*row, str(closer), "yes" if faults.is_cheaper(partial_s, closer, full_s, full) else "no"])
    return rows


def report(by_panel: dict[str, list[Point]]) -> str:
    """Return the text of the page."""
    parts = []
    for name, points in by_panel.items():
        rows = [
            [place.label, f"{place.compute_s:.2f}", f"{place.full_s:.2f}", f"{place.partial_s:.2f}",
             *(f"{seconds:.2f}" for seconds in place.durations),
             f"{place.full_bytes / 1e12:.2f}", f"{place.partial_bytes / 1e12:.2f}"]
            for place in points
        ]  # fmt: skip
        header = (
            "", "no checkpoint, s", "snapshot, s", "of an eighth, s", "blocking", "async", "async, an eighth",
            "persisted, TB", "an eighth, TB",
        )  # fmt: skip
        parts.append(f"## {name}\n\n{table(header, rows)}")
    first, h100 = by_panel["a. DP and EP, A800"], by_panel["c. DP and EP, H100"]
    hidden = [place.label for place in first if place.full_s <= place.compute_s]
    eighth = [place.label for place in first if place.partial_s <= place.compute_s]
    text = "\n\n".join(parts)
    return f"""# MoC-System's figures again

    python -m benchmarks.papers.moc        (writes this file and moc.png)

![figures](moc.png)

Published: 24 layers, hidden 2048, 16 heads of 128, experts of four times the hidden size, one expert of a layer on each GPU;
312 and 989 TFLOPS at 20%; 1 and 2 GB/s from GPU to host; MoC saves an eighth of the experts. The paper's text has no values of the curves.
**Assumed**: gated experts, top-2, 16 sequences of 2048 tokens on a GPU, a micro-batch for all of them, 100 and 200 GB/s of
network a node, 200 and 450 GB/s of NVLink, state of 12 bytes a parameter, which ZeRO shards.

{text}

| what the paper says | here |
|---|---|
| below 1024 A800 a snapshot of everything does not hide | it hides from {hidden[0] if hidden else "no number of"} GPUs on |
| an eighth of the experts hides beyond 64 A800 | from {eighth[0] if eighth else "no number of"} GPUs on |
| on H100 a snapshot of everything does not hide even at 1024 | {"it does not" if h100[-1].full_s > h100[-1].compute_s else "it does"} |
| persisted bytes grow with the GPUs, snapshots of a GPU do not | {first[-1].full_bytes / first[0].full_bytes:.0f} times the bytes, {first[-1].full_s / first[0].full_s:.2f} times the snapshot |
| longer sequences take longer and save the same | yes |
| a larger hidden size lengthens snapshots more than passes | {by_panel["e. hidden size, 256 A800"][-1].full_s / by_panel["e. hidden size, 256 A800"][0].full_s:.1f} and {by_panel["e. hidden size, 256 A800"][-1].compute_s / by_panel["e. hidden size, 256 A800"][0].compute_s:.1f} times |

With more GPUs, an iteration gets longer only because of all-to-all over the network. How much longer, and where the curves cross,
depends on bandwidths that the paper does not give.

## Total overhead

Equations 4 and 10 to 16 of the paper, with a failure every {MTBF_S / 60:.0f} minutes and {RESTART_S:.0f} s to restart (both assumed). *saving* is what a
snapshot adds to an iteration after the passes have hidden their part. Full checkpoints have the interval with the least overhead.
The paper names two ways to use smaller checkpoints: the same interval, or one with the same ratio of saving to interval, its
interval is beside it. The last column is the paper's condition, equation 16.

{table(OVERHEAD, overhead_rows(first))}

H100:

{table(OVERHEAD, overhead_rows(h100))}

{checkpoint_sizes.section()}

{two_levels.section()}

{measured_on("numpy")}.
"""


if __name__ == "__main__":
    main()
