"""A process that takes part in a job, as the coordinator hears of it."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch.distributed as dist

from moevement_core.errors import JobStopped
from moevement_core.rendezvous.roster import (
    ACKNOWLEDGED,
    FINISHED,
    GIVEN_BACK,
    GIVEN_UP,
    JOINED,
    LEFT,
    MEMBER,
    NEWEST,
    ROSTER,
    START,
    STOP,
    GivenBack,
    MemberInfo,
    Roster,
)
from moevement_core.rendezvous.signed_store import SignedStore

POLL = timedelta(seconds=1)


class Member:
    """This process. All methods are for its main thread.

    Args:
        store: the job's.
        info: what others may know.
    """

    def __init__(self, store: SignedStore, info: MemberInfo) -> None:
        self._store, self._info = store, info
        self._generation = -1

    @property
    def number(self) -> int:
        """The number of this process, which no other one of the job ever had."""
        return self._info.member

    def join(self) -> None:
        """Be there to be given a rank."""
        # Asked before the coordinator knows of this member, so that no roster with it in is passed over.
        self._generation = int(self._store.get(NEWEST))
        number = str(self._info.member)
        self._store.set(MEMBER.format(number, self._store.tag(number)), self._info.encode())
        self._store.ring(JOINED)

    def wait_for_rank(self, check: Callable[[Roster, int], None] = lambda roster, rank: None) -> tuple[Roster, int]:
        """The next roster that this member is in and that all in it have acknowledged; a spare may wait for ever.

        Args:
            check: called with a roster and the rank that this member has in it, before it is acknowledged: a process
                that cannot take the rank ends in it, and nobody has waited for it in a process group.

        Raises:
            JobStopped: the job has ended, or goes on without this member.
        """
        while True:
            roster = Roster.decode(self._wait_for(ROSTER.format(self._generation + 1)))
            self._generation = roster.generation
            rank = roster.rank_of(self._info.member)
            if rank is None:
                continue
            check(roster, rank)
            self._write(ACKNOWLEDGED, "")
            if self._wait_for(START.format(self._generation)) == b"go":
                return roster, rank

    def _wait_for(self, key: str) -> bytes:
        while True:
            try:
                self._store.wait([key], POLL)
            except dist.DistStoreError:
                self._raise_if_stopped()
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
        """This rank has stopped what it did; the job is formed again when all survivors have.

        Args:
            reason: what went wrong here; empty if it was somewhere else.
            committed: the newest iteration that it knows of.
            had_recovered: whether it was in training, with every failure before behind it.
            suspects: ranks of which one is to be replaced, because their processes compute results that are not finite.
        """
        left = {
            "reason": reason, "committed": committed, "at": time.time(), "had_recovered": had_recovered,
            "suspects": list(suspects),
        }  # fmt: skip
        self._write(LEFT, json.dumps(left))

    def give_back(self, given_back: GivenBack) -> None:
        """Have this member replaced: it can do nothing with its device any more. The process has to end now."""
        self._store.set(f"{GIVEN_BACK}/{self._info.member}", given_back.encode())
        self._store.ring(GIVEN_BACK)

    def finished(self) -> None:
        """This rank has come to the end of training."""
        self._write(FINISHED, "")

    def wait_for_end(self) -> None:
        """Block until every rank has come to the end, or the job is stopped.

        Raises:
            JobStopped: it did not come to its end.
        """
        if reason := self._wait_for(STOP).decode():
            raise JobStopped(reason)

    def _write(self, key: str, value: str) -> None:
        """Write a value for the coordinator, which reads single members when the bell has rung, and otherwise with a
        backoff.
        """
        name = key.format(self._generation)
        self._store.set(f"{name}/{self._info.member}", value)
        self._store.ring(name)
