"""Standby of a job: keeps a copy of the job's values, and takes over when the coordinator is lost.

:mod:`moevement_core.rendezvous.mirror` is the coordinator's side of the copy, and
:mod:`moevement_core.rendezvous.office` states the rules.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from typing import Any

from moevement_core.comms.signed_lines import Side, SignedLines
from moevement_core.comms.signed_server import Caller, SignedServer
from moevement_core.comms.token import Token
from moevement_core.rendezvous.lease_client import connect_s
from moevement_core.rendezvous.office import FIRST_TERM, Term
from moevement_core.rendezvous.roster import STOP
from moevement_core.rendezvous.status_page import boot_time_s
from moevement_core.rendezvous.values import Operation, Values

CALLS_IN_LEASE = 5
"""Number of attempts in a lease time to reach the coordinator again."""


class Standby:
    """Standby of one job. One thread calls all methods, and calls :meth:`poll` often.

    Args:
        coordinator: host and port of the coordinator.
        address: address of ``listener``, ``HOST:PORT``, at which supervisors reach this process.
        listener: bound socket that listens.
        token: token of the job.
        clock: returns seconds that also pass while the machine is suspended.
    """

    def __init__(
        self,
        coordinator: tuple[str, int],
        address: str,
        listener: socket.socket,
        token: Token,
        clock: Callable[[], float] = boot_time_s,
    ) -> None:
        self.values = Values()
        """Copy of the job's values."""
        self.term = FIRST_TERM
        """Term of the coordinator; the term of this process once it is a candidate."""
        self.lease_s = 1.0
        """Lease time in seconds."""
        self.is_elected = False
        """True once this process is the coordinator: more than half of the voters obey its term, or the job has ended.
        """
        self.is_over = False
        """True if the job has ended, and the coordinator has told all supervisors."""
        self._coordinator, self._address, self._token, self._clock = coordinator, address, token, clock
        self._server = SignedServer(listener, token, self._take_in, lambda caller: None)
        self._lines: SignedLines | None = None
        self._heard_at = self._called_at = -float("inf")
        self._has_heard = False
        """True if the coordinator has sent a message on the current connection."""
        self._is_refused = False
        """True if no process listens at the coordinator's address any more, on a host that answers."""
        self._may_take_over = self._is_candidate = False
        self._voters: frozenset[str] = frozenset()
        self._operations: list[Operation] = []
        """Operations of which further ones of the same step of the coordinator have not arrived yet."""
        self._mirrored = 0
        """Number of operations that this process has executed."""
        self._calls: dict[str, tuple[float, Term]] = {}
        """Value of the clock at the newest beat of each supervisor that has called this process, and its term."""

    @property
    def voters(self) -> frozenset[str]:
        """Names of the supervisors that the coordinator has named last."""
        return self._voters

    @property
    def has_coordinator(self) -> bool:
        """True if this process has heard of the coordinator within half of a lease time."""
        return self._lines is not None and self._clock() - self._heard_at < self.lease_s / 2

    @property
    def has_callers(self) -> bool:
        """True if a supervisor has called this process within a lease time."""
        return any(self._clock() - at < self.lease_s for at, _ in self._calls.values())

    def poll(self, timeout_s: float) -> None:
        """Copy values, answer supervisors, and become the coordinator if that is due."""
        also = None if self._lines is None else self._lines.socket
        self._server.poll(timeout_s, also=also)
        if not self._is_candidate:
            self._hear_coordinator()
        self._stand()

    def _hear_coordinator(self) -> None:
        now = self._clock()
        if self._lines is None and now - self._called_at > self.lease_s / CALLS_IN_LEASE:
            self._called_at = now
            self._call()
        if self._lines is None:
            return
        try:
            for message in self._lines.receive():
                self._has_heard = True
                self._copy(message)
            if self._lines.is_open and not self._has_heard and now - self._called_at > self.lease_s:
                self._called_at = now
                self._lines.send({"stands_by": self._address})
            self._lines.flush()
        except (ConnectionError, LookupError, TypeError, ValueError, AttributeError):
            self._hang_up()

    def _call(self) -> None:
        try:
            connection = socket.create_connection(self._coordinator, timeout=connect_s(self.lease_s))
        except ConnectionRefusedError:
            self._is_refused = True
        except OSError:
            self._is_refused = False
        else:
            self._is_refused, self._has_heard, self._called_at = False, False, -float("inf")
            self._lines = SignedLines(connection, self._token, Side.CALLER)

    def _hang_up(self) -> None:
        if self._lines is not None:
            self._lines.close()
        self._lines, self._called_at = None, -float("inf")

    def _copy(self, message: Mapping[str, Any]) -> None:
        assert self._lines is not None
        if message.get("is_over"):
            self.is_over = True
            return
        if message.get("begins"):
            self.values, self._operations, self._mirrored, self._may_take_over = Values(), [], 0, False
            return
        self._heard_at = self._clock()
        self._operations += message["operations"]
        if "number" not in message:
            return
        for operation in self._operations:
            if operation[0] == "voters":
                self._voters = frozenset(operation[2].split(",")) - {""}
            else:
                self.values.execute(operation)
        self._operations, self._mirrored = [], int(message["number"])
        self.term, self.lease_s = Term.decode(message["term"]), float(message["lease_s"])
        self._may_take_over = bool(message["may_take_over"])
        self._lines.send({"mirrored": self._mirrored, "at": message["at"]})

    # Supervisors that have lost the coordinator

    def _take_in(self, caller: Caller, message: dict[str, Any]) -> None:
        if "beat" not in message:
            return  # A request on a value, which the supervisor sends to the next coordinator again.
        term = Term.decode(message["term"])
        self._calls[str(message["supervisor"])] = (self._clock(), term)
        if "resigns" in message and self._is_candidate:
            # Some supervisors may already obey the coordinator's last term.
            self.term = Term(max(self.term.number, Term.decode(message["resigns"]).number + 1), self._address)
        self._server.send(
            caller,
            {
                "beat": message["beat"], "in_office": False, "hears_coordinator": self.has_coordinator,
                **({"term": self.term.encode()} if self._is_candidate else {}),
            },
        )  # fmt: skip

    def _stand(self) -> None:
        """Become a candidate if the coordinator is lost, and the coordinator if enough supervisors obey that term."""
        recent = {name: term for name, (at, term) in self._calls.items() if self._clock() - at < self.lease_s}
        if self._is_candidate:
            followers = {name for name, term in recent.items() if term == self.term}
            self.is_elected |= 2 * len(followers & self._voters) > len(self._voters)
            return
        is_lost = (self._lines is None and self._is_refused) or self._clock() - self._heard_at > self.lease_s
        if is_lost and self.values.read(STOP) is not None:
            # Nothing is left to decide, and some supervisors may not know that the job has ended.
            newest = max((term.number for term in recent.values()), default=0)
            self._hang_up()
            self.is_elected, self.term = True, Term(max(self.term.number, newest) + 1, self._address)
            return
        callers = {name for name, term in recent.items() if term.number <= self.term.number}
        if self._may_take_over and is_lost and 2 * len(callers & self._voters) > len(self._voters):
            self._hang_up()
            self._is_candidate, self.term = True, Term(self.term.number + 1, self._address)

    def close(self) -> None:
        """Close all connections and the listening socket."""
        self._hang_up()
        self._server.close()
