"""MoC-System (ASPLOS '25): a checkpoint holds the non-expert state, and K of the E experts of each layer.

After a failure all ranks go back to the newest checkpoint. Each expert that this checkpoint leaves out is restored from
the newest earlier checkpoint that has it, and its later updates are lost. The result of the job then differs from that
of a run without failures, unless every checkpoint holds every expert (K = E). The strategy counts the tokens whose
updates are lost. It doubles K while the share of these tokens is above a limit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from moevement_core.errors import ConfigError
from moevement_core.operators import OperatorTable
from moevement_core.policy.dynamic_k import PLT_LIMIT, DynamicK
from moevement_core.policy.partial_experts import (
    LostTokens,
    TokenAccount,
    chosen,
    kept_at,
    most_experts,
    persisted,
    turns,
)
from moevement_core.policy.popularity import Ordering, Scores
from moevement_core.policy.recoverable import RecoverableRun
from moevement_core.policy.schedule import Contents, Retention, Saved, Schedule, SnapshotParts, schedule_id
from moevement_core.strategies.capabilities import LosesUpdates
from moevement_core.strategies.config import StrategyConfig
from moevement_core.strategies.strategy import Measured, Proposal, StageOperators, Strategy
from moevement_core.strategies.versions import MOST_REACH, VersionSchedule
from moevement_core.util.flags import AUTO

INTERVAL = 10
"""Default number of iterations between checkpoints."""
STEPS = 8
"""Divisor of the number of experts. Measurements change the number of saved experts only by this quotient or more,
because measurements vary."""


@dataclass(frozen=True, eq=False)
class PartialSchedule(VersionSchedule):
    """Schedule of a snapshot every ``interval`` iterations: non-expert state, and experts of each layer in turn."""

    experts: int
    """Number of experts of each layer in a snapshot, K."""
    most: int
    """Number of experts in the largest layer of the job, E.

    All stages use the same E, so their runs have the same number of snapshots.
    """
    persisted: int | None = None
    """Number of experts of each layer that a snapshot writes to disk; None for all experts in the snapshot."""
    turn: int = 0
    """Number of this schedule's first snapshot, counted over the job. It decides which experts the snapshot holds."""
    history: int = 0
    """Number that changes with each recovery that lost updates.

    After such a recovery the job executes some iterations again, with other results. The snapshots captured in their
    first execution must not be used any more. The new number gives the schedule another :attr:`id`, which tells the new
    snapshots from the old ones.
    """

    @cached_property
    def _turns(self) -> dict[int, list[int]]:
        return turns(self.table)

    @cached_property
    def size(self) -> int:
        """Iterations until the choice of experts repeats, both for snapshots and for writes to disk."""
        layers = {self.most, *map(len, self._turns.values())}
        return (
            self.interval * math.lcm(*(experts // math.gcd(experts, self.experts) for experts in layers)) * self._rounds
        )

    @property
    def _rounds(self) -> int:
        """Number r: of every r snapshots that hold a certain expert, one writes this expert to disk."""
        return 1 if self.persisted is None else math.ceil(self.experts / min(self.persisted, self.experts))

    @property
    def snapshots(self) -> int:
        """Number of consecutive snapshots that together hold every expert, a recoverable run."""
        return math.ceil(self.most / self.experts)

    @property
    def is_dense(self) -> bool:
        """True if no expert is left out."""
        return self.experts >= self.most

    @cached_property
    def id(self) -> str:
        """Digest of all fields and of the operator names, hexadecimal."""
        return schedule_id(
            self.table.names, self.start, "partial", self.interval, self.experts, self.most, self.persisted, self.turn,
            self.history,
        )  # fmt: skip

    def contents_of_slot(self, slot: int) -> Contents | None:
        """Return full state of non-expert operators and of the slot's experts; None if the slot has no snapshot."""
        turn, rest = divmod(slot, self.interval)
        if rest:
            return None
        return self._with(chosen(self._turns, self.experts, self.turn + turn))

    def parts_of_slot(self, slot: int) -> SnapshotParts:
        """Return the part of the slot's snapshot that is written to disk; peers receive the whole snapshot.

        Of the experts in the snapshot, the part on disk has those that were written longest ago.
        """
        turn, rest = divmod(slot, self.interval)
        return (
            SnapshotParts()
            if rest or self.persisted is None
            else SnapshotParts(on_disk=self._with(self._on_disk[turn]))
        )

    @cached_property
    def _on_disk(self) -> list[list[int]]:
        assert self.persisted is not None
        return persisted(
            order=self._turns,
            experts=self.experts,
            first=self.turn,
            turns_=self.size // self.interval,
            count=self.persisted,
        )

    def _with(self, experts: Sequence[int]) -> Contents:
        contents = np.where(self.table.is_expert, np.int8(Saved.OMITTED), np.int8(Saved.FULL))
        contents[list(experts)] = Saved.FULL
        return contents

    def retention(self, lag: int, *, to_disk: bool = False) -> Retention:
        """Return for how many iterations a rank keeps snapshots and logs.

        Snapshots on disk may lack experts of those in memory (section 5.1). Then a rank that writes to disk keeps a run
        of its own snapshots in memory, because the newest window on disk lacks some of their experts.
        """
        lacks_experts = to_disk and self.persisted is not None and self.persisted < self.experts
        return super().retention(lag, to_disk=to_disk)._replace(for_disk=self.snapshots if lacks_experts else 0)

    def after(self, iteration: int, history: int) -> PartialSchedule:
        """Return the schedule for a job that went back to ``SS_iteration``; it begins with the next experts in turn."""
        turn = self.turn + self.slot(iteration) // self.interval + 1
        return replace(self, start=iteration + self.interval, turn=turn, history=history)


class MoC(Strategy, LosesUpdates):
    """Strategy that saves some experts in every checkpoint. A failure sets each expert back to its newest saved state.

    Args:
        table: the operators of the stage.
        interval: iterations between checkpoints.
        experts: first K, number of experts of each layer in a checkpoint; None for an eighth of the experts. K doubles
            when too many tokens are lost.
        most: E, experts in the largest layer of the job; None to use the largest layer of this stage.
        persisted: first number of experts of each layer that a checkpoint writes to disk; None to write all experts in
            the checkpoint. This number doubles when K doubles, because a lost rank may have to read experts from disk.
        is_measured: True if K is as large as copies from the device allow within an iteration (K_snapshot, section
            5.3), even if fewer experts would do for the lost tokens.
        limit: share of lost tokens above which K grows; see :mod:`moevement_core.policy.dynamic_k`.

    Raises:
        ConfigError: too many iterations pass until every expert has been saved.
    """

    name = "moc"
    sizes_are_iterations = False
    rolls_back_all = True
    is_tuned = True
    counts = Ordering.HARD_COUNT
    flags = frozenset({"dense_interval", "experts", "selection", "persisted", "plt_limit"})
    interval_by_default = INTERVAL

    @classmethod
    def of(cls, config: StrategyConfig, stage: StageOperators) -> MoC:
        """Return the strategy of a stage; see :meth:`Strategy.of`."""
        return cls(
            stage.table, config.interval or INTERVAL, experts=config.given_experts, limit=config.lost_limit,
            most=stage.most_experts, persisted=config.persisted, is_measured=config.experts == AUTO,
        )  # fmt: skip

    def __init__(
        self,
        table: OperatorTable,
        interval: int = INTERVAL,
        experts: int | None = None,
        limit: float = PLT_LIMIT,
        most: int | None = None,
        persisted: int | None = None,
        *,
        is_measured: bool = False,
    ) -> None:
        super().__init__(table)
        self.interval, self._is_measured = interval, is_measured
        self.most = most_experts(table) if most is None else most
        self.settled = False
        self.account = TokenAccount.empty(len(table))
        in_memory = DynamicK.of(experts, self.most, limit)
        on_disk = None if persisted is None else DynamicK.of(min(persisted, in_memory.first), self.most, limit)
        self._in_memory = in_memory.first
        """Number of experts of each layer in the first snapshots."""
        self._persists = on_disk is not None
        self._dynamic = on_disk or in_memory
        self.experts = self._dynamic.first
        """Number of experts of each layer that a checkpoint has on disk if ``persisted`` is given, else in memory.

        The number doubles when too many tokens are lost.
        """
        if (reach := math.ceil(self.most / self._in_memory) * interval) > MOST_REACH:
            raise ConfigError(
                f"--moevement-snapshot-experts {self._in_memory} of {self.most} every {interval} iterations saves each "
                f"expert once in {reach} iterations; needs {MOST_REACH} or less, so save more experts or more often"
            )

    def first(self, start: int, most: int) -> PartialSchedule:
        """Return the schedule whose first snapshots together hold the whole state at the beginning of the job."""
        in_memory, on_disk = self._saved(self._dynamic.first)
        schedule = PartialSchedule(
            table=self.table, interval=self.interval, experts=in_memory, most=self.most, persisted=on_disk
        )
        return replace(schedule, start=start - (schedule.snapshots - 1) * self.interval)

    def _saved(self, experts: int) -> tuple[int, int | None]:
        """Return how many experts of each layer a snapshot holds, and how many of them are written to disk.

        The second number is None if all experts of a snapshot are written to disk.

        Args:
            experts: value of :attr:`experts` for which the numbers hold.
        """
        in_memory = min(self.most, self._in_memory * experts // self._dynamic.first)
        return in_memory, experts if self._persists else None

    def observe(self, counts: Scores) -> None:
        """Add routed tokens to the account of each expert."""
        self.account = self.account.with_routed(counts)

    def wanted_sizes(self, now: Schedule, measured: Measured) -> tuple[int, ...]:
        """Return :attr:`experts`; if measurements decide too, also how many experts of a layer this rank cannot copy.

        A copy from the device must end within one iteration, because the next update changes the state (MoC-System,
        section 5.3). The method returns the number of experts that cannot be copied, not of those that can, because
        ranks agree on the largest value, and the slowest rank must decide.
        """
        if not self._is_measured:
            return (self.experts,)
        budget, carried = measured.copies.d2h_bytes, self.most
        is_expert = self.table.is_expert
        for row in self.table.full:
            if experts := int(row[is_expert].sum()):
                left = max(0.0, budget - int(row[~is_expert].sum()))
                carried = min(carried, math.floor(self.most * left / experts))
        return self.experts, self.most - carried

    def propose(self, now: Schedule, sizes: tuple[int, ...] | None) -> Proposal:
        """Propose the number of saved experts that the stage with the most lost tokens needs.

        If measurements decide too, and ranks can copy more experts than this number, propose all that they can copy.
        """
        assert isinstance(now, PartialSchedule)
        if sizes is None:
            return Proposal([now], is_change=False)
        in_memory, on_disk = self._saved(sizes[0])
        if self._is_measured:
            in_memory = max(in_memory, self._carried(now.experts, sizes[1]))
        is_change = (in_memory, on_disk) != (now.experts, now.persisted)
        return Proposal([replace(now, experts=in_memory, persisted=on_disk), now], is_change, reorders=is_change)

    def _carried(self, now: int, left_out: int) -> int:
        """Return how many experts of each layer ranks can copy: all but ``left_out``.

        If this number differs little from ``now``, the present number of saved experts, the result is ``now``.
        """
        carried = self.most - left_out
        return now if abs(carried - now) * STEPS < self.most and carried < self.most else carried

    def caution(self) -> str | None:
        """Return a warning if checkpoints leave experts out."""
        in_memory, _ = self._saved(self.experts)
        return caution_of(in_memory, self.most)

    def restored(self, run: RecoverableRun, learned: Mapping[int, Any], tokens_of_run: int | None = None) -> LostTokens:
        """Restore the checkpoint's token account, and return the tokens whose updates the restored experts lack.

        Later checkpoints hold more experts if too many tokens are lost.
        """
        account = TokenAccount.of(learned[run.last])
        self.experts = max(self.experts, learned[run.last]["experts"])
        versions = kept_at(run.version_at, learned)
        self.account = account.rolled_back_to(np.where(self.table.is_expert, versions, account.kept))
        lost = self.account.lost_since(account, self.table, tokens_of_run)
        self.experts = self._dynamic.after(self.experts, lost.proportion)
        return lost

    def schedules_after_rollback(
        self, schedules: Sequence[Schedule], iteration: int, history: int
    ) -> Sequence[Schedule]:
        """Return the schedules that began up to ``iteration``, and a new one for the snapshots after it.

        The new schedule goes on with the experts whose turn is next, and has ``history`` as its number.
        """
        # A state from disk may be older than all remembered schedules. Then any schedule will do for the snapshots on
        # disk, because snapshots record what they hold.
        before = [schedule for schedule in schedules if schedule.start <= iteration]
        before = before or [replace(schedules[0], start=iteration - schedules[0].cadence.reach)]
        last = before[-1]
        assert isinstance(last, PartialSchedule)
        return [*before, last.after(iteration, history)]

    def learned(self) -> Any:
        """Return token counts and :attr:`experts` as plain data."""
        return {"routed": self.account.routed, "lost": self.account.lost, "experts": self.experts}

    def adopt(self, learned: Any) -> None:
        """Take over the token counts and the number of saved experts of another rank."""
        self.account, self.experts = TokenAccount.of(learned), learned["experts"]


def caution_of(experts: int, most: int) -> str | None:
    """Return a warning that a snapshot holds only ``experts`` of ``most`` experts of a layer; None if it holds all."""
    if experts >= most:
        return None
    return (
        f"a snapshot holds {experts} of {most} experts of each layer; a failure loses updates of the others, so the "
        "result of training then differs from that of a run without failures"
    )
