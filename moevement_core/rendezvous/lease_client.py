"""Lease client: the code with which a supervisor renews the leases of its processes at the coordinator.

:mod:`moevement_core.rendezvous.lease_server` is the other side. A *beat* is one renewal: a message with the list of
processes that are alive. On the same connection, the client passes requests of the processes on the job's values.
"""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from moevement_core.comms.address import address_of
from moevement_core.comms.signed_lines import Side, SignedLines
from moevement_core.comms.token import Token
from moevement_core.rendezvous.drains import Leave
from moevement_core.rendezvous.office import FIRST_TERM, Term
from moevement_core.rendezvous.status_page import boot_time_s
from moevement_core.rendezvous.values import RequestKind, Watcher, in_lines

BEATS = 10
"""Number of renewals that a supervisor sends in one lease time."""
LEASES_WITHOUT = 6
"""Number of lease times for which a supervisor still tries to reach the coordinator after its leases have run out.

Then the supervisor ends its processes and itself.
"""
CONNECT_S = 1.0
"""Longest time to establish a connection, in seconds."""
CONNECTS_IN_LEASE = 4
"""Number of attempts to connect to a lost host that fit into a lease time, if that limits them to less than
:data:`CONNECT_S`."""
MOST_BEATS_BETWEEN_CALLS = 4
"""Longest pause between two attempts to connect, as a multiple of the time between two renewals.

Without pauses, all supervisors could reconnect at once, and the server might authenticate none of them in time. Even
the longest pause is well below a lease time.
"""


def connect_s(lease_s: float) -> float:
    """Return the longest time to establish a connection, in seconds.

    An attempt to reach a host without power takes this long, and blocks the beats of a supervisor. If a few attempts
    took a whole lease time, a new coordinator would count processes as lost whose supervisors still call the old one.
    """
    return min(CONNECT_S, lease_s / CONNECTS_IN_LEASE)


@dataclass(slots=True)
class _Ask:
    """Request on a value that the server has not answered yet."""

    kind: str
    key: str
    value: str | None
    then: Callable[[str | None], None]
    is_sent: bool = False
    """True if the request was sent on the current connection."""


class LeaseClient:
    """Lease client of one supervisor. One thread calls all methods, and no method blocks for longer than a second.

    Args:
        name: name of the supervisor, unique in the job; empty until the supervisor knows it.
        address: host and port of the lease server.
        lease_s: lease time in seconds from the script's flags; the server's answers may change it.
        token: token of the job.
        started_by: ``NODE/NUMBER`` if a command of the coordinator has started this supervisor: the node, and how often
            the coordinator has run a command for the node (:data:`~moevement_core.util.environment.START_ENV`); else
            empty. From this name, the coordinator knows which nodes have connected supervisors.
    """

    def __init__(self, name: str, address: tuple[str, int], lease_s: float, token: Token, started_by: str = "") -> None:
        self.lease_s = lease_s
        self.held_until = boot_time_s() + lease_s
        """Time at which the leases of this supervisor's processes end, in seconds of the boot-time clock."""
        self.given_up: set[int] = set()
        """Members of this supervisor that the coordinator counts as dead."""
        self.leaves: dict[int, Leave] = {}
        """Members of this supervisor that are to give their rank back."""
        self.unhealthy = ""
        """Reason for which the node is not healthy; empty if it is."""
        self.is_leaving = False
        """True if the scheduler takes the node away; :attr:`unhealthy` is its notice then."""
        self.stop: dict[str, Any] | None = None
        """Reason and exit code of the ended job; None while it goes on."""
        self.is_winding_down = False
        """True if the job was asked to end at the next boundary between iterations."""
        self.is_connected = False
        """True from an answer of the server until the connection breaks."""
        self.generation = -1
        """Newest generation that has started; -1 before the job was formed."""
        self.has_trained = False
        """True if the job has committed an iteration."""
        self.name = name
        self.was_refused = False
        """True if the server has closed a connection right after this process sent its proof of the token."""
        self.start_standby = False
        """True if the coordinator wants this supervisor to have a standby."""
        self.resigns: Term | None = None
        """Term that this process gives up; None unless it is a coordinator that has resigned."""
        self.has_standby = False
        """True if this supervisor has started a standby that still runs."""
        self.on_change: Watcher = lambda key, value: None
        self._asks: dict[int, _Ask] = {}
        """Requests that the server has not answered yet, by number, in the order in which they came."""
        self._asked = 0
        """Number of the newest request."""
        self._watched: dict[str, None] = {}
        """Keys whose changes the server sends."""
        self._configured_lease_s, self._token = lease_s, token
        self.address = address
        """Host and port of the coordinator that this supervisor has heard last."""
        self.other: tuple[str, int] | None = None
        """Host and port of the standby, or of another process that may be the coordinator; None if there is none."""
        self._further: tuple[str, int] | None = None
        """Host and port of the coordinator that ``job.json`` names; None if it is not known."""
        self._called = address
        """Host and port at which the current connection ends."""
        self.term = FIRST_TERM
        """Newest term that this supervisor has heard of; it obeys no older one."""
        self._started_by = started_by
        self._lines: SignedLines | None = None
        self._has_heard = False
        """True if the server has sent a message on the current connection."""
        self._replaced: SignedLines | None = None
        """Old connection, on which no answers have arrived for some time; None unless the client has a newer one.

        The client first sends a message on the new connection, and then closes the old one. In the opposite order, the
        server would count this supervisor as gone. If the new connection is to another process, the client keeps the
        old one until the other process has proved to be in office.
        """
        self._replaced_called = address
        """Host and port at which the old connection ends."""
        self._beat = 0
        """Number of the newest renewal."""
        self._sent_at: dict[int, float] = {}
        """Time at which each recent renewal was sent, by its number, in seconds of the boot-time clock."""
        self._beat_at = self._tried_at = -float("inf")
        self.heard_at = -float("inf")
        """Monotonic time in seconds of the server's newest answer."""
        self._calls = 0
        """Number of attempts to connect since the server last answered."""
        self._random = random.Random(name)
        self._news: list[dict[str, Any]] = []
        """Deaths that the server has not acknowledged yet, in the order in which this supervisor saw them.

        Each entry has the number of the renewal that first reported the death on the current connection.
        """
        self._request: dict[str, Any] | None = None
        """Request to end the job that the server has not acknowledged yet; None if there is none.

        The entry ``beat`` is the number of the renewal that first had the request on the current connection.
        """

    def died(self, member: int, pid: int, how: str) -> None:
        """Report that a process of this supervisor has ended, in each renewal until the server acknowledges the report.

        Args:
            member: the member.
            pid: its process id.
            how: description of its end, for log lines.
        """
        self._news.append({"member": member, "pid": pid, "how": how, "beat": None})
        self._beat_at = -float("inf")

    def request(self, kind: str, why: str, code: int = 1) -> None:
        """Ask the coordinator to end the job, in each renewal until the server acknowledges the request.

        Args:
            kind: ``stop`` to end the job now, or ``wind_down`` to end it at the next boundary between iterations.
            why: reason, for the user.
            code: exit code of the job, for ``stop``.
        """
        self._request = {"kind": kind, "why": why, "code": code, "beat": None}
        self._beat_at = -float("inf")

    def notice(self, why: str) -> None:
        """Report that the scheduler takes this node away, now and in all later renewals."""
        self.unhealthy, self.is_leaving, self._beat_at = why, True, -float("inf")

    def look_for(self, coordinator: tuple[str, int] | None) -> None:
        """Call a further coordinator too, if one is known, in turns with those that this supervisor has heard of."""
        self._further = coordinator

    def ask(self, kind: str, key: str, value: str | None, then: Callable[[str | None], None]) -> None:
        """Pass a request on a value (:meth:`Values.answer`) to the coordinator, and call ``then`` with the answer.

        The request is sent at the next :meth:`flush` or :meth:`step`. After a broken connection it is sent again, so
        the coordinator may execute it more than once.
        """
        if kind == RequestKind.WATCH:
            self._watched[key] = None
        self._asked += 1
        self._asks[self._asked] = _Ask(kind, key, value, then)

    def flush(self) -> None:
        """Send the requests that wait, if there is a connection."""
        unsent = [(number, ask) for number, ask in self._asks.items() if not ask.is_sent]
        if self._lines is None or not self._lines.is_open:
            return
        try:
            self._lines.flush()
            for line in in_lines(unsent, lambda numbered: numbered[1].value):
                self._lines.send({"asks": [(number, ask.kind, ask.key, ask.value) for number, ask in line]})
        except ConnectionError:
            self._disconnect()
        for _, ask in unsent:
            ask.is_sent = True

    @property
    def own_host(self) -> str:
        """Address of this host at which the coordinator's host reaches it; empty without a connection."""
        return "" if self._lines is None else str(self._lines.socket.getsockname()[0])

    @property
    def connection(self) -> socket.socket | None:
        """Socket on which answers arrive; None without a connection."""
        return None if self._lines is None else self._lines.socket

    def step(self, members: Iterable[int], alive: Mapping[int, int | None]) -> None:
        """Renew the leases if that is due, and read the server's answers.

        If the connection is broken, or no answer has arrived for twice the time between renewals, connect again.

        Args:
            members: all members of this supervisor that have not ended.
            alive: members that run and are not stopped (SIGSTOP), each with the newest iteration that it has committed.
        """
        now = time.monotonic()
        interval_s = self.lease_s / BEATS
        # After an outage of the network, TCP may wait long before it retransmits on a silent connection. A new
        # connection is faster.
        is_silent = self._lines is not None and now - max(self.heard_at, self._tried_at) > 2 * interval_s
        if (self._lines is None or is_silent) and now - self._tried_at >= self._pause_s(interval_s):
            self._connect(now)
        if self._lines is not None and not self._lines.is_open:
            self._receive()
        if self._lines is not None and self._lines.is_open and now - self._beat_at >= interval_s:
            self._beat_at = now
            self._send(members, alive)
        self.flush()
        self._receive()

    def _pause_s(self, interval_s: float) -> float:
        """Return the pause in seconds before the next attempt to connect, counted from the last attempt.

        The first pause is ``interval_s``. For later pauses, a limit doubles with each attempt, up to
        :data:`MOST_BEATS_BETWEEN_CALLS` times ``interval_s``. The pause is a random time between half of the limit and
        the limit, so that supervisors do not all connect at once.
        """
        if self._calls <= 1:
            return interval_s
        beats = min(2 ** (self._calls - 1), MOST_BEATS_BETWEEN_CALLS)
        return interval_s * beats * self._random.uniform(0.5, 1.0)

    def _connect(self, now: float) -> None:
        self._tried_at = now
        # Without an answer, the coordinator, the standby and what job.json names are called in turns.
        known = [*dict.fromkeys(each for each in (self.address, self.other, self._further) if each is not None)]
        called = known[self._calls % len(known)]
        self._calls += 1
        try:
            connection = socket.create_connection(called, timeout=connect_s(self.lease_s))
        except OSError:
            return  # An older connection may still be open, and bring answers of the process that it ends at.
        if self._lines is not None and self._lines.is_open and self._replaced is None:
            self._replaced, self._replaced_called = self._lines, self._called
        elif self._lines is not None:
            self._lines.close()
        self._called = called
        self._lines, self._beat_at = SignedLines(connection, self._token, Side.CALLER), -float("inf")
        self._has_heard = False
        self._send_again()

    def _send_again(self) -> None:
        """Send all that is not answered on the current connection, which is another one than before."""
        for unanswered in (*self._news, *([self._request] if self._request else ())):
            unanswered["beat"] = None
        for ask in self._asks.values():
            ask.is_sent = False
        asked = {ask.key for ask in self._asks.values() if ask.kind == RequestKind.WATCH}
        for key in self._watched.keys() - asked:
            self.ask(RequestKind.WATCH, key, None, partial(self._has_changed, key))

    def _send(self, members: Iterable[int], alive: Mapping[int, int | None]) -> None:
        assert self._lines is not None
        self._beat += 1
        self._sent_at = {beat: at for beat, at in self._sent_at.items() if beat > self._beat - 4 * BEATS}
        self._sent_at[self._beat] = boot_time_s()
        message: dict[str, Any] = {
            "beat": self._beat, "supervisor": self.name, "members": sorted(members), "alive": dict(alive),
            "lease_s": self._configured_lease_s, "started_by": self._started_by, "term": self.term.encode(),
            "has_standby": self.has_standby, "unhealthy": self.unhealthy, "is_leaving": self.is_leaving,
        }  # fmt: skip
        if self.resigns is not None:
            message["resigns"] = self.resigns.encode()
        for news in self._news:
            news["beat"] = news["beat"] or self._beat
        if self._news:
            message["died"] = [{key: news[key] for key in ("member", "pid", "how")} for news in self._news]
        if self._request is not None:
            self._request["beat"] = self._request["beat"] or self._beat
            message["request"] = self._request
        try:
            self._lines.send(message)
        except ConnectionError:
            self._disconnect()
        if self._called == self._replaced_called:
            self._close_replaced()

    def _receive(self) -> None:
        if self._lines is None:
            return
        try:
            for answer in self._lines.receive():
                self._has_heard, self.was_refused = True, False
                self._take_in_values(answer)
                if "taken" in answer:
                    self._forget_news(int(answer["taken"]))
                if "beat" in answer:
                    self._take_in(answer)
        except (ConnectionError, KeyError, TypeError, ValueError, AttributeError):
            self.was_refused |= self._lines.is_open and not self._has_heard
            if self._has_heard and self._called == self.address:
                # A standby closes its connections when it becomes the coordinator. Another call of the coordinator
                # before it, whose host may be lost, would cost much of the lease time.
                self._calls = 0
            self._disconnect()

    def _take_in_values(self, answer: dict[str, Any]) -> None:
        for number, value in answer.get("answers", ()):
            if (ask := self._asks.pop(number, None)) is not None:
                ask.then(value)
        for key, value in answer.get("changes", ()):
            self._has_changed(key, value)

    def _has_changed(self, key: str, value: str | None) -> None:
        if value is not None:
            self.on_change(key, value)

    def _obeys(self, answer: dict[str, Any]) -> bool:
        """Return True if the sender of an answer is in office, as far as this supervisor knows.

        Otherwise the sender is a standby, or a coordinator that is not sure whether the standby has taken over. A
        standby that is about to take over begins a new term, and learns from the next beat whether this supervisor
        obeys it.

        Raises:
            ConnectionError: there is a newer term than that of the sender, or the standby hears the coordinator.
        """
        term = Term.decode(answer.get("term", self.term.encode()))
        if term.number > self.term.number:
            self.term, self._beat_at = term, -float("inf")
            if self._called != self.address:  # The other one may still turn out to be in office.
                self.other, self.address = self.address, self._called
            self._calls = 0
        elif term != self.term or answer.get("hears_coordinator"):
            raise ConnectionError("this supervisor obeys another coordinator")
        return bool(answer.get("in_office", True))

    def _take_in(self, answer: dict[str, Any]) -> None:
        if not self._obeys(answer):
            return
        self._close_replaced()
        self.other = address_of(text) if (text := answer.get("standby")) else None
        self.start_standby = bool(answer.get("start_standby", False))
        beat = int(answer["beat"])
        self.heard_at = time.monotonic()
        self.is_connected, self._calls = True, 0
        self.lease_s = float(answer["lease_s"])
        if (sent_at := self._sent_at.get(beat)) is not None:
            self.held_until = max(self.held_until, sent_at + self.lease_s)
        self.given_up |= set(answer["given_up"])
        self.leaves = {int(member): Leave(int(after), int(turn)) for member, after, turn in answer.get("leaves", ())}
        self.is_winding_down = bool(answer.get("wind_down", False))
        self.generation = int(answer.get("generation", -1))
        self.has_trained = bool(answer.get("has_trained", False))
        if "stop" in answer:
            self.stop = answer["stop"]

    def _forget_news(self, beat: int) -> None:
        """Forget the deaths and the request that the renewal ``beat`` had, because the coordinator has taken them."""
        self._news = [news for news in self._news if news["beat"] is None or news["beat"] > beat]
        if self._request is not None and self._request["beat"] is not None and self._request["beat"] <= beat:
            self._request = None

    def _disconnect(self) -> None:
        if self._lines is not None:
            self._lines.close()
        self._lines, self.is_connected = self._replaced, False
        if self._replaced is not None:
            # The server would count this supervisor as gone if this connection were closed as well.
            self._called, self._replaced, self._has_heard = self._replaced_called, None, True
            self._send_again()

    def _close_replaced(self) -> None:
        if self._replaced is not None:
            self._replaced.close()
            self._replaced = None

    def close(self) -> None:
        """Close the connection to the server, which then counts this supervisor as gone."""
        self._close_replaced()
        self._disconnect()
