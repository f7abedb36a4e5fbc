"""Office of the coordinator: which process may decide for the job, while another one may take over.

A job has one coordinator in office. A *standby* keeps a copy of the job's values, and takes over when the coordinator
is lost. Two rules keep the two from deciding at the same time:

- Each time in office has a *term*: a number, and the address of the coordinator. A supervisor obeys the newest term
  that it has heard of, and of two terms with the same number only the first.
- The standby needs more than half of the supervisors for a new term. It asks them only when it has not heard of the
  coordinator for a lease time, or when the coordinator's process has certainly ended. The coordinator answers
  supervisors only while the standby has heard of it within a lease time. To go on without a standby, it needs half of
  the supervisors for a new term, or certainty that the standby's process has ended.

So at most one of the two gets enough supervisors. The supervisors whose agreement counts are the *voters*. The
coordinator tells the standby who they are.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from moevement_core.rendezvous.status_page import boot_time_s


@dataclass(frozen=True)
class Term:
    """Time of a coordinator in office; numbers grow."""

    number: int
    owner: str
    """Address of the coordinator, ``HOST:PORT``."""

    def encode(self) -> list[int | str]:
        """Return this object for a message."""
        return [self.number, self.owner]

    @staticmethod
    def decode(value: Any) -> Term:
        """Return the term in a message.

        Raises:
            ValueError: the value is no encoded term.
        """
        number, owner = value
        return Term(int(number), str(owner))


FIRST_TERM = Term(0, "")
"""Term before the first message of a coordinator."""


class Office:
    """Office of one coordinator; the object has no connection and no thread.

    Args:
        term: term of the coordinator.
        clock: returns seconds that also pass while the machine is suspended.
    """

    def __init__(self, term: Term, clock: Callable[[], float] = boot_time_s) -> None:
        self.term = term
        self.is_deposed = False
        """True if another coordinator has a newer term, so that this one must not decide any more."""
        self.standby = ""
        """Address of the standby that may take over; empty if there is none."""
        self._clock = clock
        self._heard_at = 0.0
        """Value of the clock when this coordinator sent the newest message that the standby has answered."""
        self._voters: list[tuple[int, frozenset[str]]] = []
        """Names of the voters that the standby knows, and later lists that it may know, each with its number."""
        self._followers: set[str] = set()
        """Supervisors that obey the current term."""
        self.successor = ""
        """Address of the coordinator that has deposed this one; empty if none has."""
        self._before = term
        """Term before that in which the standby may not take over."""
        self.is_dropping = False
        """True while this coordinator asks supervisors to obey a term without the standby."""

    def has(self, lease_s: float) -> bool:
        """Return True if this coordinator may decide: no standby can have taken over."""
        return not self.is_deposed and (not self.standby or self._clock() - self._heard_at < lease_s)

    def misses_standby(self, lease_s: float, since: float) -> bool:
        """Return True if the standby has not answered for half of a lease time after ``since`` on the clock."""
        return bool(self.standby) and self._clock() - max(self._heard_at, since) > lease_s / 2

    @property
    def term_of_standby(self) -> Term:
        """Term that the standby may end, which is not that of supervisors that obey this coordinator alone."""
        return self._before if self.is_dropping else self.term

    # The standby

    def begin_with(self, standby: str, sent_at: float, voters: Collection[str], number: int) -> None:
        """Note that a standby has copied all values, and may take over from now on.

        Args:
            standby: address of the standby.
            sent_at: value of the clock when this coordinator sent the newest message that the standby has answered.
            voters: names of the voters, as the standby knows them.
            number: number of the list of voters (:meth:`offer`).
        """
        self.standby, self._heard_at = standby, sent_at
        self._voters, self.is_dropping = [(number, frozenset(voters))], False

    def offer(self, voters: Collection[str], number: int) -> None:
        """Note that a further list of voters was sent to the standby as the message ``number``."""
        self._voters.append((number, frozenset(voters)))

    def answered(self, sent_at: float, number: int) -> None:
        """Note that the standby has answered a message.

        Args:
            sent_at: value of the clock when this coordinator sent it.
            number: number of the newest message that the standby has.
        """
        self._heard_at = max(self._heard_at, sent_at)
        while len(self._voters) > 1 and self._voters[1][0] <= number:
            del self._voters[0]

    def drop(self) -> None:
        """Begin a term in which the standby may not take over. It counts once half of the voters obey the term."""
        if self.standby and not self.is_dropping:
            self.is_dropping, self._followers, self._before = True, set(), self.term
            self.term = Term(self.term.number + 1, self.term.owner)
            self._end_dropping()

    def standby_has_ended(self) -> None:
        """Note that the standby's process has certainly ended, so that nobody can take over any more."""
        self.standby, self.is_dropping, self._voters = "", False, []

    def resigns_for(self, term: Term) -> bool:
        """Resign if ``term`` is of a standby that has begun to take over; return True in this case.

        This coordinator then asks no supervisor for a term any more. So the standby may ask those that obey this one's.
        """
        if self.standby and term.owner == self.standby and term.number >= self.term.number:
            self.is_deposed, self.successor = True, term.owner
        return self.is_deposed

    # Supervisors

    def heard(self, supervisor: str, term: Term) -> None:
        """Note the term that a supervisor obeys."""
        if term == self.term:
            self._followers.add(supervisor)
            self._end_dropping()
        elif term.number > self.term.number:
            self.is_deposed, self.successor = True, term.owner
        elif term.number == self.term.number and not self.is_dropping:
            # A coordinator that is lost has asked this supervisor for the same number, but not enough others.
            if self.standby:
                self.drop()
            else:
                self.term = Term(self.term.number + 1, self.term.owner)

    def _end_dropping(self) -> None:
        if self.is_dropping and all(2 * len(self._followers & voters) >= len(voters) for _, voters in self._voters):
            self.standby, self.is_dropping, self._voters = "", False, []
