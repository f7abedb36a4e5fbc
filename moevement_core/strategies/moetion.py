"""MoEtion: everything but the experts in every snapshot, and the S of E experts with the most tokens at risk.

An expert that the snapshot before holds, too, is there by its gradients alone: whoever restores it makes its updates
again (sections 4.3 and 5.2, Algorithms 1 and 3). After a failure all ranks go back to the newest snapshot, and each
expert to its newest version; updates in between are lost, and the tokens behind them counted, unless S = E.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from moevement_core.errors import ConfigError
from moevement_core.operators import OperatorTable
from moevement_core.policy.partial_experts import LostTokens, TokenAccount, chosen, most_experts, routed_at, turns
from moevement_core.policy.popularity import Ordering, Scores
from moevement_core.policy.recoverable import RecoverableRun
from moevement_core.policy.runs import restore_points
from moevement_core.policy.schedule import LAG_ALLOWANCE, Contents, Saved, Schedule
from moevement_core.policy.tokens_at_risk import most_at_risk
from moevement_core.snapshot.agreement import HORIZON
from moevement_core.strategies.strategy import Measured, Proposal, Strategy
from moevement_core.strategies.versions import VersionSchedule

FIRST_SHARE = 4
"""Of the experts a quarter is saved until bandwidths are measured: S is 25% to 40% of E in section 4.1."""
LEAST_SPAN = 4
"""Snapshots, at least, until an expert has its full state saved again; in between gradients do."""
MOST_REACH = HORIZON // 2 - 2 * LAG_ALLOWANCE
"""Iterations in which every expert's full state has to be saved; see :mod:`moevement_core.strategies.moc`."""


@dataclass(frozen=True, eq=False)
class SelectedSchedule(VersionSchedule):
    """What the next snapshot holds; or, where a job starts, the next ones in turn."""

    span: int
    """Any so many snapshots in a row hold the full state of every operator."""
    rounds: tuple[Contents, ...]
    """One after the other, and then from the first one again."""
    history: int = 0
    """Another one after each recovery that lost updates, as in :mod:`moevement_core.strategies.moc`."""

    @property
    def size(self) -> int:
        """Until the first round comes again."""
        return self.interval * len(self.rounds)

    @property
    def snapshots(self) -> int:
        """Those of a run."""
        return self.span

    @property
    def is_dense(self) -> bool:
        """Whether no snapshot needs another."""
        return all((contents == Saved.FULL).all() for contents in self.rounds)

    @cached_property
    def id(self) -> str:
        """Of everything in it."""
        digest = hashlib.sha256(repr((self.start, "selected", self.interval, self.span, self.history)).encode())
        for contents in self.rounds:
            digest.update(contents.tobytes())
        digest.update("\n".join(self.table.names).encode())
        return digest.hexdigest()[:16]

    def contents_of_slot(self, slot: int) -> Contents | None:
        """Those of its round."""
        turn, rest = divmod(slot, self.interval)
        return None if rest else self.rounds[turn]

    def next_boundary(self, iteration: int) -> int:
        """Every snapshot may be of another selection."""
        return max(self.start, iteration + (self.start - iteration) % self.interval)

    def with_windows_of(self, other: Schedule) -> SelectedSchedule:
        """As often. What was chosen nobody of this stage knows any more; its snapshots say it."""
        assert isinstance(other, SelectedSchedule)
        return replace(other, table=self.table, rounds=self.rounds)

    def starting_at(self, start: int) -> SelectedSchedule:
        """The same from another iteration on."""
        return replace(self, start=start)


@dataclass(frozen=True, slots=True)
class _Memory:
    """What the ranks of a stage know, all alike; travels with every snapshot."""

    account: TokenAccount
    number: int
    """Of the newest snapshot; 0 is that of the state that the job began from."""
    full_at: np.ndarray
    """The number of the snapshot that has the newest full state of each operator, int64 ``[operators]``."""
    held: np.ndarray
    """Which operators the newest snapshot holds, bool ``[operators]``."""
    saved: np.ndarray
    """What each expert had got when it was last saved, int64 ``[operators]``."""
    owed: np.ndarray
    """Tokens that recoveries cost each expert and that more room has not let in yet, int64 ``[operators]``."""


class MoEtion(Strategy):
    """Some of the experts in every snapshot; all ranks go back to the newest version of each.

    Args:
        table: the operators of the stage.
        interval: iterations between snapshots. Gradients take the place of state where it is 1, as in the paper.
        experts: S, of each layer on average; None: as many as both budgets carry.
        most: E, of the layer of the job that has the most; None: of this stage.

    Raises:
        ConfigError: it takes too long until every expert has been saved.
    """

    name = "moetion"
    rolls_back_all = True
    loses_updates = True
    counts = Ordering.HARD_COUNT
    sizes_are_iterations = False

    def __init__(
        self, table: OperatorTable, interval: int = 1, experts: int | None = None, most: int | None = None
    ) -> None:
        super().__init__(table)
        self.interval = interval
        self.most = most_experts(table) if most is None else most
        self.settled = self._is_given = experts is not None
        self.experts = min(experts or math.ceil(self.most / FIRST_SHARE), self.most)
        """S."""
        if (reach := self.span * interval) > MOST_REACH:
            raise ConfigError(
                f"--moevement-snapshot-experts {self.experts} of {self.most} every {interval} iterations: every expert "
                f"is saved once in {reach}; needs at most {MOST_REACH}, so save more experts or more often"
            )
        self._layers = len(set(table.layers[table.is_expert].tolist()))
        self._memory = self._at_first()
        self._begins = 0
        """The first snapshot of the job."""

    @property
    def span(self) -> int:
        """Snapshots that hold every expert's full state: no expert waits for longer, however few tokens it gets."""
        return max(LEAST_SPAN, 2 * math.ceil(self.most / self.experts))

    def first(self, start: int, most: int) -> SelectedSchedule:
        """The state that the run begins from is saved whole, experts in turn."""
        self._begins = start - (self.span - 1) * self.interval
        return SelectedSchedule(self.table, self.interval, self.span, self._first_rounds(), start=self._begins)

    def _first_rounds(self) -> tuple[Contents, ...]:
        order = turns(self.table)
        return tuple(
            self._contents(full=_at(self.table, chosen(order, self.experts, turn)))
            for turn in range(math.ceil(self.most / self.experts))
        )

    def _at_first(self) -> _Memory:
        rounds, operators = self._first_rounds(), len(self.table)
        full_at = np.zeros(operators, dtype=np.int64)
        for number in range(1 - self.span, 1):
            full_at[rounds[(number + self.span - 1) % len(rounds)] == Saved.FULL] = number
        zeros = np.zeros(operators, dtype=np.int64)
        return _Memory(TokenAccount.empty(operators), 0, full_at, full_at == 0, zeros, zeros)

    def _contents(self, full: np.ndarray, gradients: np.ndarray | None = None) -> Contents:
        contents = np.where(self.table.is_expert & ~full, np.int8(Saved.OMITTED), np.int8(Saved.FULL))
        if gradients is not None:
            contents[gradients] = Saved.GRADIENT
        return contents

    # What can be restored

    def restore_points(self, held: Mapping[int, Contents], until: int | None = None) -> Iterator[RecoverableRun]:
        """Runs as long as :attr:`span` says, whatever they need of it, so that those of all stages begin alike."""
        for run in restore_points(held, until):
            first = max(self._begins, run.last - (self.span - 1) * self.interval)
            yield replace(run, first=min(run.first, first))

    def open_starts(self, held: Mapping[int, Contents], *, is_gapless: bool) -> Iterator[int]:
        """With every snapshot that is newer than the beginning of the newest run: any may be the first of one."""
        newest = next(self.restore_points(held), None)
        return (one for one in held if newest is None or one > newest.first)

    # What is saved

    def observe(self, counts: Scores) -> None:
        """Tokens are counted to the last one."""
        self._memory = replace(self._memory, account=self._memory.account.with_routed(counts))

    def short_of_tokens(self) -> Collection[str]:
        """Those that a recovery cost updates, until as many tokens more have come (section 6)."""
        return [self.table.names[place] for place in np.flatnonzero(self._memory.owed)]

    @property
    def tokens_owed(self) -> int:
        """Of all of them."""
        return int(self._memory.owed.sum())

    def let_in(self, tokens: Scores) -> None:
        """They are repaid."""
        owed = np.maximum(0, self._memory.owed - np.rint(tokens).astype(np.int64))
        self._memory = replace(self._memory, owed=owed)

    def wanted_sizes(self, now: Schedule, measured: Measured) -> tuple[int, ...]:
        """How many experts of each layer neither budget has room for (section 4.2), on the rank that has the least.

        What is left for experts is what the state beside them does not take; the paper does not count that.
        """
        expert, other = (self.table.full[:, mask].sum(axis=1) for mask in (self.table.is_expert, ~self.table.is_expert))
        budget = (
            measured.iteration_s
            * self.interval
            * min(measured.d2h_bytes_per_s, measured.replication_bytes_per_s / max(1, measured.replicas))
        )
        carried = min(
            (max(0.0, budget - beside) / its for beside, its in zip(other, expert, strict=True) if its), default=1.0
        )
        # Every expert's full state within MOST_REACH; see :attr:`span`.
        fewest = math.ceil(self.most / max(1, MOST_REACH // self.interval // 2))
        return (self.most - max(fewest, math.floor(self.most * min(1.0, carried))),)

    def propose(self, now: Schedule, sizes: tuple[int, ...] | None) -> Proposal:
        """The next selection, at every snapshot."""
        assert isinstance(now, SelectedSchedule)
        if sizes is not None:
            self.experts = self.most - sizes[0]
        memory, number = self._memory, self._memory.number + 1
        due = self.table.is_expert & (number - memory.full_at >= self.span)
        routed = memory.account.routed
        risk = routed - memory.saved
        chosen_ = most_at_risk(self.table, risk, due, self.experts * self._layers)
        by_gradients = chosen_ & memory.held & ~due if self.interval == 1 else np.zeros_like(chosen_)
        contents = self._contents(chosen_, by_gradients)
        self._memory = _Memory(
            memory.account, number, np.where(contents == Saved.FULL, number, memory.full_at),
            chosen_ | ~self.table.is_expert, np.where(chosen_, routed, memory.saved), memory.owed,
        )  # fmt: skip
        wanted = replace(now, span=self.span, rounds=(contents,))
        is_change = len(now.rounds) > 1 or wanted.span != now.span or not np.array_equal(contents, now.rounds[0])
        return Proposal([wanted if is_change else now], is_change, reorders=is_change)

    def caution(self) -> str | None:
        """Where experts may be left out."""
        if self.experts >= self.most and self.settled:
            return None
        how_many = f"{self.experts} of {self.most}" if self.settled else f"as many of {self.most} as is measured"
        return (
            f"a snapshot holds {how_many} experts of each layer, those with the most tokens at risk: a failure loses "
            "updates of the others, and what is trained after it is not what would have been trained without it"
        )

    # After a failure

    def restored(self, run: RecoverableRun, learned: Mapping[int, Any]) -> LostTokens:
        """Go on with the account of the newest snapshot, and write off what versions before it had not got."""
        then = _memory(learned[run.last])
        if not self._is_given:
            self.experts, self.settled = learned[run.last]["experts"], learned[run.last]["settled"]
        routed = then.account.routed
        versions = routed_at(run.version_at, learned)
        account = then.account.back_to(np.where(self.table.is_expert, versions, routed))
        self._memory = _Memory(
            account, then.number, then.number - (run.last - run.full_at) // self.interval, run.version_at == run.last,
            account.routed,  # what is live is what was saved
            then.owed + account.lost - then.account.lost,
        )  # fmt: skip
        return account.lost_since(then.account, self.table)

    def going_on(self, schedules: Sequence[Schedule], iteration: int, history: int) -> Sequence[Schedule]:
        """What was saved later is of a history that is no more; the next selection is made when it is due."""
        # Those of a state that comes from disk may be forgotten; what is there of snapshots says what they hold.
        before = [one for one in schedules if one.start <= iteration] or [schedules[0].starting_at(self._begins)]
        last = before[-1]
        assert isinstance(last, SelectedSchedule)
        return [*before, replace(last, start=iteration + self.interval, history=history)]

    def learned(self) -> Any:
        """Plain data."""
        memory = self._memory
        return {
            "routed": memory.account.routed, "lost": memory.account.lost, "number": memory.number,
            "full_at": memory.full_at, "held": memory.held, "saved": memory.saved, "owed": memory.owed,
            "experts": self.experts, "begins": self._begins, "settled": self.settled,
        }  # fmt: skip

    def adopt(self, learned: Any) -> None:
        """Likewise."""
        self._memory, self.experts, self._begins = _memory(learned), learned["experts"], learned["begins"]


def _memory(learned: Any) -> _Memory:
    routed, lost, full_at, held, saved, owed = (
        learned[name].copy() for name in ("routed", "lost", "full_at", "held", "saved", "owed")
    )
    return _Memory(TokenAccount(routed, lost), learned["number"], full_at, held, saved, owed)


def _at(table: OperatorTable, places: Sequence[int]) -> np.ndarray:
    mask = np.zeros(len(table), dtype=bool)
    mask[list(places)] = True
    return mask
