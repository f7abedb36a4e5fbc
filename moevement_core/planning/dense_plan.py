"""Plan of dense checkpoints in the memory of peers, for the model and the bandwidths of another plan."""

from __future__ import annotations

import math
from dataclasses import dataclass

from moevement_core.planning.checkpoint_plan import INTERRUPTED, CheckpointPlan
from moevement_core.policy.schedule import LAG_ALLOWANCE
from moevement_core.strategies import DenseSchedule

DENSE_OVERHEAD = 0.03
"""Largest share of training time that dense checkpoints of CheckFreq may cost, as in MoEvement's section 5.2."""


@dataclass(frozen=True)
class DensePlan:
    """Plan of dense checkpoints in the memory of peers, as in GEMINI, for a rank of the stage with most bytes of state.

    The default interval keeps the overhead within CheckFreq's bound of 3%.
    """

    bytes: int
    copy_s: float
    send_s: float
    """Seconds to send a checkpoint to every peer."""
    stall_s: float
    """Seconds by which one checkpoint delays training, because its copy to the host takes longer than an iteration."""
    interval: int
    """Iterations from one checkpoint to the next.

    The default is the shortest interval for which stalls cost at most 3% of training time, and one checkpoint ends
    before the next begins.
    """

    lag: int
    """Lag of a checkpoint: iterations from its start until every peer has received it."""
    host_memory: tuple[int, int, int]
    """Bytes of host memory of a rank with ``--moevement-strategy dense``.

    The three numbers are for the rank's own checkpoints, for copies that it keeps for other ranks, and for its boundary
    log.
    """

    @property
    def expected_rollback(self) -> float:
        """Mean iterations of work that a failure costs: half of the interval (MoEvement, section 3.6), plus the lag."""
        return self.interval / 2 + self.lag

    @property
    def average_replayed(self) -> float:
        """Mean committed iterations that a recovery replays."""
        return self.expected_rollback - INTERRUPTED

    @property
    def most_replayed(self) -> int:
        """Largest number of committed iterations that a recovery replays."""
        return self.interval - 1 + self.lag


def dense_plan(plan: CheckpointPlan, interval: int | None = None) -> DensePlan:
    """Return the plan of dense checkpoints in peers' memory, for the same model and bandwidths.

    Args:
        plan: plan of the job with sparse checkpoints.
        interval: iterations from one checkpoint to the next. None: the shortest interval that meets two conditions:
            stalls stay within :data:`DENSE_OVERHEAD`, and one checkpoint ends before the next begins.
    """
    stage = max(plan.stages, key=lambda stage: stage.full_bytes)
    copy_s = stage.full_bytes / plan.inputs.cluster.d2h_bytes_per_s
    stall_s = max(0.0, copy_s - plan.inputs.iteration_s)
    send_s = stage.budget.send_s(stage.full_bytes)
    hidden = max(1, math.ceil(stall_s / (DENSE_OVERHEAD * plan.inputs.iteration_s)))
    interval = interval or max(hidden, math.ceil(max(copy_s, send_s) / plan.inputs.iteration_s))
    sent_late = math.ceil(send_s / plan.inputs.iteration_s)
    lag = math.ceil(copy_s / plan.inputs.iteration_s) + sent_late
    schedule = DenseSchedule(stage.table, interval)
    own, kept = (
        schedule.retention(late, to_disk=plan.inputs.to_disk).slots_at_first
        for late in (max(sent_late, LAG_ALLOWANCE), 0)
    )
    logged = schedule.retention(max(sent_late, LAG_ALLOWANCE), to_disk=plan.inputs.to_disk).logged_at_first
    host_memory = (
        own * stage.full_bytes,
        plan.inputs.replicas * kept * stage.full_bytes,
        logged * max(stage.log_bytes for stage in plan.stages),
    )
    return DensePlan(
        bytes=stage.full_bytes,
        copy_s=copy_s,
        send_s=send_s,
        stall_s=stall_s,
        interval=interval,
        lag=lag,
        host_memory=host_memory,
    )
