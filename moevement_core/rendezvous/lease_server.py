"""Leases between supervisors and the coordinator, over a connection that carries nothing else; the coordinator's side.

A supervisor sends, several times in a lease time, which of its processes it finds alive; each answer renews their
leases. A connection that breaks is noticed at once: a supervisor's processes end with it. Messages are lines of JSON,
signed; who does not show that it has the job's token is cut off, and there are never many such connections.
"""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from moevement_core.rendezvous.signed_lines import Side, SignedLines
from moevement_core.rendezvous.token import Token

ADDRESS = "leases/address"
"""Key in the job's store of the lease server's address, ``host:port``."""
GREETING_S = 10.0
"""Seconds within which a caller has to show that it has the job's token."""
MOST_UNKNOWN = 64
"""Connections that have not yet; of more the oldest is cut off."""


class LeaseHolder(Protocol):
    """The coordinator, as far as supervisors have to do with it."""

    lease_s: float
    given_up: set[int]

    def renew(self, members: Mapping[int, int | None]) -> None:
        """Renew the leases of these live members."""

    def disconnected(self, members: Iterable[int]) -> None:
        """The connection of their supervisor broke."""

    def died(self, member: int, pid: int, how: str) -> int | None:
        """A supervisor saw a process end."""


@dataclass(slots=True, eq=False)
class _Supervisor:
    lines: SignedLines
    since: float
    name: str = ""
    started_by: str = ""
    members: set[int] = field(default_factory=set)
    heard_at: float = 0.0


class LeaseServer:
    """The coordinator's side. All methods are for one thread, which asks it to :meth:`poll` often.

    Args:
        listener: a bound socket that listens.
        holder: the coordinator.
        token: the job's.
        on_request: called with what a supervisor asks of the job: ``stop`` and why, or ``wind_down`` and why.
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
        self.strangers = 0
        """Connections that did not show in time that they have the token."""
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ, None)
        self._connections: dict[socket.socket, _Supervisor] = {}
        self._by_name: dict[str, _Supervisor] = {}

    def poll(self, timeout_s: float, answer: Mapping[str, Any]) -> None:
        """Take in what has come, and answer each beat.

        Args:
            timeout_s: how long to wait for something.
            answer: what every supervisor is to know: whether and why the job has ended.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            for key, _ in self._selector.select(max(0.0, deadline - time.monotonic())):
                if key.fileobj is self._listener:
                    self._accept()
                else:
                    self._read(self._connections[key.fileobj], answer)  # type: ignore[index]
            self._cut_off_strangers()
            if time.monotonic() >= deadline:
                return

    def _cut_off_strangers(self) -> None:
        now = time.monotonic()
        unknown = [one for one in self._connections.values() if not one.lines.is_open]
        for number, one in enumerate(unknown):  # the oldest first
            if now - one.since > GREETING_S or len(unknown) - number > MOST_UNKNOWN:
                self._drop(one)

    def _accept(self) -> None:
        with suppress(OSError):
            connection, _ = self._listener.accept()
            supervisor = _Supervisor(SignedLines(connection, self._token, Side.CALLED), time.monotonic())
            self._connections[connection] = supervisor
            self._selector.register(connection, selectors.EVENT_READ)

    def _read(self, supervisor: _Supervisor, answer: Mapping[str, Any]) -> None:
        try:
            for message in supervisor.lines.receive():
                self._take_in(supervisor, message, answer)
        except (ConnectionError, KeyError, TypeError, ValueError, AttributeError):
            self._drop(supervisor)

    def _take_in(self, supervisor: _Supervisor, message: dict[str, Any], answer: Mapping[str, Any]) -> None:
        if name := message.get("supervisor"):
            # The newest connection of a supervisor counts; that an older one breaks means nothing.
            supervisor.name = str(name)
            self._by_name[supervisor.name] = supervisor
            supervisor.started_by = str(message.get("started_by", ""))
        if "lease_s" in message:  # a flag of the script: tasks know it, and the coordinator does not
            self._holder.lease_s = float(message["lease_s"])
        for death in message.get("died", ()):
            self._holder.died(int(death["member"]), int(death["pid"]), str(death["how"]))
        if (request := message.get("request")) is not None:
            self._on_request(str(request["kind"]), str(request["why"]), int(request["code"]))
        alive = {int(member): committed for member, committed in message.get("alive", {}).items()}
        supervisor.members = set(alive)
        self._holder.renew(alive)
        supervisor.heard_at = time.monotonic()
        ours = set(map(int, message.get("members", ())))
        supervisor.lines.send(
            {
                "beat": message["beat"], "lease_s": self._holder.lease_s,
                "given_up": sorted(ours & self._holder.given_up), **answer,
            }
        )  # fmt: skip

    def _drop(self, supervisor: _Supervisor) -> None:
        self.strangers += not supervisor.lines.is_open
        self._selector.unregister(supervisor.lines.socket)
        del self._connections[supervisor.lines.socket]
        supervisor.lines.close()
        if self._by_name.get(supervisor.name) is supervisor:
            del self._by_name[supervisor.name]
            self._holder.disconnected(supervisor.members)

    @property
    def supervisors(self) -> int:
        """Number of supervisors heard within the lease time."""
        since = time.monotonic() - self._holder.lease_s
        return sum(supervisor.heard_at > since for supervisor in self._by_name.values())

    @property
    def heard(self) -> set[str]:
        """Starters of the supervisors heard within the lease time."""
        since = time.monotonic() - self._holder.lease_s
        return {supervisor.started_by for supervisor in self._by_name.values() if supervisor.heard_at > since}

    @property
    def connected(self) -> set[str]:
        """Starters of the supervisors that have a connection now, by their own report; it breaks
        with their processes.
        """
        return {supervisor.started_by for supervisor in self._by_name.values()}

    def close(self) -> None:
        """Close every connection and the listener."""
        for supervisor in list(self._connections.values()):
            supervisor.lines.close()
        self._selector.close()
        self._listener.close()
