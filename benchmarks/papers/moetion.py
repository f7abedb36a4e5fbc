"""Computation of MoEtion's figures 4 to 7, 9 and 10. It writes benchmarks/papers/moetion.md and moetion.png.

python -m benchmarks.papers.moetion
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.environment import measured_on
from benchmarks.papers import moetion_steps
from benchmarks.papers.common import table
from benchmarks.papers.moetion_models import MODELS, Model
from moevement_cli.plotting import figure
from moevement_core.planning.checkpoint_plan import CheckpointPlan, PlanInput
from moevement_core.planning.cluster import CLUSTERS, Cluster
from moevement_core.planning.transformer import describe
from moevement_core.simulator.costs import CheckFreqCost, Costs, GeminiCost, MoEtionCost, StrategyCost
from moevement_core.simulator.iteration import from_machines

OUTPUT = Path(__file__).with_suffix(".md")
GB = 1e9
NODES: Cluster = replace(CLUSTERS["moevement-a100"], gpus_per_node=4, network_bytes_per_s=320 / 8 * GB)
"""Cluster of the paper (its section 7.1): 16 nodes of four A100, 320 Gb/s between nodes, 40 Gb/s of storage."""


def main() -> None:
    """Compute and draw the figures, and write the page."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    by_model = {model.name: strategies(costs_of(model), model) for model in MODELS}
    whole, divided = (moetion_steps.steps(is_whole=is_whole) for is_whole in (True, False))
    scaled = [moetion_steps.Scaled(experts) for experts in moetion_steps.EXPERTS]
    with figure(OUTPUT.with_suffix(".png"), 4, (20, 8), rows=2) as axes:
        draw(axes[:4], by_model)
        moetion_steps.draw(axes[4:], whole, divided, scaled)
    OUTPUT.write_text(report(by_model, moetion_steps.report(whole, divided, scaled)), encoding="utf-8")


def costs_of(model: Model) -> Costs:
    """Return the costs on the paper's cluster, with two replicas. The iteration time follows from an A100's speed."""
    job = describe(model.name, model.model, model.layout)
    time = from_machines(job, NODES)
    plan = CheckpointPlan(PlanInput(job, NODES, job.regime, time.total_s))
    assert NODES.storage_bytes_per_s is not None
    return Costs(plan, time, storage_bytes_per_s=NODES.storage_bytes_per_s, detect_s=0.0, regroup_s=0.0, skew=0.25)


def strategies(costs: Costs, model: Model) -> dict[str, StrategyCost]:
    """Return the strategies of the paper's figures."""
    every = max(1, costs.iterations(max(costs.copy_s(costs.full_bytes), costs.send_s(costs.full_bytes))))
    return {
        "checkfreq": CheckFreqCost(costs),
        "gemini, every iteration": GeminiCost(costs, 3600.0, interval=1),
        "gemini, without stalls": GeminiCost(costs, 3600.0, interval=every),
        "moetion": MoEtionCost(costs),
    }


def checkpoint_s(strategy: StrategyCost) -> float:
    """Return the seconds until one checkpoint is complete."""
    costs = strategy.costs
    match strategy:
        case CheckFreqCost():
            return costs.copy_s(costs.full_bytes) + costs.store_s()
        case MoEtionCost():
            return max(costs.copy_s(strategy.copied_bytes), costs.send_s(strategy.sent_bytes))
        case _:
            return max(costs.copy_s(costs.full_bytes), costs.send_s(costs.full_bytes))


def wasted_s(strategy: StrategyCost) -> float:
    """Return the wasted seconds by the paper's formula: a checkpoint, its retrieval, and half an interval."""
    return checkpoint_s(strategy) + strategy.fetch_s + strategy.interval / 2 * strategy.costs.iteration_s


def share(strategy: StrategyCost) -> float:
    """Return the share of the full state that a checkpoint holds."""
    return strategy.copied_bytes * strategy.interval / strategy.costs.full_bytes


def draw(axes: Any, by_model: dict[str, dict[str, StrategyCost]]) -> None:
    """Draw one panel for each figure."""
    panels = (
        ("4: checkpoint, GB", lambda strategy: share(strategy) * strategy.costs.job_bytes / GB),
        ("5: seconds of a checkpoint", checkpoint_s),
        ("6: checkpoints in 100 iterations", lambda strategy: 100 / strategy.interval),
        ("7: wasted seconds of a failure", wasted_s),
    )
    for axis, (title, value) in zip(axes, panels, strict=True):
        for number, (model, own) in enumerate(by_model.items()):
            places = [place + 0.4 * number for place in range(len(own))]
            axis.bar(places, [value(strategy) for strategy in own.values()], 0.4, label=model)
            axis.set_xticks([place + 0.2 for place in range(len(own))], list(own), rotation=20, fontsize=7)
        axis.set(title=title, yscale="log")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7)


def report(by_model: dict[str, dict[str, StrategyCost]], steps: str) -> str:
    """Return the text of the page, with ``steps`` as its part about figures 9 and 10."""
    rows = []
    for model, own in by_model.items():
        for name, strategy in own.items():
            rows.append(
                [model, name, f"{strategy.costs.iteration_s:.2f}",
                 f"{share(strategy) * strategy.costs.job_bytes / GB:.0f}",
                 f"{checkpoint_s(strategy):.2f}", f"{100 / strategy.interval:.1f}",
                 f"{strategy.overhead_s:.2f}", f"{wasted_s(strategy):.1f}"]
            )  # fmt: skip
    header = (
        "model", "system", "iteration, s", "checkpoint, GB (fig. 4)", "checkpoint, s (fig. 5)",
        "in 100 iterations (fig. 6)", "overhead of an iteration, s", "wasted, s (fig. 7)",
    )  # fmt: skip
    computed = [MoEtionCost(costs_of(model)) for model in MODELS]
    selected = [
        [model.name, model.selected, f"{model.selected / model.model.num_experts:.0%}", f"{own.experts_saved} and {own.experts_sent}",
         f"{share_of(model):.0f}", f"{own.risks.peer_risk:.2f}", model.wasted_s]
        for model, own in zip(MODELS, computed, strict=True)
    ]  # fmt: skip
    return f"""# MoEtion's figures 4 to 7, 9 and 10 again

    python -m benchmarks.papers.moetion        (writes this file and moetion.png)

![figures](moetion.png)

Sixteen nodes of four A100, 320 Gb/s between them, 40 Gb/s of storage, as published; 25 GB/s from device to host, 40% of the
GPUs' peak and two replicas are assumed. No widths are published; they are chosen to give the published numbers of parameters.

## Figures 4 to 7

{table(header, rows)}

{
        table(
            (
                "model",
                "S published",
                "of the experts",
                "S that the budgets carry, own host and peers",
                "GB with the published S",
                "iterations' updates at risk with ours",
                "wasted, published, s",
            ),
            selected,
        )
    }

| what the paper says | here |
|---|---|
| full state of 1.6B-64E is 587 GB | 10 bytes a parameter; mixed precision with FP32 master weights and moments has 12 (704 GB) |
| 6 of 64 experts make it 61 GB | {share_of(MODELS[0]):.0f} GB, non-experts included |
| Gemini stalls 28 s in every iteration, CheckFreq 100 s | {
        by_model["MoE-GPT-1.6B-64E"]["gemini, every iteration"].overhead_s:.1f} s; writing takes {
        checkpoint_s(by_model["MoE-GPT-1.6B-64E"]["checkfreq"]):.0f} s |
| Gemini checkpoints 6 times in 100 iterations, CheckFreq 2 | {
        100 / by_model["MoE-GPT-1.6B-64E"]["gemini, without stalls"].interval:.1f} and {
        100 / by_model["MoE-GPT-1.6B-64E"]["checkfreq"].interval:.1f} |
| CheckFreq wastes 331.9 s on 1.6B-64E | {wasted_s(by_model["MoE-GPT-1.6B-64E"]["checkfreq"]):.0f} s |
| MoEtion wastes {MODELS[0].wasted_s} and {MODELS[1].wasted_s} s | {
        wasted_s(by_model["MoE-GPT-1.6B-64E"]["moetion"]):.1f} and {
        wasted_s(by_model["MoE-GPT-2.9B-16E"]["moetion"]):.1f} s |

- If a dense checkpoint of 587 GB stalls training for 28 s, all ranks together send 21 GB/s. That is half of what the links of one
  node carry, as in MoEvement's table 7 (benchmarks/papers/table7.md). Over the links of all sixteen nodes it takes two seconds.
- The third model is left out of these figures, because it contradicts itself. A dense GPT of 3.8 B parameters whose feed-forward
  layers become eight experts has at most 30.4 B parameters, but 46.7 B are published.
- The paper's local budget is 109 GB in an iteration (section 4.2). At 25 GB/s that is an iteration of 4.4 s on one GPU, or
  1.7 GB an iteration on each of 64 GPUs.
- Batch 16 on 16 (or 8) data-parallel ranks leaves one or two micro-batches for a pipeline of 8 (or 4). The pipeline is
  nearly empty all the time, and an iteration is short compared with the size of the state. Still, the budgets carry more than the
  published S, and next to nothing is at risk. Figures 9 and 10 below are computed with the slower sends that the paper measured.

{steps}
{measured_on("numpy")}.
"""


def share_of(model: Model) -> float:
    """Return the gigabytes of the non-experts and of S experts per layer, with the published S."""
    costs = costs_of(model)
    own = MoEtionCost(costs)
    whole = own.other_bytes + own.expert_bytes * model.selected / model.model.num_experts
    return whole / costs.full_bytes * costs.job_bytes / GB


if __name__ == "__main__":
    main()
