"""MoEtion's figures 9 and 10: checkpoints over the number of experts, and what each technique adds.

Here the budget for peers binds: the sends of all ranks together have the bandwidth that the paper's figure 9 implies.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from benchmarks.papers.common import table
from benchmarks.papers.moetion_models import LARGEST, MODELS, Model
from moevement_core.operators import OperatorKind
from moevement_core.planning.checkpoint_plan import CheckpointPlan, PlanInput
from moevement_core.planning.cluster import ASSUMED_SHARE, GB, Cluster
from moevement_core.planning.job import JobShape
from moevement_core.planning.transformer import describe
from moevement_core.simulator.costs import Costs, MoEtionCost, Optimizations
from moevement_core.simulator.iteration import from_total

EXPERTS = (1, 2, 4, 8, 16, 32)
GEMINI_GB, GEMINI_S = 1820.0, 74.9
"""Published checkpoint of Gemini with 32 experts; figure 9 prints no other value of Gemini."""
MOETION_GB, MOETION_S = 195.0, 8.5
"""Published checkpoint of MoEtion with 32 experts."""
BYTES_PER_S = GEMINI_GB * GB / GEMINI_S
"""Bytes per second of the sends of all ranks together."""
ITERATION_S = 109 / 25
"""Seconds of an iteration: the published local budget of 109 GB (section 4.2), at 25 GB/s from device to host."""
MICRO_BATCHES = 16
"""Micro-batches of a pipeline in an iteration, if the paper's batch of 16 is that of each pipeline."""
SKEW = 0.25
REPLICAS = 2
STEPS = {
    "selected experts": Optimizations(skips_replicated=False, sends_gradients=False, uses_bubbles=False),
    "+ bubbles (5.3)": Optimizations(skips_replicated=False, sends_gradients=False),
    "+ redundancy (5.1)": Optimizations(sends_gradients=False),
    "+ gradients (5.2)": Optimizations(),
}
"""Techniques in the order of figure 10."""


@dataclass(frozen=True)
class Step:
    """Checkpoints of a model with some of the techniques."""

    model: Model
    name: str
    published_s: float | None
    fixed: MoEtionCost
    """Strategy with the S of the paper."""
    largest: MoEtionCost
    """Strategy with the largest S that budgets carry."""


@dataclass(frozen=True)
class Scaled:
    """Checkpoints of :data:`LARGEST` with another number of experts."""

    experts: int

    @cached_property
    def costs(self) -> Costs:
        """Costs of the job."""
        return costs_of(replace(LARGEST, model=replace(LARGEST.model, num_experts=self.experts)))

    @property
    def dense_s(self) -> float:
        """Seconds to send all state of all ranks; the heaviest rank ends last."""
        return self.costs.full_bytes * self.costs.plan.inputs.job.ranks / BYTES_PER_S

    @cached_property
    def tenth(self) -> MoEtionCost:
        """Strategy that saves a tenth of the experts: the share that 195 of 1,820 GB are."""
        return MoEtionCost(
            self.costs, experts_saved=max(1, round(self.experts / 10)), optimizations=STEPS["+ bubbles (5.3)"]
        )

    @cached_property
    def largest(self) -> MoEtionCost:
        """Strategy with the largest S that budgets carry, and all techniques."""
        return MoEtionCost(self.costs)


def costs_of(model: Model, *, is_whole: bool = False, micro_batches: int = MICRO_BATCHES) -> Costs:
    """Return the costs of a job whose sends together have :data:`BYTES_PER_S` beside training.

    Args:
        model: model of the job.
        is_whole: True if every data-parallel rank has all state of operators other than experts; False for ZeRO-1.
        micro_batches: micro-batches of each pipeline in an iteration.
    """
    job = describe(model.name, model.model, replace(model.layout, global_batch_size=micro_batches * model.layout.data))
    if is_whole:
        job = _with_whole_state(job)
    plan = CheckpointPlan(PlanInput(job, cluster(job), job.regime, ITERATION_S, replicas=REPLICAS))
    time = from_total(ITERATION_S, job)
    return Costs(plan, time, storage_bytes_per_s=5 * GB, detect_s=0.0, regroup_s=0.0, skew=SKEW)


def cluster(job: JobShape) -> Cluster:
    """Return nodes of four GPUs whose links carry :data:`BYTES_PER_S` to each peer beside training.

    Copies get the usual share of links beside training, and whole links in a bubble.
    """
    node = 4 * REPLICAS * BYTES_PER_S / job.ranks / ASSUMED_SHARE
    return Cluster(4, 25 * GB, node, network_share=ASSUMED_SHARE)


def _with_whole_state(job: JobShape) -> JobShape:
    stages = tuple(
        replace(
            stage,
            operators=tuple(
                operator if operator.kind is OperatorKind.EXPERT else replace(operator, shards=1)
                for operator in stage.operators
            ),
        )
        for stage in job.stages
    )
    return replace(job, stages=stages)


def steps(*, is_whole: bool) -> list[Step]:
    """Return the steps of figure 10 for its three models."""
    return [
        Step(
            model=model,
            name=name,
            published_s=published_s,
            fixed=MoEtionCost(costs, experts_saved=model.selected, optimizations=used),
            largest=MoEtionCost(costs, optimizations=used),
        )
        for model in (*MODELS, LARGEST)
        for costs in [costs_of(model, is_whole=is_whole)]
        for (name, used), published_s in zip(STEPS.items(), model.steps_s, strict=True)
    ]


def sent_gb(strategy: MoEtionCost) -> float:
    """Return the gigabytes that all ranks together send to each peer for a checkpoint."""
    return strategy.sent_bytes * strategy.interval * strategy.costs.plan.inputs.job.ranks / GB


def saved_gb(strategy: MoEtionCost) -> float:
    """Return the gigabytes of a checkpoint of all ranks."""
    return strategy.snapshot_bytes / strategy.costs.full_bytes * strategy.costs.job_bytes / GB


def draw(axes: Any, whole: list[Step], divided: list[Step], scaled: list[Scaled]) -> None:
    """Draw four panels: sizes and seconds of figure 9, and figure 10 with divided and with whole state."""
    sizes, seconds, *bars = axes
    for axis, title, dense, tenth, published in (
        (sizes, "9a: checkpoint, GB", [each.costs.job_bytes / GB for each in scaled],
         [saved_gb(each.tenth) for each in scaled], (GEMINI_GB, MOETION_GB)),
        (seconds, "9b: seconds of a checkpoint", [each.dense_s for each in scaled],
         [sum(each.tenth.transfers_s) for each in scaled], (GEMINI_S, MOETION_S)),
    ):  # fmt: skip
        axis.plot(EXPERTS, dense, marker="o", label="gemini")
        axis.plot(EXPERTS, tenth, marker="o", label="moetion, a tenth of the experts")
        axis.plot([EXPERTS[-1]] * 2, published, "kx", label="published")
        axis.set(title=title, xscale="log", yscale="log", xlabel="experts")
        axis.set_xticks(EXPERTS, list(map(str, EXPERTS)))
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7)
    for axis, own, title in zip(bars, (divided, whole), ("ZeRO-1", "whole state"), strict=True):
        _draw_steps(axis, own)
        axis.set(title=f"10: seconds that links work, {title}")


def _draw_steps(axis: Any, own: list[Step]) -> None:
    for place, name in enumerate(STEPS):
        chosen = [step for step in own if step.name == name]
        places = [number + 0.2 * place for number in range(len(chosen))]
        axis.bar(places, [sum(step.fixed.transfers_s) for step in chosen], 0.2, label=name)
        printed = [(at, step.published_s) for at, step in zip(places, chosen, strict=True) if step.published_s]
        axis.plot(*zip(*printed, strict=True), "kx", label="published" if not place else None)
    axis.set_xticks([0.3, 1.3, 2.3], [model.name for model in (*MODELS, LARGEST)], fontsize=7)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=7)


def report(whole: list[Step], divided: list[Step], scaled: list[Scaled]) -> str:
    """Return the part of the page about figures 9 and 10."""
    return f"""## Settings of figures 9 and 10

With the links above, the budgets carry more than the published S. The paper measured slower sends: Gemini's {
        GEMINI_GB:,.0f} GB in {GEMINI_S} s
(figure 9) are {
        BYTES_PER_S
        / GB:.1f} GB/s of all 64 GPUs together. The tables below use this rate to each peer, so that the budget for peers
binds, as it does in the paper. The other settings:

- Iterations take {
        ITERATION_S:.2f} s: the published local budget of 109 GB (section 4.2), at 25 GB/s. The paper prints no seconds of
  an iteration.
- Beside training, copies get {
        ASSUMED_SHARE:.0%} of the links. In a bubble they get all. The share is that of [windows](windows.md).
- The batch of 16 is that of each pipeline, so bubbles are {
        _bubble_share(MODELS[0]):.0%} of an iteration with 8 stages, and {_bubble_share(MODELS[1]):.0%} with 4.
- The skew of popularities is {
        SKEW
    }. A lost node takes its experts from peers, a lost process takes them from its own host.

A dense GPT of 3.8 B parameters does not become 46.7 B with 8 experts (see above). Still, both published sizes, 46.7 B with 8 experts
and {
        GEMINI_GB:,.0f} GB with 32, fit one model with experts of 5.6 B parameters at 10 bytes a parameter. The tables use this model.

## Figure 9: number of experts

{_table_9(scaled)}

The paper prints two points, both with 32 experts: {GEMINI_GB:,.0f} GB and {GEMINI_S} s for Gemini, {
        MOETION_GB:.0f} GB and {MOETION_S} s for MoEtion.

{_prose_9(scaled)}

## Figure 10: what each technique adds

State that is divided among data-parallel ranks (ZeRO-1, as published):

{_table_10(divided)}

All state except that of experts whole on every data-parallel rank:

{_table_10(whole)}

- *Links work* is the time in which a checkpoint's sends are under way, in bubbles and beside training.
- *At peers* is the share of the sent experts that peers got with the last checkpoint too. Gradients suffice for these.
- *S that links carry* is the largest S whose sends are complete within an iteration, or 1.
- *At risk* are the updates that a failure then loses of experts that come from peers, in iterations. Own hosts keep all experts
  here, so the failure of a process loses no update.

What differs from the paper, and why:

{_prose_10(divided)}
"""


def _bubble_share(model: Model, micro_batches: int = MICRO_BATCHES) -> float:
    strategy = MoEtionCost(costs_of(model, micro_batches=micro_batches))
    return strategy.bubbles.seconds / ITERATION_S


def _table_9(scaled: list[Scaled]) -> str:
    header = (
        "experts", "parameters, B", "gemini, GB", "at 10 bytes, GB", "gemini, s", "a tenth: S", "checkpoint, GB",
        "links work, s", "S that links carry, all techniques", "sent, GB", "links work, s", "at risk",
    )  # fmt: skip
    return table(
        header,
        [
            [each.experts, f"{each.costs.job_bytes / 12 / GB:.1f}", f"{each.costs.job_bytes / GB:.0f}",
             f"{each.costs.job_bytes / 12 * 10 / GB:.0f}", f"{each.dense_s:.1f}", each.tenth.experts_saved,
             f"{saved_gb(each.tenth):.0f}", f"{sum(each.tenth.transfers_s):.1f}", each.largest.experts_sent,
             f"{sent_gb(each.largest):.0f}", f"{sum(each.largest.transfers_s):.1f}",
             f"{each.largest.risks.peer_risk:.2f}"]
            for each in scaled
        ],
    )  # fmt: skip


def _table_10(own: list[Step]) -> str:
    header = (
        "model", "S", "techniques", "published, s", "links work, s", "of this beside training, s", "sent, GB",
        "at peers", "S that links carry", "at risk",
    )  # fmt: skip
    return table(
        header,
        [
            [step.model.name, step.model.selected, step.name, step.published_s or "",
             f"{sum(step.fixed.transfers_s):.2f}", f"{step.fixed.transfers_s[1]:.2f}", f"{sent_gb(step.fixed):.0f}",
             f"{step.fixed.risks.repeated:.0%}", step.largest.experts_sent, f"{step.largest.risks.peer_risk:.2f}"]
            for step in own
        ],
    )  # fmt: skip


def _prose_9(scaled: list[Scaled]) -> str:
    last = scaled[-1]
    most = max(each.experts for each in scaled if each.largest.experts_sent == each.experts)
    return f"""\
- A tenth of 32 experts is {saved_gb(last.tenth):.0f} GB here, {
        last.costs.job_bytes / GB / saved_gb(last.tenth):.1f} times less than Gemini's checkpoint; {
        GEMINI_GB / MOETION_GB:.1f} times are published. The paper's
  state has 10 bytes a parameter, ours 12: master weights and two moments in FP32.
- Links work {sum(last.tenth.transfers_s):.1f} s for it with selection and bubbles. Gemini takes {
        last.dense_s:.1f} s, which would be {last.dense_s * 10 / 12:.1f} s with 10 bytes.
- Up to {most} experts, links carry the gradients of all. With more, they carry {
        last.largest.experts_sent
    } experts a layer. That number does not grow,
  because an iteration takes the same time for every number of experts here. In the paper iterations grow, and {
        MOETION_S
    } s are well
  within one."""


def _prose_10(divided: list[Step]) -> str:
    selected, bubbles, _, gradients = (
        [sum(step.fixed.transfers_s) for step in divided if step.name == name] for name in STEPS
    )
    first = {step.name: step.fixed for step in divided if step.model is MODELS[0]}
    carried = [step.largest.experts_sent for step in divided[:: len(STEPS)]]
    shares = [_bubble_share(model, max(1, 16 // model.layout.data)) for model in MODELS]
    return f"""\
- **S.** With selection alone, links carry {carried[0]} and {carried[1]} experts a layer of the first two models; {
        MODELS[0].selected
    } and {MODELS[1].selected} are published. For the third model
  the paper prints no S. A quarter of its experts is more than links carry, so its checkpoints are late.
- **Selected experts.** The published seconds do not follow from the published sizes. At this rate 5.7 s are {
        5.7 * BYTES_PER_S / GB:.0f} GB, where
  figure 4 has 61 GB, and 12.6 s are {12.6 * BYTES_PER_S / GB:.0f} GB, five of the eight experts of the third model.
- **Bubbles.** Links work {
        _less(selected, bubbles)
    } less for the three models. The paper says up to 30%, and prints 13% for the
  third. All sends of the first model fit into bubbles. Its checkpoint is complete later for that, after {
        first["+ bubbles (5.3)"].send_s:.1f} instead of {first["selected experts"].send_s:.1f} s,
  because it waits for the last bubbles of an iteration. If the batch of 16 is that of the whole job, bubbles are {
        " and ".join(f"{share:.0%}" for share in shares)
    }
  of an iteration of these models.
- **Redundancy.** With ZeRO-1 it changes nothing here, because every rank holds another part of master weights and moments. Of the
  paper's 10 bytes a parameter, 2 may be weights, which replicas do hold; these would be the 20% that the paper names. It prints 36%
  for the third model. The second table has the case that section 5.1 describes: replicas with whole state.
- **Gradients.** Links work {
        _less(bubbles, gradients)
    } less for the three models; the paper has 40%. Gradients help if the same experts
  come in a row. Algorithm 1 counts tokens since an expert was saved, so an expert falls back once it is saved: of two experts of
  eight, only {
        divided[
            -1
        ].fixed.risks.repeated:.0%} come twice in a row. If all experts are sent each time, gradients suffice for all of them. Links carry that, so
  S becomes the number of experts in all three models, and nothing is at risk."""


def _less(before: list[float], after: list[float]) -> str:
    return ", ".join(f"{1 - new / old:.0%}" for old, new in zip(before, after, strict=True))
