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
from moevement_core.rendezvous.roster import DONE, GIVEN_UP, JOINED, LEFT, MEMBER, NEWEST, ROSTER, STOP, Card, Roster

POLL = timedelta(seconds=1)


class Member:
    """This process.

    Args:
        store: the job's.
        card: what others may know.
    """

    def __init__(self, store: Any, card: Card) -> None:
        self._store, self._card = store, card
        self._generation = -1

    def join(self) -> None:
        """Be there to be given a rank."""
        # Asked before the coordinator knows of this member, so that no roster with it in is passed over.
        self._generation = int(self._store.get(NEWEST))
        number = self._store.add(JOINED, 1) - 1
        self._store.set(MEMBER.format(number), json.dumps(asdict(self._card)))

    def wait_for_rank(self) -> tuple[Roster, int]:
        """The next roster that this member is in, and its rank there; a spare may wait for ever.

        Raises:
            JobStopped: the job has ended, or goes on without this member.
        """
        while True:
            roster = self._next_roster()
            self._generation = roster.generation
            rank = roster.rank_of(self._card.member)
            if rank is not None:
                return roster, rank

    def _next_roster(self) -> Roster:
        wanted = ROSTER.format(self._generation + 1)
        while True:
            try:
                self._store.wait([wanted], POLL)
            except dist.DistStoreError:
                if self._store.check([STOP]):
                    raise JobStopped(self._store.get(STOP).decode()) from None
                if self._store.check([GIVEN_UP.format(self._card.member)]):
                    raise JobStopped("this process did not answer in time, and another is to take its rank") from None
                time.sleep(sys.getswitchinterval())
                continue
            return Roster.decode(self._store.get(wanted))

    def leave(self, reason: str, committed: int) -> None:
        """This rank has stopped what it did; the job is formed anew when all others have.

        Args:
            reason: what went wrong here; empty if it was somewhere else.
            committed: the newest iteration that it knows of.
        """
        self._store.set(
            LEFT.format(self._generation, self._card.member), json.dumps({"reason": reason, "committed": committed})
        )

    def done(self) -> None:
        """This rank has come to the end of the job."""
        self._store.set(DONE.format(self._generation, self._card.member), "")
