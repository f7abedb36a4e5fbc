"""MoC-System (ASPLOS '25): everything but the experts, and K of the E experts of each layer, every few iterations.

After a failure all ranks go back to the newest checkpoint; experts that it leaves out come from the newest one before
it that has them. Updates in between are lost, so training goes on, but not with the bits of a failure-free run, unless
K = E. The tokens behind those updates are counted, and K is doubled while their share grows beyond its limit.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from moevement_core.operators import OperatorTable
from moevement_core.policy.partial_experts import LostTokens, TokenAccount, chosen, most_experts, turns
from moevement_core.policy.popularity import Ordering, Scores
from moevement_core.policy.recoverable import RecoverableRun
from moevement_core.policy.schedule import Contents, Saved, Schedule
from moevement_core.strategies.strategy import Measured, Proposal, Strategy

PLT_LIMIT = 0.0375
"""Share of lost tokens up to which no harm was found (section 3.1.2)."""
INTERVAL = 10
"""Iterations, by default."""


@dataclass(frozen=True, eq=False)
class PartialSchedule(Schedule):
    """Everything but the experts every ``interval`` iterations, and ``experts`` of each layer in turn."""

    interval: int
    experts: int

    @cached_property
    def _turns(self) -> dict[int, list[int]]:
        return turns(self.table)

    @cached_property
    def _most(self) -> int:
        return most_experts(self.table)

    @cached_property
    def checkpoints(self) -> int:
        """Until every expert is in one: ``ceil(E / K)``."""
        return max(1, math.ceil(self._most / self.experts))

    @cached_property
    def size(self) -> int:
        """Iterations until the same experts have their turn in the same checkpoint again."""
        layers = [len(its) // math.gcd(len(its), self.experts) for its in self._turns.values()]
        return self.interval * math.lcm(*layers) if layers else self.interval

    @property
    def snapshots(self) -> int:
        """Those of a run."""
        return self.checkpoints

    @property
    def reach(self) -> int:
        """All that a run has, and none beyond."""
        return self.checkpoints * self.interval

    @property
    def is_dense(self) -> bool:
        """Whether no expert is left out."""
        return self.experts >= self._most

    @property
    def reorders(self) -> bool:
        """Never."""
        return False

    @cached_property
    def id(self) -> str:
        """Of start, interval, K and operators."""
        digest = hashlib.sha256(repr((self.start, "partial", self.interval, self.experts)).encode())
        digest.update("\n".join(self.table.names).encode())
        return digest.hexdigest()[:16]

    def contents_of_slot(self, slot: int) -> Contents | None:
        """Everything but the experts whose turn it is not."""
        turn, rest = divmod(slot, self.interval)
        if rest:
            return None
        contents = np.where(self.table.is_expert, np.int8(Saved.OMITTED), np.int8(Saved.FULL))
        contents[chosen(self._turns, self.experts, turn)] = Saved.FULL
        return contents

    def last_of_run(self, first: int) -> int:
        """When every expert has had its turn."""
        return first + (self.checkpoints - 1) * self.interval

    def may_begin_at(self, iteration: int) -> bool:
        """With every snapshot."""
        return self.slot(iteration) % self.interval == 0

    def decided_at(self, iteration: int) -> int:
        """At every checkpoint: tokens are counted up to there."""
        return iteration - self.slot(iteration) % self.interval

    def slots_kept(self, lag: int, *, to_disk: bool = False) -> int:
        """A run more than at first: after a gap the next one is new as a whole."""
        return self.checkpoints + self.slots_at_first(lag, to_disk=to_disk)

    def slots_at_first(self, lag: int, *, to_disk: bool = False) -> int:
        """The persisted run, those that are taken before all ranks know of a newer one, and a run that is written."""
        return self.checkpoints * (1 + to_disk) + -(-(2 + lag) // self.interval)

    def iterations_logged(self, lag: int, *, to_disk: bool = False) -> int:
        """Back to the newest checkpoint that may be persisted, and the iteration under way."""
        return 2 * self.interval + lag + 1

    def replayed_after(self, run: tuple[int, int]) -> int:
        """From the last snapshot of the run on."""
        return run[1]

    def most_replayed(self, lag: int) -> int:
        """Back to the newest snapshot that peers have."""
        return lag + self.interval

    def expected_rollback(self, lag: float) -> float:
        """Half the interval, and the iteration in which a snapshot is copied."""
        return lag + self.interval / 2 + 1

    def digested_once_a_window(self, iteration: int) -> tuple[str, ...]:
        """None: after a recovery no state is what it was."""
        return ()

    def with_windows_of(self, other: Schedule) -> PartialSchedule:
        """As many experts as often."""
        assert isinstance(other, PartialSchedule)
        return replace(self, start=other.start, interval=other.interval, experts=other.experts)

    def starting_at(self, start: int) -> PartialSchedule:
        """The same from another iteration on."""
        return replace(self, start=start)


class MoC(Strategy):
    """Some of the experts in every checkpoint; all ranks go back to the newest version of each.

    Args:
        table: the operators of the stage.
        interval: iterations between checkpoints.
        experts: K, of each layer; None: as many as are copied and sent while an iteration runs.
        limit: the share of lost tokens up to which K stays as it is; see :meth:`wanted_sizes`.
    """

    name = "moc"
    rolls_back_all = True
    loses_updates = True
    is_tuned = True
    counts = Ordering.HARD_COUNT

    def __init__(
        self, table: OperatorTable, interval: int = INTERVAL, experts: int | None = None, limit: float = PLT_LIMIT
    ) -> None:
        super().__init__(table)
        self.interval, self.limit = interval, limit
        self.most = most_experts(table)
        self.settled = False
        self.account = TokenAccount.empty(len(table))
        self._asked = None if experts is None else min(experts, max(1, self.most))
        self._least = self._asked or 1
        """Below which K does not go again: doubled when too many tokens were lost."""

    def first(self, start: int, most: int) -> PartialSchedule:
        """The state that the run begins from is saved whole, in as many snapshots as a run has."""
        schedule = PartialSchedule(self.table, self.interval, self._asked or max(1, self.most))
        return schedule.starting_at(start - (schedule.checkpoints - 1) * self.interval)

    def observe(self, counts: Scores) -> None:
        """Tokens are counted to the last one."""
        self.account = self.account.with_routed(counts)

    def wanted_sizes(self, now: Schedule, measured: Measured) -> tuple[int, ...]:
        """K: what was asked for, or what one iteration hides; at least what lost tokens ask for."""
        return (max(self._least, self._asked or self._hidden(measured)),)

    def _hidden(self, measured: Measured) -> int:
        """The most experts of each layer that are copied, and sent to every peer, while an iteration runs."""
        full = self.table.full.sum(axis=0)
        experts = max(1, self.most)
        rest, all_experts = int(full[~self.table.is_expert].sum()), int(full[self.table.is_expert].sum())
        ranks = len(self.table.full)
        for tried in range(experts, 1, -1):
            its = (rest + all_experts * tried / experts) / ranks
            seconds = its / measured.d2h_bytes_per_s + its * measured.replicas / measured.replication_bytes_per_s
            if seconds <= measured.iteration_s:
                return tried
        return 1

    def propose(self, now: Schedule, sizes: tuple[int, ...] | None) -> Proposal:
        """The K of all ranks, if it is another one."""
        assert isinstance(now, PartialSchedule)
        if sizes is None or min(sizes[0], max(1, self.most)) == now.experts:
            return Proposal([now], is_change=False)
        wanted = PartialSchedule(self.table, self.interval, min(sizes[0], max(1, self.most)))
        return Proposal([wanted, now], is_change=True, reorders=True)

    def caution(self) -> str | None:
        """Where experts are left out."""
        if self._asked is not None and self._asked >= self.most:
            return None
        saved = "some" if self._asked is None else f"{self._asked}"
        return (
            f"a snapshot holds {saved} of {self.most} experts of each layer: a failure loses updates of the others, "
            "and what is trained after it is not what would have been trained without it"
        )

    def restored(self, run: RecoverableRun, learned: Mapping[int, Any]) -> LostTokens:
        """Go on with the account of the checkpoint, and write off what versions before it had not got."""
        account = _account(learned[run.last])
        versions = np.array([int(_account(learned[int(at)]).routed[i]) for i, at in enumerate(run.full_at)])
        self.account = account.back_to(np.where(self.table.is_expert, versions, account.routed))
        lost = self.account.lost_since(account, self.table)
        while self._least < self.most and lost.proportion > self._share_of_limit():
            self._least = min(2 * self._least, self.most)
        return lost

    def _share_of_limit(self) -> float:
        """What may be lost with K as it is: with each doubling more of the limit, and all of it before K = E.

        MoC-System doubles K where the share lost surpasses "its limit" and does not say which part that is (section
        5.3); with equal parts the limit is kept as long as no failure costs more than one.
        """
        steps = max(1, math.ceil(math.log2(max(2, self.most) / (self._asked or 1))))
        done = round(math.log2(self._least / (self._asked or 1)))
        return self.limit * min(1.0, (done + 1) / steps)

    def learned(self) -> Any:
        """Tokens, and the least K."""
        return {"routed": self.account.routed, "lost": self.account.lost, "least": self._least}

    def adopt(self, learned: Any) -> None:
        """Likewise."""
        self.account, self._least = _account(learned), learned["least"]


def _account(learned: Any) -> TokenAccount:
    return TokenAccount(learned["routed"], learned["lost"])
