"""Lease server: runs in the coordinator's process, and renews the leases of processes that supervisors find alive.

Each supervisor has a connection to the server. Several times in a lease time, it sends a *beat*: the list of its
processes that are alive. The server's answer renews the leases of these processes. The server notices a broken
connection at once. Usually the supervisor has then ended, and its processes end with it.

Messages are signed lines of JSON. A caller has to prove that it has the job's token. The server limits the number of
connections whose callers have not proved this yet, and closes a connection if the proof does not arrive in time.
"""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from moevement_core.comms.signed_lines import Side, SignedLines
from moevement_core.comms.token import Token

ADDRESS = "leases/address"
"""Key in the job's store for ``host:port`` of the lease server."""
GREETING_S = 10.0
"""Seconds after which the server closes a connection whose caller has not proved that it has the job's token."""
MOST_UNKNOWN = 64
"""Largest number of accepted connections whose callers have not yet proved that they have the job's token. Later
callers wait in the listener's queue."""
MOST_LATE = 0.05
"""Longest time for which a call of :meth:`LeaseServer.poll` goes on after its timeout, as a share of the lease time."""
SHORT_GREETING_S = 1.0
"""Value that replaces :data:`GREETING_S` while :data:`MOST_UNKNOWN` callers have not sent their proof yet.

A second is enough, because the proof takes only one round trip.
"""


class LeaseHolder(Protocol):
    """Methods of the coordinator that the lease server calls."""

    lease_s: float
    given_up: set[int]

    def renew(self, members: Mapping[int, int | None]) -> None:
        """Renew the leases of ``members``; the value is the newest iteration that the member has committed."""

    def disconnected(self, members: Iterable[int]) -> None:
        """Note that the connection of the supervisor of ``members`` broke."""

    def died(self, member: int, pid: int, how: str) -> int | None:
        """Record that a supervisor saw a process end; return the rank of the process, None for a spare."""


@dataclass(slots=True, eq=False)
class _Supervisor:
    lines: SignedLines
    since: float
    name: str = ""
    started_by: str = ""
    members: set[int] = field(default_factory=set)
    heard_at: float = 0.0


class LeaseServer:
    """Server for the renewal of leases. One thread of the coordinator calls all methods, and calls :meth:`poll` often.

    Args:
        listener: bound socket that listens.
        holder: the coordinator.
        token: token of the job.
        on_request: called with a supervisor's request: its kind (``stop`` or ``wind_down``), the reason, and an exit
            code.
    """

    def __init__(
        self,
        listener: socket.socket,
        holder: LeaseHolder,
        token: Token,
        on_request: Callable[[str, str, int], None],
    ) -> None:
        listener.setblocking(False)
        self._listener, self._holder, self._token, self._on_request = listener, holder, token, on_request
        self.unauthenticated = 0
        """Number of connections that were closed before their callers had proved that they have the job's token."""
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ, None)
        self._is_accepting = True
        self._connections: dict[socket.socket, _Supervisor] = {}
        self._unknown: dict[_Supervisor, None] = {}
        """Connections whose callers have not yet proved that they have the job's token, the oldest first."""
        self._by_name: dict[str, _Supervisor] = {}

    def poll(self, timeout_s: float, answer: Mapping[str, Any]) -> None:
        """Accept connections, read messages of supervisors, and answer each of them, until the timeout is over.

        The call takes longer if messages are waiting. Otherwise the messages of thousands of supervisors would wait for
        ever more calls, and leases would run out.

        Args:
            timeout_s: seconds that the call takes if no message is waiting at its end.
            answer: fields for every answer, which tell supervisors the generation, progress and end of the job.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            ready = self._selector.select(max(0.0, deadline - time.monotonic()))
            for key, _ in ready:
                if key.fileobj is self._listener:
                    self._accept()
                else:
                    self._read(self._connections[key.fileobj], answer)  # type: ignore[index]
            self._bound_unknown()
            late_s = time.monotonic() - deadline
            if late_s >= 0 and (not ready or late_s > self._holder.lease_s * MOST_LATE):
                return

    def _bound_unknown(self) -> None:
        """Limit the number of connections whose callers have not proved yet that they have the job's token.

        Close a connection if its proof does not arrive in time. Accept no further connection while
        :data:`MOST_UNKNOWN` proofs are pending. Never close a connection only to accept another: after an outage of the
        network, all supervisors connect at once, and each has to wait only for the proofs of the callers before it.
        """
        now = time.monotonic()
        allowed_s = SHORT_GREETING_S if len(self._unknown) >= MOST_UNKNOWN else GREETING_S
        while self._unknown and now - (oldest := next(iter(self._unknown))).since > allowed_s:
            self._drop(oldest)
        if (is_accepting := len(self._unknown) < MOST_UNKNOWN) is self._is_accepting:
            return
        self._is_accepting = is_accepting
        if is_accepting:
            self._selector.register(self._listener, selectors.EVENT_READ, None)
        else:
            self._selector.unregister(self._listener)

    def _accept(self) -> None:
        with suppress(OSError):
            while len(self._unknown) < MOST_UNKNOWN:
                connection, _ = self._listener.accept()
                supervisor = _Supervisor(SignedLines(connection, self._token, Side.CALLED), time.monotonic())
                self._connections[connection] = supervisor
                self._unknown[supervisor] = None
                self._selector.register(connection, selectors.EVENT_READ)

    def _read(self, supervisor: _Supervisor, answer: Mapping[str, Any]) -> None:
        try:
            messages = supervisor.lines.receive()
            if supervisor.lines.is_open:
                self._unknown.pop(supervisor, None)
            for message in messages:
                self._take_in(supervisor, message, answer)
        except (ConnectionError, KeyError, TypeError, ValueError, AttributeError):
            self._drop(supervisor)

    def _take_in(self, supervisor: _Supervisor, message: dict[str, Any], answer: Mapping[str, Any]) -> None:
        if name := message.get("supervisor"):
            # Only the newest connection of a supervisor counts. If an older one breaks, no lease is affected.
            supervisor.name = str(name)
            self._by_name[supervisor.name] = supervisor
            supervisor.started_by = str(message.get("started_by", ""))
        if "lease_s" in message:  # A flag of the script sets the lease time, and only supervisors see the flag.
            self._holder.lease_s = float(message["lease_s"])
        for death in message.get("died", ()):
            self._holder.died(int(death["member"]), int(death["pid"]), str(death["how"]))
        if (request := message.get("request")) is not None:
            self._on_request(str(request["kind"]), str(request["why"]), int(request["code"]))
        alive = {int(member): committed for member, committed in message.get("alive", {}).items()}
        supervisor.members = set(alive)
        self._holder.renew(alive)
        supervisor.heard_at = time.monotonic()
        members = set(map(int, message.get("members", ())))
        supervisor.lines.send(
            {
                "beat": message["beat"], "lease_s": self._holder.lease_s,
                "given_up": sorted(members & self._holder.given_up), **answer,
            }
        )  # fmt: skip

    def _drop(self, supervisor: _Supervisor) -> None:
        self.unauthenticated += not supervisor.lines.is_open
        self._selector.unregister(supervisor.lines.socket)
        del self._connections[supervisor.lines.socket]
        self._unknown.pop(supervisor, None)
        supervisor.lines.close()
        if self._by_name.get(supervisor.name) is supervisor:
            del self._by_name[supervisor.name]
            self._holder.disconnected(supervisor.members)

    @property
    def supervisors(self) -> int:
        """Number of supervisors that have sent a message within the lease time."""
        since = time.monotonic() - self._holder.lease_s
        return sum(supervisor.heard_at > since for supervisor in self._by_name.values())

    @property
    def heard(self) -> set[str]:
        """Start name (:attr:`connected`) of each supervisor that has sent a message within the lease time."""
        since = time.monotonic() - self._holder.lease_s
        return {supervisor.started_by for supervisor in self._by_name.values() if supervisor.heard_at > since}

    @property
    def connected(self) -> set[str]:
        """Start name of each supervisor that is connected now; empty for one that the coordinator has not started.

        A start name is ``NODE/NUMBER``: the supervisor's node, and how often the coordinator has started its command.
        """
        return {supervisor.started_by for supervisor in self._by_name.values()}

    def close(self) -> None:
        """Close every connection and the listening socket."""
        for supervisor in list(self._connections.values()):
            supervisor.lines.close()
        self._selector.close()
        self._listener.close()
