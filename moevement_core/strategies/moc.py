"""MoC-System (ASPLOS '25): everything but the experts, and K of the E experts of each layer, every few iterations.

After a failure all ranks go back to the newest checkpoint; experts that it leaves out come from the newest one before
it that has them. Updates in between are lost, so training goes on, but not with the bits of a failure-free run, unless
K = E. The tokens behind those updates are counted, and K is doubled while their share grows beyond its limit.
"""

from __future__ import annotations

import hashlib
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
from moevement_core.policy.schedule import Contents, Saved, Schedule
from moevement_core.strategies.strategy import Measured, Proposal, Strategy
from moevement_core.strategies.versions import MOST_REACH, VersionSchedule

INTERVAL = 10
"""Iterations, by default."""


@dataclass(frozen=True, eq=False)
class PartialSchedule(VersionSchedule):
    """Everything but the experts every ``interval`` iterations, and ``experts`` of each layer in turn."""

    experts: int
    """K."""
    most: int
    """E, of the layer of the job that has the most: all stages have as many snapshots in a run."""
    persisted: int | None = None
    """K of what is written to disk; None: all that a snapshot holds."""
    turn: int = 0
    """Whose turn is the first."""
    history: int = 0
    """Another one after each recovery that lost updates: what was saved later than where the job went back to is of no
    use any more, and has another :attr:`id`."""

    @cached_property
    def _turns(self) -> dict[int, list[int]]:
        return turns(self.table)

    @cached_property
    def checkpoints(self) -> int:
        """Until every expert is in one: ``ceil(E / K)``."""
        return math.ceil(self.most / self.experts)

    @cached_property
    def size(self) -> int:
        """Iterations until the same experts have their turn in the same checkpoint again."""
        layers = {self.most, *map(len, self._turns.values())}
        return (
            self.interval * math.lcm(*(experts // math.gcd(experts, self.experts) for experts in layers)) * self._rounds
        )

    @property
    def _rounds(self) -> int:
        """Of how many of its turns an expert is written to disk once."""
        return 1 if self.persisted is None else math.ceil(self.experts / min(self.persisted, self.experts))

    @property
    def snapshots(self) -> int:
        """Those of a run."""
        return self.checkpoints

    @property
    def is_dense(self) -> bool:
        """Whether no expert is left out."""
        return self.experts >= self.most

    @property
    def reorders(self) -> bool:
        """Never."""
        return False

    @cached_property
    def id(self) -> str:
        """Of everything in it."""
        its = (
            self.start, "partial", self.interval, self.experts, self.most, self.persisted, self.turn, self.history
        )  # fmt: skip
        digest = hashlib.sha256(repr(its).encode())
        digest.update("\n".join(self.table.names).encode())
        return digest.hexdigest()[:16]

    def contents_of_slot(self, slot: int) -> Contents | None:
        """Everything but the experts whose turn it is not."""
        turn, rest = divmod(slot, self.interval)
        if rest:
            return None
        return self._with(chosen(self._turns, self.experts, self.turn + turn))

    def on_disk_of_slot(self, slot: int) -> Contents | None:
        """Of the experts whose turn it is, those that have waited for the most turns."""
        turn, rest = divmod(slot, self.interval)
        return None if rest or self.persisted is None else self._with(self._on_disk[turn])

    @cached_property
    def _on_disk(self) -> list[list[int]]:
        assert self.persisted is not None
        return persisted(self._turns, self.experts, self.turn, self.size // self.interval, self.persisted)

    def _with(self, experts: Sequence[int]) -> Contents:
        contents = np.where(self.table.is_expert, np.int8(Saved.OMITTED), np.int8(Saved.FULL))
        contents[list(experts)] = Saved.FULL
        return contents

    def with_windows_of(self, other: Schedule) -> PartialSchedule:
        """As many experts as often."""
        assert isinstance(other, PartialSchedule)
        return replace(other, table=self.table)

    def after(self, iteration: int, history: int) -> PartialSchedule:
        """What comes after ``SS_iteration`` where the job has gone back to it; turns go on."""
        turn = self.turn + self.slot(iteration) // self.interval + 1
        return replace(self, start=iteration + self.interval, turn=turn, history=history)

    def starting_at(self, start: int) -> PartialSchedule:
        """The same from another iteration on."""
        return replace(self, start=start)


class MoC(Strategy):
    """Some of the experts in every checkpoint; all ranks go back to the newest version of each.

    Args:
        table: the operators of the stage.
        interval: iterations between checkpoints.
        experts: K, of each layer; None: an eighth.
        most: E, of the layer of the job that has the most; None: of this stage.
        persisted: how many of these are written to disk; None: all.
        limit: the share of lost tokens up to which K stays as it is; see :mod:`moevement_core.policy.dynamic_k`.

    Raises:
        ConfigError: it takes too long until every expert has had its turn.
    """

    name = "moc"
    rolls_back_all = True
    loses_updates = True
    is_tuned = True
    counts = Ordering.HARD_COUNT

    def __init__(
        self,
        table: OperatorTable,
        interval: int = INTERVAL,
        experts: int | None = None,
        limit: float = PLT_LIMIT,
        most: int | None = None,
        persisted: int | None = None,
    ) -> None:
        super().__init__(table)
        self.interval, self.persisted = interval, persisted
        self.most = most_experts(table) if most is None else most
        self.settled = False
        self.account = TokenAccount.empty(len(table))
        self._dynamic = DynamicK.of(experts, self.most, limit)
        self.experts = self._dynamic.first
        """K: doubled when too many tokens were lost."""
        if (reach := math.ceil(self.most / self.experts) * interval) > MOST_REACH:
            raise ConfigError(
                f"--moevement-snapshot-experts {self.experts} of {self.most} every {interval} iterations: every expert "
                f"is saved once in {reach}; needs at most {MOST_REACH}, so save more experts or more often"
            )

    def first(self, start: int, most: int) -> PartialSchedule:
        """The state that the run begins from is saved whole, in as many snapshots as a run has."""
        schedule = PartialSchedule(self.table, self.interval, self.experts, self.most, self.persisted)
        return schedule.starting_at(start - (schedule.checkpoints - 1) * self.interval)

    def observe(self, counts: Scores) -> None:
        """Tokens are counted to the last one."""
        self.account = self.account.with_routed(counts)

    def wanted_sizes(self, now: Schedule, measured: Measured) -> tuple[int, ...]:
        """K, of the stage that has lost the most."""
        return (self.experts,)

    def propose(self, now: Schedule, sizes: tuple[int, ...] | None) -> Proposal:
        """The K of all stages, if it is another one."""
        assert isinstance(now, PartialSchedule)
        if sizes is None:
            return Proposal([now], is_change=False)
        is_change = sizes[0] != now.experts
        return Proposal([replace(now, experts=sizes[0]), now], is_change, reorders=is_change)

    def caution(self) -> str | None:
        """Where experts are left out."""
        return caution_of(self.experts, self.most)

    def restored(self, run: RecoverableRun, learned: Mapping[int, Any]) -> LostTokens:
        """Go on with the account of the checkpoint, and write off what versions before it had not got."""
        account = _account(learned[run.last])
        self.experts = max(self.experts, learned[run.last]["experts"])
        versions = kept_at(run.version_at, learned)
        self.account = account.back_to(np.where(self.table.is_expert, versions, account.kept))
        lost = self.account.lost_since(account, self.table)
        self.experts = self._dynamic.after(self.experts, lost.proportion)
        return lost

    def going_on(self, schedules: Sequence[Schedule], iteration: int, history: int) -> Sequence[Schedule]:
        """What was saved later is of a history that is no more; the same turns, and another name."""
        # Those of a state that comes from disk may be forgotten; what is there of snapshots says what they hold.
        before = [one for one in schedules if one.start <= iteration]
        before = before or [schedules[0].starting_at(iteration - schedules[0].reach)]
        last = before[-1]
        assert isinstance(last, PartialSchedule)
        return [*before, last.after(iteration, history)]

    def learned(self) -> Any:
        """Tokens, and K."""
        return {"routed": self.account.routed, "lost": self.account.lost, "experts": self.experts}

    def adopt(self, learned: Any) -> None:
        """Likewise."""
        self.account, self.experts = _account(learned), learned["experts"]


def caution_of(experts: int, most: int) -> str | None:
    """What who runs the job should know where K of E experts are saved; None where all are."""
    if experts >= most:
        return None
    return (
        f"a snapshot holds {experts} of {most} experts of each layer: a failure loses updates of the others, and what "
        "is trained after it is not what would have been trained without it"
    )


def _account(learned: Any) -> TokenAccount:
    return TokenAccount(learned["routed"].copy(), learned["lost"].copy())
