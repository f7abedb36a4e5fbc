"""Member of a job: a process that exchanges values with the coordinator through the job's store."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch.distributed as dist

from moevement_core.errors import JobStopped
from moevement_core.rendezvous.backoff import question_pause_s
from moevement_core.rendezvous.roster import (
    ACKNOWLEDGED,
    FINISHED,
    GIVEN_UP,
    JOINED,
    LEFT,
    MEMBER,
    MEMBERS_IN_SHARD,
    NEWEST,
    RANKS,
    ROSTER,
    SHARD,
    START,
    STOP,
    UNUSABLE_DEVICE,
    MemberInfo,
    Roster,
    Shard,
    UnusableDevice,
)
from moevement_core.rendezvous.signed_store import SignedStore

POLL_S = 1.0
"""Longest single wait for a value in the store, in seconds, in small jobs (:func:`question_pause_s`).

After it, the member checks if the job has ended or excluded it.
"""


class Member:
    """Member that represents this process. The main thread calls all methods.

    Args:
        store: store of the job.
        info: information about this process that the coordinator needs.
        reads_all: True if this member needs the entries of all ranks in a roster, as members of elastic jobs do.
    """

    def __init__(self, store: SignedStore, info: MemberInfo, *, reads_all: bool = False) -> None:
        self._store, self._info, self._reads_all = store, info, reads_all
        self._generation = -1
        self._poll = timedelta(seconds=POLL_S)

    @property
    def number(self) -> int:
        """Number of this member, which no other process of the job ever has."""
        return self._info.member

    def join(self) -> None:
        """Join the job, so that the coordinator may assign a rank to this member."""
        # Read the newest generation before the coordinator knows of this member. Otherwise the member could miss the
        # first roster that includes it.
        self._generation = int(self._store.get(NEWEST))
        ranks = int(self._store.read(RANKS) or b"0")
        self._poll = timedelta(seconds=question_pause_s(ranks, POLL_S))
        number = str(self._info.member)
        self._store.set(MEMBER.format(number, self._store.tag(number)), self._info.encode())
        self._store.ring(JOINED)

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
            self._write(ACKNOWLEDGED, "")
            if self._wait_for(START.format(self._generation), self._is_over) == b"go":
                return roster, rank

    def _next_roster(self) -> Roster:
        """Return the first roster after this member's generation that the job has not left behind."""
        while True:
            text = self._wait_for(ROSTER.format(self._generation + 1), self._is_over)
            self._store.forget(f"generation/{self._generation}/")
            self._generation += 1
            if text is None:
                continue
            head, own = Roster.decode(text), self._info.member // MEMBERS_IN_SHARD
            numbers = head.shards if self._reads_all else tuple(number for number in head.shards if number == own)
            texts = [self._wait_for(SHARD.format(self._generation, number), self._is_over) for number in numbers]
            if None not in texts:
                return head.joined(Shard.decode(shard) for shard in texts if shard is not None)

    def _is_over(self) -> bool:
        """Return True if the coordinator may have deleted the values of the generation that this member waits for.

        It deletes them when a generation trains whose number is larger by 2 or more.
        """
        return int(self._store.read(NEWEST) or b"-1") > self._generation + 1

    def _wait_for(self, key: str, is_over: Callable[[], bool] = lambda: False) -> bytes | None:
        """Wait for a value, and return it; return None if ``is_over()`` and there is no value."""
        while True:
            try:
                self._store.wait([key], self._poll)
            except dist.DistStoreError:
                self._raise_if_stopped()
                if is_over():
                    return self._store.read(key)
                self._store.keep_written()
                time.sleep(sys.getswitchinterval())
                continue
            if (value := self._store.read(key)) is not None:
                return value

    def _raise_if_stopped(self) -> None:
        if (reason := self._store.read(STOP)) is not None:
            raise JobStopped(reason.decode())
        if (why := self._store.read(GIVEN_UP.format(self._info.member))) is not None:
            raise JobStopped(f"the job goes on without this process, which {why.decode()}")

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
        self._write(LEFT, json.dumps(left))

    def report_unusable_device(self, notice: UnusableDevice) -> None:
        """Report that this member cannot use its device; a spare takes its rank. The caller then ends the process."""
        self._store.set(f"{UNUSABLE_DEVICE}/{self._info.member}", notice.encode())
        self._store.ring(UNUSABLE_DEVICE)

    def finished(self) -> None:
        """Report that this rank has reached the end of training."""
        self._write(FINISHED, "")

    def wait_for_end(self) -> None:
        """Block until every rank has reached the end of training, or the job is stopped.

        Raises:
            JobStopped: the job was stopped before its end.
        """
        if reason := (self._wait_for(STOP) or b"").decode():
            raise JobStopped(reason)

    def _write(self, key: str, value: str) -> None:
        """Write a value of this member, and signal to the coordinator that it should read the value at once.

        Without the signal, the coordinator would read the value only after a pause of 1 s or more.
        """
        name = key.format(self._generation)
        self._store.set(f"{name}/{self._info.member}", value)
        self._store.ring(name)
