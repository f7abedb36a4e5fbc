"""Job to simulate, without a model: operators of round sizes."""

from __future__ import annotations

from collections.abc import Collection

from moevement_core import precision
from moevement_core.operators import EMBEDDING, OperatorKind, expert_name, gate_name, non_expert_name
from moevement_core.planning.checkpoint_plan import CheckpointPlan, PlanInput
from moevement_core.planning.cluster import GB, Cluster
from moevement_core.planning.job import JobShape, OperatorShape, StageShape
from moevement_core.policy.window import WindowKind
from moevement_core.simulator.costs import Costs, LostState
from moevement_core.simulator.iteration import IterationTime, from_total


def costs(
    *,
    ranks: int = 128,
    stages: int = 8,
    micro_batches: int = 32,
    iteration_s: float = 3.0,
    d2h: float = 1.0,
    network: float = 16.0,
    kind: WindowKind = WindowKind.ALIGNED,
    storage: float = 0.2,
    window: int | None = None,
    regroup_s: float = 10.0,
    replicas: int = 2,
    skew: float = 0.0,
    tied: bool = False,
) -> Costs:
    """Return the costs of a job whose stages have four layers, each of eight experts, a gate and other weights.

    Bandwidths are in GB/s; that of storage is for each rank.
    """
    layers = range(4)
    operators = tuple(
        OperatorShape(name, kind_, (precision.TensorShape(size),), 1)
        for layer in layers
        for name, kind_, size in (
            (non_expert_name(layer), OperatorKind.NON_EXPERT, 12_000_000),
            (gate_name(layer), OperatorKind.GATE, 20_000),
            *((expert_name(layer, number), OperatorKind.EXPERT, 8_000_000) for number in range(8)),
        )
    )
    embedding = (
        (OperatorShape(EMBEDDING, OperatorKind.EMBEDDING, (precision.TensorShape(1_000_000),), 1),) if tied else ()
    )
    ends = (0, stages - 1)
    regime = precision.MIXED
    job = JobShape(
        "made", ranks, 1, stages, 1, 1, ranks // stages, micro_batches, 1 << 20, regime,
        tuple(StageShape(operators + embedding * (stage in ends), 2) for stage in range(stages)),
        tokens=2048, experts_per_token=2,
    )  # fmt: skip
    cluster = Cluster(8, d2h * GB, network * GB)
    plan = CheckpointPlan(PlanInput(job, cluster, regime, iteration_s, kind, replicas, window))
    return Costs(plan, from_total(iteration_s, job), storage * ranks * GB, 1.0, regroup_s, skew=skew)


def lost_state(committed: int, nodes: Collection[int] = (0,), hosts: Collection[int] | None = None) -> LostState:
    """Return the state that a failure loses in the middle of an iteration; by default, ``nodes`` lose their memory."""
    return LostState(committed, 0.5, nodes, nodes if hosts is None else hosts)


def closed_form_s(time: IterationTime) -> float:
    """Return the seconds of an iteration by the closed form of MoEvement, appendix C."""
    return max(pipeline.closed_form() for pipeline in time.pipelines) + time.sync_s + time.update_s
