"""Tokens that MoC-System loses if it saves to host memory and to disk (sections 5.1, 6.3.1 and 6.3.3 of its paper).

The code of a live job decides which experts a checkpoint saves, counts the lost tokens, and saves more experts when
failures lose too many tokens. A failure destroys the host memory of a node. If that node held a part of an expert, the
job restores the expert from its newest version on disk. It restores all other experts from their newest versions in
memory. Iterations after the newest checkpoint lose no tokens, because the job executes them again. A live job also
writes all experts to disk after a failure; this simulation does not.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from moevement_core.operators import OperatorTable
from moevement_core.policy.dynamic_k import DynamicK
from moevement_core.policy.partial_experts import LostTokens, TokenAccount, Tokens, most_experts
from moevement_core.policy.schedule import Saved
from moevement_core.strategies.moc import PartialSchedule


@dataclass(frozen=True)
class NodeFault:
    """Failure of nodes right after a checkpoint."""

    checkpoint: int
    """Number of the checkpoint, counted from 0."""
    nodes: frozenset[int]
    """Nodes whose memory is lost."""


@dataclass(frozen=True)
class SimulatedRestore:
    """Result of one recovery."""

    lost: LostTokens
    experts: int
    """Number of experts of each layer in a snapshot after the recovery, K_snapshot."""


@dataclass(frozen=True, eq=False)
class TwoLevels:
    """Training that saves K_snapshot experts of each layer to memory in turn, and writes K_persist of them to disk."""

    table: OperatorTable
    """Operators of a stage; row r of the table has their bytes on rank r of the stage."""
    nodes: Sequence[int]
    """Node of each rank, in the order of the rows of ``table``."""
    tokens: Tokens
    """Tokens routed to each operator between two checkpoints, int64 ``[operators]``."""
    checkpoints: int
    """Number of checkpoints in the whole training."""
    experts: int
    """K_snapshot at the beginning: experts of each layer in a snapshot. It grows when failures lose too many tokens."""
    persisted: int | None = None
    """K_persist: how many experts of each layer a snapshot writes to disk; None for all that it holds."""
    limit: float = 1.0
    """Share of all tokens that may be lost before checkpoints save every expert; 1 keeps K_snapshot constant."""

    def recoveries(self, faults: Sequence[NodeFault]) -> list[SimulatedRestore]:
        """Simulate the training, and return the result of each recovery, in the order of the failures' checkpoints.

        Before the first checkpoint, memory and disk hold the initial state of all operators.

        Args:
            faults: failures, in any order.
        """
        policy = DynamicK.of(self.experts, most_experts(self.table), self.limit)
        schedule = PartialSchedule(
            self.table, interval=1, experts=policy.first, most=policy.most, persisted=self.persisted
        )
        account = TokenAccount.empty(len(self.table))
        memory, disk = account.kept, account.kept
        of_checkpoint = defaultdict(list)
        for fault in faults:
            of_checkpoint[fault.checkpoint].append(fault)
        restored = list[SimulatedRestore]()
        for number in range(self.checkpoints):
            account = account.with_routed(self.tokens.astype(np.float64))
            memory = np.where(_saved(schedule, number), account.kept, memory)
            disk = np.where(_written(schedule, number), account.kept, disk)
            for fault in of_checkpoint[number]:
                memory = np.where(self._has_part_on(fault.nodes), disk, memory)
                before, account = account, account.rolled_back_to(memory)
                lost = account.lost_since(before, self.table, self._tokens_of_run)
                experts = policy.after(schedule.experts, lost.proportion)
                schedule = replace(schedule.after(number, len(restored) + 1), experts=experts)
                restored.append(SimulatedRestore(lost, experts))
        return restored

    def _has_part_on(self, nodes: frozenset[int]) -> npt.NDArray[np.bool_]:
        """Return a mask of the operators that have a part of their state on one of ``nodes``, bool ``[operators]``."""
        rows = [rank for rank, node in enumerate(self.nodes) if node in nodes]
        return (self.table.full[rows] > 0).any(axis=0)

    @cached_property
    def _tokens_of_run(self) -> int:
        layers = self.table.layers
        of_layer = (self.tokens[self.table.is_expert & (layers == layer)].sum() for layer in np.unique(layers))
        return int(max(of_layer)) * self.checkpoints


def _saved(schedule: PartialSchedule, number: int) -> npt.NDArray[np.bool_]:
    contents = schedule.contents_of_slot(schedule.slot(number))
    assert contents is not None
    return contents == Saved.FULL


def _written(schedule: PartialSchedule, number: int) -> npt.NDArray[np.bool_]:
    contents = schedule.parts_of_slot(schedule.slot(number)).on_disk
    return _saved(schedule, number) if contents is None else contents == Saved.FULL
