"""Forms the job: the first time, and again after every failure. One per job, where its store is.

It decides alone and from what it sees, so that nobody has to agree on anything while processes die. Survivors keep
their ranks, and a spare takes the number of a rank that is gone. Only members of the roster matter to the job: a spare
that dies is forgotten, and one that joins waits until it is needed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from enum import Enum
from typing import Any

from moevement_core.rendezvous.roster import (
    DEATH,
    DEATHS,
    DONE,
    GIVEN_UP,
    JOINED,
    LEFT,
    MEMBER,
    NEWEST,
    ROSTER,
    STOP,
    Card,
    Death,
    Roster,
)

NO_PROGRESS = 4
"""How often in a row a rank may fail by itself at the same iteration before the job is given up."""
LOST_S = 30.0
"""How long a rank that others have found to be gone has to prove the contrary."""


class State(Enum):
    """Where the job stands."""

    FORMING = "forming"
    RUNNING = "running"
    STOPPED = "stopped"
    """No rank will go on; the reason has been told."""
    DONE = "done"
    """Every rank has come to the end."""


class Wrapper:
    """What ranks run in, as far as the coordinator has to do with it; this one knows of nothing."""

    def lost(self, generation: int) -> Iterable[int]:
        """Ranks of a generation that others have found to be gone."""
        return ()

    def stand_in_for(self, generation: int, rank: int) -> None:
        """Do for a rank that is gone what others wait for."""


class Coordinator:
    """To be asked to :meth:`step` often.

    Args:
        store: the job's (any ``torch.distributed.Store``).
        ranks: of the job.
        spare_timeout_s: how long to wait for a spare where none is left.
        report: told, in words, what an operator should know.
        wrapper: what ranks themselves have noticed, and what others must be told in place of one that is gone.
    """

    def __init__(
        self,
        store: Any,
        ranks: int,
        spare_timeout_s: float,
        report: Callable[[str], None],
        wrapper: Wrapper | None = None,
    ) -> None:
        self.state = State.FORMING
        self.cards: dict[int, Card] = {}
        """Of everyone who has joined and lives."""
        self.roster = Roster(-1, {})
        self._store, self._ranks, self._spare_timeout_s, self._report = store, ranks, spare_timeout_s, report
        self._wrapper = wrapper or Wrapper()
        self._joined = self._heard = 0
        self._dead: dict[int, Death] = {}
        self._new_deaths: list[Death] = []
        self._missed: dict[int, float] = {}
        """Since when members that others found gone have not answered; of this interruption."""
        self._short_since: float | None = None
        """Since when everyone else is there and only spares are missing."""
        self._failures = (0, -1)
        store.set(NEWEST, "-1")

    def died(self, member: int, pid: int, how: str) -> int | None:
        """A member is gone; returns the rank that it was, nothing if it was none."""
        if member in self._dead:
            return None  # given up before its process ended
        rank = self.roster.rank_of(member)
        death = Death(member, rank, pid, how, time.time())
        self._dead[member] = death
        self.cards.pop(member, None)
        if rank is not None:
            self._wrapper.stand_in_for(self.roster.generation, rank)
            self._new_deaths.append(death)
            self._interrupted()
            self._short_since = None  # a process for this one has only begun to start
        return rank

    def stop(self, reason: str) -> None:
        """End the job; everyone who waits is told."""
        self._store.set(STOP, reason)
        self.state = State.STOPPED

    def step(self) -> None:
        """Look at the store and do what is to be done; never waits."""
        self._welcome()
        self._hear_of_deaths()
        if self.state in (State.STOPPED, State.DONE):
            return
        # Ranks come to the end together, so what dies after one of them did has nothing left to do.
        if any(self._store.check([DONE.format(self.roster.generation, one)]) for one in self._members()):
            self.state = State.DONE
            self._store.set(STOP, "")
        elif self.state is State.RUNNING and any(self._has_left(one) for one in self._members()):
            self._interrupted()
        elif self.state is State.FORMING:
            self._form()

    def _hear_of_deaths(self) -> None:
        told = int(self._store.add(DEATHS, 0))
        while self._heard < told and self._store.check([DEATH.format(self._heard)]):
            death = json.loads(self._store.get(DEATH.format(self._heard)))
            self._heard += 1
            if death["member"] not in self._dead:
                self.died(**death)
        if self.state is State.FORMING and self.roster.generation >= 0:
            self._find_lost()

    def _find_lost(self) -> None:
        """A node that is lost tells nothing; its ranks have stopped to answer the others.

        Ranks that leave are counted as ended too, by themselves, and then say so here. One that says so too late is
        told to end: it has no rank any more.
        """
        for rank in self._wrapper.lost(self.roster.generation):
            member = self.roster.ranks.get(rank)
            if member is None or member in self._dead or self._has_left(member):
                continue
            if time.monotonic() - self._missed.setdefault(member, time.monotonic()) > LOST_S:
                self.died(member, self.cards[member].pid if member in self.cards else 0, "does not answer")
                self._store.set(GIVEN_UP.format(member), "")

    def waiting(self) -> list[int]:
        """Members that could take a rank, those of the roster not among them; in the order in which they came."""
        return [member for member in self.cards if member not in self._members()]

    def who(self) -> list[dict[str, Any]]:
        """Everyone who takes part, as ``ranks.json`` has it: ranks in their order, then spares."""
        ranks: list[tuple[int | None, int]] = [
            *sorted(self.roster.ranks.items()),
            *((None, one) for one in self.waiting()),
        ]
        cards = [(rank, self.cards[member]) for rank, member in ranks if member in self.cards]
        return [
            {
                "rank": rank, "pid": card.pid, "host": card.host, "node": card.node,
                "role": "spare" if rank is None else "active",
            }
            for rank, card in cards
        ]  # fmt: skip

    def _members(self) -> list[int]:
        return list(self.roster.ranks.values())

    def _interrupted(self) -> None:
        if self.state is State.RUNNING:
            self.state, self._short_since = State.FORMING, None
            self._missed.clear()

    def _welcome(self) -> None:
        joined = int(self._store.add(JOINED, 0))
        while self._joined < joined:
            if not self._store.check([MEMBER.format(self._joined)]):
                return  # its number is taken, its card not yet written
            card = Card(**json.loads(self._store.get(MEMBER.format(self._joined))))
            self._joined += 1
            if card.member not in self._dead:
                self.cards[card.member] = card

    def _has_left(self, member: int) -> bool:
        return bool(self._store.check([LEFT.format(self.roster.generation, member)]))

    def _form(self) -> None:
        survivors = {rank: member for rank, member in self.roster.ranks.items() if member not in self._dead}
        if not all(self._has_left(member) for member in survivors.values()):
            return
        left_at = time.time()
        missing = [rank for rank in range(self._ranks) if rank not in survivors]
        if self.roster.generation < 0 and any(
            member not in self.cards and member not in self._dead for member in range(self._ranks)
        ):
            return  # the first ones are the ranks, in their order, however long they take to start
        spares = sorted(self.waiting()) if self.roster.generation < 0 else self.waiting()
        if len(spares) < len(missing):
            self._wait_for_spares(len(missing) - len(spares))
            return
        ranks = survivors | dict(zip(missing, spares, strict=False))
        generation = self.roster.generation + 1
        left = [json.loads(self._store.get(LEFT.format(self.roster.generation, one))) for one in survivors.values()]
        reasons = sorted({one["reason"] for one in left if one["reason"]})
        if self._is_stuck(reasons, max((one["committed"] for one in left), default=-1)):
            self.stop(f"it failed {NO_PROGRESS} times in a row in the same place: {reasons[0]}")
            return
        self.roster = Roster(
            generation,
            dict(sorted(ranks.items())),
            tuple(self._new_deaths),
            tuple(reasons),
            formed_at=time.time(),
            first_formed_at=self.roster.first_formed_at or time.time(),
            left_at=left_at,
            spares=len(spares) - len(missing),
            nodes={rank: self.cards[member].node for rank, member in ranks.items()},
        )
        self._new_deaths.clear()
        self._store.set(ROSTER.format(generation), self.roster.encode())
        self._store.set(NEWEST, str(generation))
        self.state = State.RUNNING

    def _is_stuck(self, reasons: list[str], committed: int) -> bool:
        """Whether ranks fail by themselves and again and again; who is killed is no sign of that."""
        count, before = self._failures
        by_itself = not self._new_deaths and self.roster.generation >= 0
        self._failures = (count + 1 if by_itself and committed <= before else int(by_itself), committed)
        return bool(reasons) and self._failures[0] >= NO_PROGRESS

    def _wait_for_spares(self, missing: int) -> None:
        if self.roster.generation < 0:
            return  # the first ones are still starting; who started them knows whether they come
        if self._short_since is None:
            self._short_since = time.monotonic()
            self._report(f"no spare is left; waiting up to {self._spare_timeout_s:g} s for {missing} to start")
        elif time.monotonic() - self._short_since > self._spare_timeout_s:
            self.stop(f"no spare came within {self._spare_timeout_s:g} s for {missing} of {self._ranks} ranks")
