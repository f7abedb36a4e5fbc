"""Changes of a job that would change its window: other inputs of the plan, and other bandwidths."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from moevement_core.planning.checkpoint_plan import CheckpointPlan, PlanInput
from moevement_core.policy.window import WindowKind, peak_of_window
from moevement_core.precision import TABLE_7


def bandwidth_for(plan: CheckpointPlan, size: int) -> float:
    """Return the smallest bandwidth with which the window of the job has ``size`` iterations or fewer.

    Args:
        plan: plan of the job.
        size: window in iterations.

    Returns:
        Bytes per second for the snapshots of one rank. A snapshot counts once, even if several peers receive it.
    """
    heaviest = max(peak_of_window(stage.weighed, stage.order, size, stage.own.kind) for stage in plan.stages)
    return heaviest / plan.inputs.iteration_s


def alternatives(inputs: PlanInput) -> Iterator[tuple[str, int]]:
    """Yield possible changes of the inputs: a description of each, and the window W that the plan then has.

    Each item changes one input: twice the bandwidth to the host, twice the network bandwidth, rolling instead of
    aligned windows (or the reverse), iterations twice as long, one replica less, or the number formats of a row of
    MoEvement's table 7.
    """
    inputs = replace(inputs, window=None)
    cluster, scaling = inputs.cluster, inputs.regime.scaling
    faster_copies = replace(cluster, d2h_bytes_per_s=2 * cluster.d2h_bytes_per_s)
    faster_network = cluster.with_faster_network(2)
    other = WindowKind.ROLLING if inputs.kind is WindowKind.ALIGNED else WindowKind.ALIGNED
    changes = {
        "twice the bandwidth from device to host": replace(inputs, cluster=faster_copies),
        "twice the network bandwidth": replace(inputs, cluster=faster_network),
        f"{other} window": replace(inputs, kind=other),
        "iterations twice as long": replace(inputs, iteration_s=2 * inputs.iteration_s),
    }
    if inputs.replicas:
        changes["one replica less"] = replace(inputs, replicas=inputs.replicas - 1)
    for regime in TABLE_7:
        changes[f"regime {regime}"] = replace(inputs, regime=replace(regime, scaling=scaling))
    for name, change in changes.items():
        yield name, CheckpointPlan(change).size
