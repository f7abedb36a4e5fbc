"""A process that takes part in a job, as the coordinator hears of it."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from moevement_core.errors import JobStopped
from moevement_core.rendezvous.roster import (
    ACKNOWLEDGED,
    FINISHED,
    GIVEN_UP,
    JOINED,
    LEFT,
    MEMBER,
    NEWEST,
    ROSTER,
    START,
    STOP,
    MemberInfo,
    Roster,
)

POLL = timedelta(seconds=1)


class Member:
    """This process. All methods are for its main thread.

    Args:
        store: the job's.
        info: what others may know.
    """

    def __init__(self, store: Any, info: MemberInfo) -> None:
        self._store, self._info = store, info
        self._generation = -1

    def join(self) -> None:
        """Be there to be given a rank."""
        # Asked before the coordinator knows of this member, so that no roster with it in is passed over.
        self._generation = int(self._store.get(NEWEST))
        number = self._store.add(JOINED, 1) - 1
        self._store.set(MEMBER.format(number), json.dumps(asdict(self._info)))

    def wait_for_rank(self) -> tuple[Roster, int]:
        """The next roster that this member is in and that all in it have acknowledged; a spare may wait for ever.

        Raises:
            JobStopped: the job has ended, or goes on without this member.
        """
        while True:
            roster = Roster.decode(self._wait_for(ROSTER.format(self._generation + 1)))
            self._generation = roster.generation
            rank = roster.rank_of(self._info.member)
            if rank is None:
                continue
            self._write(ACKNOWLEDGED, "")
            if self._wait_for(START.format(self._generation)) == b"go":
                return roster, rank

    def _wait_for(self, key: str) -> bytes:
        while True:
            try:
                self._store.wait([key], POLL)
            except dist.DistStoreError:
                self._raise_if_stopped()
                time.sleep(sys.getswitchinterval())
                continue
            return bytes(self._store.get(key))

    def _raise_if_stopped(self) -> None:
        if self._store.check([STOP]):
            raise JobStopped(self._store.get(STOP).decode())
        if self._store.check([GIVEN_UP.format(self._info.member)]):
            why = self._store.get(GIVEN_UP.format(self._info.member)).decode()
            raise JobStopped(f"the job goes on without this process, which {why}")

    def leave(self, reason: str, committed: int, *, had_recovered: bool = False) -> None:
        """This rank has stopped what it did; the job is formed again when all survivors have.

        Args:
            reason: what went wrong here; empty if it was somewhere else.
            committed: the newest iteration that it knows of.
            had_recovered: whether it was in training, with every failure before behind it.
        """
        left = {"reason": reason, "committed": committed, "at": time.time(), "had_recovered": had_recovered}
        self._write(LEFT, json.dumps(left))

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
        """For the coordinator, which looks at single members only when the count has changed."""
        name = key.format(self._generation)
        self._store.set(f"{name}/{self._info.member}", value)
        self._store.add(name, 1)
