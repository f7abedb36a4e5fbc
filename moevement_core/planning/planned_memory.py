"""Host memory that the ranks of a planned job need: snapshots, copies or parity for other ranks, and boundary logs."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from moevement_core.engine.memory import IN_FLIGHT
from moevement_core.planning.checkpoint_plan import CheckpointPlan, StagePlan
from moevement_core.policy.holding import Kept, most_held
from moevement_core.policy.schedule import LAG_ALLOWANCE, LATE_AT_PEERS
from moevement_core.replication.parity.staging import AT_ONCE
from moevement_core.snapshot.blocks import BLOCK

_MASTER_BYTES = 4
"""Bytes of one element of master weights in FP32, the widest format in a snapshot."""


class PlannedMemory:
    """Host memory of the ranks of a planned job, in bytes.

    Args:
        plan: plan of the job.
    """

    def __init__(self, plan: CheckpointPlan) -> None:
        self._inputs, self._stages = plan.inputs, plan.stages
        self._lag_allowed = max(plan.lag, LAG_ALLOWANCE)

    @property
    def of_rank(self) -> tuple[int, int, int]:
        """Bytes of host memory of a rank: its own snapshots, copies or parity for other ranks, and boundary logs.

        Snapshots, copies and parity are those of the stage with the heaviest snapshots. Logs are those of the stage
        with the largest logs.
        """
        heaviest, replicas, nodes = max(self._stages, key=self._snapshots), self._inputs.replicas, self._inputs.nodes
        if self._inputs.members:
            groups = -(-nodes // self._inputs.members)  # The members of a group are on different nodes.
            kept = math.ceil(replicas * groups * self._parity(heaviest) / nodes)
        else:
            kept = replicas * self._snapshots(heaviest, lag=LATE_AT_PEERS)
        return self._own(heaviest), kept, max(self.logs(stage) for stage in self._stages)

    @property
    def of_node(self) -> int:
        """Bytes of host memory that all ranks of a node need: :attr:`of_rank` times the ranks of a node."""
        return sum(self.of_rank) * self._inputs.ranks_of_node

    def logs(self, stage: StagePlan) -> int:
        """Return the bytes of host memory for a rank's boundary log.

        The log holds all iterations since the oldest snapshot from which a recovery may begin.
        """
        reach = stage.schedule.retention(self._lag_allowed, to_disk=self._inputs.to_disk).logged_at_first
        return reach * stage.log_bytes

    def _snapshots(self, stage: StagePlan, *, lag: int | None = None) -> int:
        """Return the bytes of host memory for the snapshots that one rank keeps, as a mean over the ranks of its stage.

        Args:
            stage: plan of the rank's stage.
            lag: largest lag of peers, in iterations; None for the lag for which a live rank allocates memory.
        """
        slots = self._slots(stage, self._lag_allowed if lag is None else lag)
        return math.ceil(np.mean([most_held(kept, slots) for kept in self._kept(stage)]))

    def _own(self, stage: StagePlan) -> int:
        """Return the bytes of host memory for a rank's own snapshots."""
        inputs = self._inputs
        # Windows on disk are written from own snapshots.
        if inputs.keeps_own_copies or inputs.to_disk or inputs.members or not inputs.replicas:
            return self._snapshots(stage)
        in_flight = math.ceil(np.mean([most_held(kept[:, :1], IN_FLIGHT) for kept in stage.kept]))
        return min(self._snapshots(stage), in_flight)

    def _parity(self, stage: StagePlan) -> int:
        """Return the bytes of host memory that a rank needs to keep one parity sum of one parity group.

        A parity sum is as long as the longest snapshot of the group. The result includes buffers for the blocks of
        snapshots that the rank adds up at the same time.
        """
        longest = np.max(self._kept(stage), axis=0)
        tensor = max(
            tensor.elements * _MASTER_BYTES // operator.shards
            for operator in stage.shape.operators
            for tensor in operator.tensors
        )
        return most_held(longest, self._slots(stage, 0)) + AT_ONCE * (BLOCK + tensor)

    def _kept(self, stage: StagePlan) -> Sequence[Kept]:
        """Return the bytes that a rank keeps of each snapshot of a window, for each rank of a stage.

        A rank frees parts of a snapshot that later snapshots replace. With parity or windows on disk it frees nothing,
        because parity sums and files contain whole snapshots.
        """
        is_whole = self._inputs.members or self._inputs.to_disk
        return [kept[:, :1] for kept in stage.kept] if is_whole else stage.kept

    def _slots(self, stage: StagePlan, lag: int) -> int:
        return stage.schedule.retention(lag, to_disk=self._inputs.to_disk).slots_at_first
