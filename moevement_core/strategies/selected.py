"""Everything but the experts in every snapshot, and of the experts those that are chosen by the tokens they got.

What MoEtion does, and MoC-System where it selects by load. After a failure all ranks go back to the newest snapshot,
and each expert to its newest version; updates in between are lost, and the tokens behind them counted.
"""

from __future__ import annotations

import hashlib
import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from moevement_core.errors import ConfigError
from moevement_core.operators import OperatorTable
from moevement_core.policy.partial_experts import LostTokens, TokenAccount, chosen, kept_at, most_experts, turns
from moevement_core.policy.popularity import Ordering, Scores
from moevement_core.policy.recoverable import RecoverableRun
from moevement_core.policy.runs import restore_points
from moevement_core.policy.schedule import Contents, Saved, Schedule
from moevement_core.policy.tokens_at_risk import Chosen
from moevement_core.strategies.strategy import Proposal, Strategy
from moevement_core.strategies.versions import MOST_REACH, VersionSchedule

LEAST_SPAN = 4
"""Snapshots, at least, until an expert has its full state saved again."""


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

    def with_windows_of(self, other: Schedule) -> SelectedSchedule:
        """As often. What was chosen nobody of this stage knows any more; its snapshots say it."""
        assert isinstance(other, SelectedSchedule)
        return replace(other, table=self.table, rounds=self.rounds)

    def starting_at(self, start: int) -> SelectedSchedule:
        """The same from another iteration on."""
        return replace(self, start=start)


@dataclass(frozen=True, slots=True)
class Memory:
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

    @property
    def risk(self) -> np.ndarray:
        """Tokens that each operator got since it was last saved, int64 ``[operators]``."""
        return self.account.routed - self.saved

    def as_learned(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "routed": self.account.routed, "lost": self.account.lost, "number": self.number, "full_at": self.full_at,
            "held": self.held, "saved": self.saved,
        }  # fmt: skip

    @staticmethod
    def of(learned: Mapping[str, Any]) -> Memory:
        """The inverse of :meth:`as_learned`."""
        routed, lost, full_at, held, saved = (
            learned[name].copy() for name in ("routed", "lost", "full_at", "held", "saved")
        )
        return Memory(TokenAccount(routed, lost), learned["number"], full_at, held, saved)


class Selecting(Strategy):
    """Some of the experts in every snapshot; all ranks go back to the newest version of each.

    Args:
        table: the operators of the stage.
        interval: iterations between snapshots.
        experts: how many of each layer a snapshot holds, on average.
        most: E, of the layer of the job that has the most; None: of this stage.

    Raises:
        ConfigError: it takes too long until every expert has been saved.
    """

    rolls_back_all = True
    loses_updates = True
    counts = Ordering.HARD_COUNT
    sizes_are_iterations = False
    chains_gradients: ClassVar[bool] = False
    """Whether an expert that the snapshot before holds, too, is there by its gradients alone."""

    def __init__(self, table: OperatorTable, interval: int, experts: int, most: int | None = None) -> None:
        super().__init__(table)
        self.interval = interval
        self.most = most_experts(table) if most is None else most
        self.experts = min(experts, self.most)
        if (reach := self.span * interval) > MOST_REACH:
            raise ConfigError(
                f"--moevement-snapshot-experts {self.experts} of {self.most} every {interval} iterations: every expert "
                f"is saved once in {reach}; needs at most {MOST_REACH}, so save more experts or more often"
            )
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

    def _at_first(self) -> Memory:
        rounds, operators = self._first_rounds(), len(self.table)
        full_at = np.zeros(operators, dtype=np.int64)
        for number in range(1 - self.span, 1):
            full_at[rounds[(number + self.span - 1) % len(rounds)] == Saved.FULL] = number
        zeros = np.zeros(operators, dtype=np.int64)
        return Memory(TokenAccount.empty(operators), 0, full_at, full_at == 0, zeros)

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

    @abstractmethod
    def choose(self, risk: np.ndarray, due: Chosen) -> Chosen:
        """Returns the experts that the next snapshot holds.

        Args:
            risk: tokens that each operator got since it was last saved.
            due: those that it holds in any case.
        """

    @abstractmethod
    def take(self, sizes: tuple[int, ...]) -> None:
        """Go by what :meth:`wanted_sizes` gave, of all ranks."""

    def observe(self, counts: Scores) -> None:
        """Tokens are counted to the last one."""
        self._memory = replace(self._memory, account=self._memory.account.with_routed(counts))

    def propose(self, now: Schedule, sizes: tuple[int, ...] | None) -> Proposal:
        """The next selection, at every snapshot."""
        assert isinstance(now, SelectedSchedule)
        if sizes is not None:
            self.take(sizes)
        memory, number = self._memory, self._memory.number + 1
        due = self.table.is_expert & (number - memory.full_at >= self.span)
        chosen_ = self.choose(memory.risk, due)
        # A gradient makes the update of one iteration.
        is_chained = self.chains_gradients and self.interval == 1
        by_gradients = chosen_ & memory.held & ~due if is_chained else np.zeros_like(chosen_)
        contents = self._contents(chosen_, by_gradients)
        self._memory = Memory(
            memory.account, number, np.where(contents == Saved.FULL, number, memory.full_at),
            chosen_ | ~self.table.is_expert, np.where(chosen_, memory.account.routed, memory.saved),
        )  # fmt: skip
        wanted = replace(now, span=self.span, rounds=(contents,))
        is_change = len(now.rounds) > 1 or wanted.span != now.span or not np.array_equal(contents, now.rounds[0])
        return Proposal([wanted if is_change else now], is_change, reorders=is_change)

    # After a failure

    def restored(self, run: RecoverableRun, learned: Mapping[int, Any]) -> LostTokens:
        """Go on with the account of the newest snapshot, and write off what versions before it had not got."""
        then = Memory.of(learned[run.last])
        versions = kept_at(run.version_at, learned)
        account = then.account.back_to(np.where(self.table.is_expert, versions, then.account.kept))
        self._memory = Memory(
            account, then.number, then.number - (run.last - run.full_at) // self.interval, run.version_at == run.last,
            account.routed,  # what is live is what was saved
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
        return {**self._memory.as_learned(), "experts": self.experts, "begins": self._begins}

    def adopt(self, learned: Any) -> None:
        """Likewise."""
        self._memory, self.experts, self._begins = Memory.of(learned), learned["experts"], learned["begins"]


def _at(table: OperatorTable, places: Sequence[int]) -> np.ndarray:
    mask = np.zeros(len(table), dtype=bool)
    mask[list(places)] = True
    return mask
