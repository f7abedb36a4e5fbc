"""A job to simulate, without a model: operators of round sizes."""

from __future__ import annotations

from moevement_core import precision
from moevement_core.description.cluster import GB, Cluster
from moevement_core.description.job import JobShape, OperatorShape, StageShape
from moevement_core.operators import OperatorKind
from moevement_core.policy.plan import CheckpointPlan, PlanInput
from moevement_core.policy.window import WindowKind
from moevement_core.simulator.strategies import Costs


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
) -> Costs:
    """Eight experts, a gate and the rest in each of four layers of a stage; bandwidths in GB/s."""
    layers = range(4)
    operators = tuple(
        OperatorShape(name, kind_, (size,), 1)
        for layer in layers
        for name, kind_, size in (
            *((f"layer.{layer}.expert.{number}", OperatorKind.EXPERT, 8_000_000) for number in range(8)),
            (f"layer.{layer}.gate", OperatorKind.GATE, 20_000),
            (f"layer.{layer}.non_expert", OperatorKind.NON_EXPERT, 12_000_000),
        )
    )
    regime = (
        precision.parse("FP16-FP32") if "FP16-FP32" in precision.PRESETS else next(iter(precision.PRESETS.values()))
    )
    job = JobShape(
        "made", ranks, 1, stages, 8, 1, ranks // stages, micro_batches, 1 << 20, regime,
        tuple(StageShape(operators, 2) for _ in range(stages)),
    )  # fmt: skip
    cluster = Cluster(8, d2h * GB, network * GB)
    plan = CheckpointPlan(PlanInput(job, cluster, regime, iteration_s, kind, 2, window))
    return Costs(plan, storage * GB, 1.0, regroup_s, (stages - 1) / (micro_batches + stages - 1))
