"""Member of a job: a process that shares values with the coordinator, and reports to it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence

from moevement_core.errors import JobStopped
from moevement_core.rendezvous.drains import Departure
from moevement_core.rendezvous.roster import (
    ACKNOWLEDGED,
    DEPARTING,
    FINISHED,
    GIVEN_UP,
    JOINED,
    LEFT,
    MEMBERS_IN_SHARD,
    ROSTER,
    SHARD,
    SHARDS,
    START,
    STOP,
    UNUSABLE_DEVICE,
    MemberInfo,
    Roster,
    RosterShard,
    UnusableDevice,
)
from moevement_core.rendezvous.values import JobValues, number_of


class Member:
    """Member that represents this process. The main thread calls all methods.

    Args:
        values: values of the job.
        info: information about this process that the coordinator needs.
        reads_all: True if this member needs the entries of all ranks in a roster, as members of elastic jobs do.
    """

    def __init__(self, values: JobValues, info: MemberInfo, *, reads_all: bool = False) -> None:
        self._values, self._info, self._reads_all = values, info, reads_all
        self._generation = -1

    @property
    def number(self) -> int:
        """Number of this member, which no other process of the job ever has."""
        return self._info.member

    def join(self) -> None:
        """Join the job, so that the coordinator may assign a rank to this member."""
        # Read the newest generation before the coordinator knows of this member. Otherwise the member could miss the
        # first roster that includes it.
        self._generation = number_of(self._values.read(ROSTER))
        self._values.report(f"{JOINED}/{self._info.member}", self._info.encode())

    def wait_for_rank(self, check: Callable[[Roster, int], None] = lambda roster, rank: None) -> tuple[Roster, int]:
        """Wait until a roster has a rank for this member, and all members with a rank have acknowledged this roster.

        A spare may wait in this call until the end of the job.

        Args:
            check: called with a roster and this member's rank, before the member acknowledges the roster. If this
                process cannot take the rank, ``check`` ends the process. So no other rank waits for this process when
                ranks create process groups.

        Returns:
            The roster and the rank of this member.

        Raises:
            JobStopped: the job has ended, or goes on without this member.
        """
        while True:
            roster = self._next_roster()
            rank = roster.rank_of(self._info.member)
            if rank is None:
                continue
            check(roster, rank)
            self._report(ACKNOWLEDGED, "")
            if self._may_start():
                return roster, rank

    def _next_roster(self) -> Roster:
        """Wait for a roster that is newer than this member's generation, and return it with the entries needed here."""
        while True:
            self._wait_for(lambda: self._number_of(ROSTER) > self._generation)
            number, _, text = (self._values.watch(ROSTER) or "").partition(" ")
            head = Roster.decode(text)
            self._generation = int(number)
            texts = [self._of_generation(SHARD.format(number)) for number in self._shards()]
            if None not in texts:  # Otherwise, there is a newer roster.
                return head.joined(RosterShard.decode(text) for text in texts if text is not None)

    def _shards(self) -> list[int]:
        """Return the numbers of the shards that this member reads: its own, or all that have entries."""
        if not self._reads_all:
            return [self._info.member // MEMBERS_IN_SHARD]
        return [int(number) for number in (self._of_generation(SHARDS) or "").split(",") if number]

    def _of_generation(self, key: str) -> str | None:
        """Wait for this generation's value of a key, and return it; return None if there is a newer value."""
        self._wait_for(lambda: self._number_of(key) >= self._generation)
        number, _, text = (self._values.watch(key) or "").partition(" ")
        return text if int(number) == self._generation else None

    def _may_start(self) -> bool:
        """Wait for the decision on the newest roster, and return True if all its members have acknowledged it."""
        self._wait_for(lambda: self._number_of(START) >= self._generation)
        return self._values.watch(START) == f"{self._generation} go"

    def _number_of(self, key: str) -> int:
        return number_of(self._values.watch(key))

    def _wait_for(self, holds: Callable[[], bool]) -> None:
        """Wait until ``holds()``, which depends on watched values.

        Raises:
            JobStopped: the job has ended, or goes on without this member.
        """
        watch, given_up = self._values.watch, GIVEN_UP.format(self._info.member)
        self._values.wait_until(lambda: holds() or watch(STOP) is not None or watch(given_up) is not None)
        if holds():
            return
        if (reason := watch(STOP)) is not None:
            raise JobStopped(reason)
        raise JobStopped(f"the job goes on without this process, which {watch(given_up)}")

    def leave(self, reason: str, committed: int, *, had_recovered: bool = False, suspects: Sequence[int] = ()) -> None:
        """Report that this rank has left its generation; the coordinator forms the next when all survivors have left.

        Args:
            reason: error of this rank; empty if only other ranks failed.
            committed: newest iteration that this rank has committed.
            had_recovered: True if this generation had recovered from all failures before it and resumed training.
            suspects: ranks whose processes computed NaN or infinity; the coordinator replaces one of them.
        """
        left = {
            "reason": reason, "committed": committed, "at": time.time(), "had_recovered": had_recovered,
            "suspects": list(suspects),
        }  # fmt: skip
        self._report(LEFT, json.dumps(left))

    def report_unusable_device(self, notice: UnusableDevice) -> None:
        """Report that this member cannot use its device; a spare takes its rank. The caller then ends the process."""
        self._values.report(f"{UNUSABLE_DEVICE}/{self._info.member}", notice.encode())

    def report_departure(self, departure: Departure, text: str = "") -> None:
        """Report what this member does at the boundary at which it was asked to leave.

        A caller that gives the rank back then waits until the coordinator interrupts the generation, and ends the
        process. Until then, other ranks of its node may hand over their state.

        Args:
            departure: what the member does.
            text: description of the end of a member that gives its rank back, for log lines.
        """
        self._report(DEPARTING, f"{departure};{text}")

    def finished(self) -> None:
        """Report that this rank has reached the end of training."""
        self._report(FINISHED, "")

    def wait_for_end(self) -> None:
        """Block until every rank has reached the end of training, or the job is stopped.

        Raises:
            JobStopped: the job was stopped before its end.
        """
        self._wait_for(lambda: self._values.watch(STOP) == "")

    def _report(self, topic: str, value: str) -> None:
        """Report a value of this member in its generation to the coordinator."""
        self._values.report(f"{topic.format(self._generation)}/{self._info.member}", value)
