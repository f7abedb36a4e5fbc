"""Common part of strategies that save all non-expert state, and select experts by the tokens that they processed.

These strategies are MoEtion, and MoC-System with selection by load. After a failure all ranks go back to the newest
snapshot, and each expert goes back to its newest saved version. The expert's updates after that version are lost. The
strategy counts the tokens of lost updates.
"""

from __future__ import annotations

import hashlib
import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from moevement_core.errors import ConfigError
from moevement_core.operators import OperatorTable
from moevement_core.policy.partial_experts import LostTokens, TokenAccount, chosen, kept_at, most_experts, turns
from moevement_core.policy.popularity import Ordering, Scores
from moevement_core.policy.recoverable import RecoverableRun
from moevement_core.policy.runs import restore_points
from moevement_core.policy.schedule import Contents, Saved, Schedule, SnapshotParts
from moevement_core.policy.tokens_at_risk import Chosen
from moevement_core.strategies.capabilities import LosesUpdates
from moevement_core.strategies.strategy import Proposal, Strategy
from moevement_core.strategies.versions import MOST_REACH, VersionSchedule

LEAST_SPAN = 4
"""Least value of :attr:`Selecting.span`, in snapshots."""


@dataclass(frozen=True, eq=False)
class SelectedSchedule(VersionSchedule):
    """Schedule of the next snapshot only; at the start of a job, schedule of a few snapshots that repeat.

    The snapshots at the start take the experts in turn, because no tokens are counted yet.
    """

    span: int
    """Number of consecutive snapshots that together hold the full state of every operator; any may be the first."""
    rounds: tuple[Contents, ...]
    """Contents of the schedule's snapshots, in the order of capture. After the last one, the first one comes again."""
    at_peers: tuple[Contents, ...]
    """Part of each of :attr:`rounds` that peers receive. Of an expert not in this part, peers keep an older version."""
    history: int = 0
    """Number that changes with each recovery that lost updates; see :attr:`moc.PartialSchedule.history`."""

    @property
    def size(self) -> int:
        """Number of iterations after which the snapshots repeat."""
        return self.interval * len(self.rounds)

    @property
    def snapshots(self) -> int:
        """Number of snapshots of a recoverable run."""
        return self.span

    @property
    def is_dense(self) -> bool:
        """True if every snapshot holds the full state of every operator."""
        return all((contents == Saved.FULL).all() for contents in (*self.rounds, *self.at_peers))

    @cached_property
    def id(self) -> str:
        """Digest of all fields and of the operator names, hexadecimal."""
        digest = hashlib.sha256(repr((self.start, "selected", self.interval, self.span, self.history)).encode())
        for contents in (*self.rounds, *self.at_peers):
            digest.update(contents.tobytes())
        digest.update("\n".join(self.table.names).encode())
        return digest.hexdigest()[:16]

    def contents_of_slot(self, slot: int) -> Contents | None:
        """Return the contents of the slot's snapshot; None if the slot has no snapshot."""
        turn, rest = divmod(slot, self.interval)
        return None if rest else self.rounds[turn]

    def parts_of_slot(self, slot: int) -> SnapshotParts:
        """Return the part of the slot's snapshot that peers receive; the whole snapshot is written to disk."""
        turn, rest = divmod(slot, self.interval)
        return SnapshotParts() if rest else SnapshotParts(at_peers=self.at_peers[turn])

    def for_operators_of(self, other: Schedule) -> SelectedSchedule:
        """Return this schedule, but with the operators and :attr:`rounds` of ``other``.

        After a failure, ranks of a stage call this method if they do not know the newest schedule of their stage. Then
        they do not know which experts the newest snapshots hold either. They need not, because snapshots record what
        they hold.
        """
        assert isinstance(other, SelectedSchedule)
        return replace(self, table=other.table, rounds=other.rounds, at_peers=other.at_peers)


@dataclass(frozen=True, slots=True)
class Saves:
    """Record of what a stage's snapshots hold, in one of two places: on the ranks themselves, or at their peers."""

    full_at: np.ndarray
    """Number of the newest snapshot that holds each operator's full state, int64 ``[operators]``."""
    held: np.ndarray
    """Operators that the newest snapshot holds, bool ``[operators]``."""
    saved: np.ndarray
    """Tokens that each operator had processed when it was last saved in this place, int64 ``[operators]``."""

    def after(self, number: int, contents: Contents, routed: np.ndarray) -> Saves:
        """Return the record after snapshot ``number`` with ``contents``.

        Args:
            number: number of the snapshot, counted as :attr:`Memory.number`.
            contents: contents of the snapshot, in the place that this record describes (on the ranks, or at peers).
            routed: tokens that each operator has processed so far, int64 ``[operators]``.
        """
        held = contents != Saved.OMITTED
        return Saves(
            full_at=np.where(contents == Saved.FULL, number, self.full_at),
            held=held,
            saved=np.where(held, routed, self.saved),
        )

    def as_learned(self, place: str) -> dict[str, np.ndarray]:
        """Return all fields by name.

        Args:
            place: suffix that is appended to each name: :data:`AT_PEERS`, or empty for the ranks' own snapshots.
        """
        return {f"full_at{place}": self.full_at, f"held{place}": self.held, f"saved{place}": self.saved}

    @staticmethod
    def of(learned: Mapping[str, Any], place: str) -> Saves:
        """Return the record that :meth:`as_learned` has written with the same ``place``."""
        full_at, held, saved = (learned[name + place].copy() for name in ("full_at", "held", "saved"))
        return Saves(full_at, held, saved)


AT_PEERS = "_at_peers"
"""Suffix of the keys in :meth:`Memory.as_learned` that describe peers."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Record of a stage's token counts and of what its snapshots hold. All ranks of the stage have an equal record.

    Every snapshot contains this record.
    """

    account: TokenAccount
    number: int
    """Number of the newest snapshot, counted from the snapshot of the job's first state, which has number 0."""
    own: Saves
    """Record of the snapshots that ranks of the stage keep themselves."""
    at_peers: Saves
    """Record of the parts of these snapshots that peers receive."""

    def as_learned(self) -> dict[str, Any]:
        """Return all fields as plain data."""
        return {
            "routed": self.account.routed, "lost": self.account.lost, "number": self.number,
            **self.own.as_learned(""), **self.at_peers.as_learned(AT_PEERS),
        }  # fmt: skip

    @staticmethod
    def of(learned: Mapping[str, Any]) -> Memory:
        """Return the record from the result of :meth:`as_learned`.

        An older version of this program wrote nothing about peers. Peers then had the same parts as the ranks
        themselves.
        """
        account, own = TokenAccount.of(learned), Saves.of(learned, "")
        place = AT_PEERS if f"held{AT_PEERS}" in learned else ""
        return Memory(account, number=learned["number"], own=own, at_peers=Saves.of(learned, place))


class Selecting(Strategy, LosesUpdates):
    """Strategy that saves selected experts in every snapshot. A failure sets an expert back to its newest saved state.

    Args:
        table: the operators of the stage.
        interval: iterations between snapshots.
        experts: mean number of experts of each layer in a snapshot.
        most: E, experts in the largest layer of the job; None to use the largest layer of this stage.

    Raises:
        ConfigError: too many iterations pass until every expert has been saved.
    """

    rolls_back_all = True
    counts = Ordering.HARD_COUNT
    sizes_are_iterations = False

    def __init__(self, table: OperatorTable, interval: int, experts: int, most: int | None = None) -> None:
        super().__init__(table)
        self.interval = interval
        self.most = most_experts(table) if most is None else most
        self.experts = min(experts, self.most)
        if (reach := self.span * interval) > MOST_REACH:
            raise ConfigError(
                f"--moevement-snapshot-experts {self.experts} of {self.most} every {interval} iterations saves each "
                f"expert once in {reach} iterations; needs {MOST_REACH} or less, so save more experts or more often"
            )
        self._memory = self._at_first()
        self._begins = 0
        """Iteration of the first snapshot of the job."""

    @property
    def span(self) -> int:
        """Number of consecutive snapshots that together hold the full state of every expert.

        So it is the longest time, in snapshots, for which an expert with few tokens is not saved.
        """
        return max(LEAST_SPAN, 2 * math.ceil(self.most / self.experts_at_peers))

    @property
    def experts_at_peers(self) -> int:
        """Mean number of experts of each layer in the part of a snapshot that peers receive."""
        return self.experts

    def first(self, start: int, most: int) -> SelectedSchedule:
        """Return the schedule whose first snapshots together hold the job's whole first state, with experts in turn."""
        self._begins = start - (self.span - 1) * self.interval
        rounds = self._first_rounds()
        return SelectedSchedule(self.table, self.interval, self.span, rounds, at_peers=rounds, start=self._begins)

    def _first_rounds(self) -> tuple[Contents, ...]:
        order = turns(self.table)
        return tuple(
            self._contents(full=_at(self.table, chosen(order, self.experts_at_peers, turn)))
            for turn in range(math.ceil(self.most / self.experts_at_peers))
        )

    def _at_first(self) -> Memory:
        rounds, operators = self._first_rounds(), len(self.table)
        full_at = np.zeros(operators, dtype=np.int64)
        for number in range(1 - self.span, 1):
            full_at[rounds[(number + self.span - 1) % len(rounds)] == Saved.FULL] = number
        saves = Saves(full_at, held=full_at == 0, saved=np.zeros(operators, dtype=np.int64))
        return Memory(account=TokenAccount.empty(operators), number=0, own=saves, at_peers=saves)

    def _contents(self, full: Chosen, gradients: Chosen | None = None) -> Contents:
        """Return contents with the full state of non-expert operators, and of experts as follows.

        Args:
            full: experts whose full state is saved.
            gradients: those of the experts in ``full`` of which only gradients are saved; None for no expert.
        """
        contents = np.where(self.table.is_expert & ~full, np.int8(Saved.OMITTED), np.int8(Saved.FULL))
        if gradients is not None:
            contents[gradients] = Saved.GRADIENT
        return contents

    # Restore points

    def restore_points(self, held: Mapping[int, Contents], until: int | None = None) -> Iterator[RecoverableRun]:
        """Yield the restore points of the base class, each extended backwards to at least :attr:`span` snapshots.

        Stages save different experts, so their shortest runs have different lengths. But all stages must name the same
        first iteration of a restore point.
        """
        for run in restore_points(held, until):
            first = max(self._begins, run.last - (self.span - 1) * self.interval)
            yield replace(run, first=min(run.first, first))

    def open_starts(self, held: Mapping[int, Contents], *, is_gapless: bool) -> Iterator[int]:
        """Return the iterations of all snapshots after the first one of the newest restore point.

        Each of these snapshots may become the first one of a later restore point.
        """
        newest = next(self.restore_points(held), None)
        return (iteration for iteration in held if newest is None or iteration > newest.first)

    # Contents of snapshots

    @abstractmethod
    def _choose(self, risk: np.ndarray, due: Chosen, experts: int) -> Chosen:
        """Return the experts that the next snapshot holds, or the experts in the part of it that peers receive.

        Args:
            risk: tokens that each operator has processed since it was last saved in own snapshots, or since it was last
                saved at peers, int64 ``[operators]``.
            due: experts that are chosen in any case, bool ``[operators]``.
            experts: mean number of chosen experts of each layer, ``due`` included.
        """

    @abstractmethod
    def _take(self, sizes: tuple[int, ...]) -> None:
        """Use the sizes that ranks agreed on: the largest results of :meth:`wanted_sizes`."""

    def observe(self, counts: Scores) -> None:
        """Add routed tokens to the account of each expert."""
        self._memory = replace(self._memory, account=self._memory.account.with_routed(counts))

    def propose(self, now: Schedule, sizes: tuple[int, ...] | None) -> Proposal:
        """Propose the contents of the next snapshot; the session calls it for every snapshot."""
        assert isinstance(now, SelectedSchedule)
        if sizes is not None:
            self._take(sizes)
        memory, number = self._memory, self._memory.number + 1
        contents, at_peers = self._next_contents(memory, number)
        routed = memory.account.routed
        self._memory = Memory(
            account=memory.account, number=number, own=memory.own.after(number, contents, routed),
            at_peers=memory.at_peers.after(number, at_peers, routed),
        )  # fmt: skip
        wanted = replace(now, span=self.span, rounds=(contents,), at_peers=(at_peers,))
        is_change = (
            len(now.rounds) > 1 or wanted.span != now.span or not np.array_equal(contents, now.rounds[0])
            or not np.array_equal(at_peers, now.at_peers[0])
        )  # fmt: skip
        return Proposal([wanted if is_change else now], is_change, reorders=is_change)

    def _next_contents(self, memory: Memory, number: int) -> tuple[Contents, Contents]:
        """Return the contents of snapshot ``number``, and of the part that peers receive (Algorithm 1, lines 18, 19).

        Peers can receive only what the snapshot holds. So the snapshot holds all experts chosen for peers, and as many
        more as the rank can copy. If peers need the full state of an expert, the snapshot also has the full state.
        """
        routed, at_peers = memory.account.routed, memory.at_peers
        due = self.table.is_expert & (number - at_peers.full_at >= self.span)
        for_peers = self._choose(routed - at_peers.saved, due, self.experts_at_peers)
        if self.experts_at_peers < self.experts:
            own = self._choose(routed - memory.own.saved, for_peers, self.experts)
        else:
            own = for_peers
        # Gradients repeat the update of a single iteration, so a chain needs a snapshot in every iteration.
        is_chained = self.chains_gradients and self.interval == 1
        goes_on_there = for_peers & at_peers.held & ~due if is_chained else np.zeros_like(own)
        goes_on_here = own & memory.own.held & ~(for_peers & ~goes_on_there) if is_chained else np.zeros_like(own)
        return self._contents(own, goes_on_here), self._contents(for_peers, goes_on_there)

    # After a failure

    def restored(self, run: RecoverableRun, learned: Mapping[int, Any], tokens_of_run: int | None = None) -> LostTokens:
        """Restore the token counts of the restored snapshot, and return the tokens whose updates are lost."""
        then = Memory.of(learned[run.last])
        versions = kept_at(run.version_at, learned)
        account = then.account.rolled_back_to(np.where(self.table.is_expert, versions, then.account.kept))
        is_newest = run.version_at == run.last
        own = Saves(
            full_at=then.number - (run.last - run.full_at) // self.interval,
            held=is_newest,
            saved=account.routed,  # the live state equals the saved state
        )
        # Peers may have older versions than survivors, so more tokens are at risk there.
        at_risk = np.maximum(0, account.kept - (then.at_peers.saved - then.account.lost))
        at_peers = replace(then.at_peers, held=then.at_peers.held & is_newest, saved=account.routed - at_risk)
        self._memory = Memory(account, number=then.number, own=own, at_peers=at_peers)
        return account.lost_since(then.account, self.table, tokens_of_run)

    def schedules_after_rollback(
        self, schedules: Sequence[Schedule], iteration: int, history: int
    ) -> Sequence[Schedule]:
        """Return the schedules that began up to ``iteration``, and a new one for the snapshots after it.

        The new schedule is a copy of the last schedule, with ``history`` as its number.
        """
        # A state from disk may be older than all remembered schedules. Then any schedule will do for the snapshots on
        # disk, because snapshots record what they hold.
        before = [schedule for schedule in schedules if schedule.start <= iteration] or [
            replace(schedules[0], start=self._begins)
        ]
        last = before[-1]
        assert isinstance(last, SelectedSchedule)
        return [*before, replace(last, start=iteration + self.interval, history=history)]

    def learned(self) -> Any:
        """Return as plain data: token counts, what snapshots hold, the mean number of experts, the first iteration."""
        return {**self._memory.as_learned(), "experts": self.experts, "begins": self._begins}

    def adopt(self, learned: Any) -> None:
        """Take over the result of :meth:`learned` from another rank."""
        self._memory, self.experts, self._begins = Memory.of(learned), learned["experts"], learned["begins"]


def _at(table: OperatorTable, places: Sequence[int]) -> np.ndarray:
    mask = np.zeros(len(table), dtype=bool)
    mask[list(places)] = True
    return mask
