"""Lease server: runs in the coordinator's process, and renews the leases of processes that supervisors find alive.

Each supervisor has a connection to the server. Several times in a lease time, it sends a *beat*: the list of its
processes that are alive. The server's answer renews the leases of these processes. The server notices a broken
connection at once. Usually the supervisor has then ended, and its processes end with it.

On the same connection, the supervisor passes requests of its processes on the job's values (:class:`Values`). So a node
needs one connection for everything that its processes and the coordinator tell each other.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from moevement_core.comms.signed_server import Caller, SignedServer
from moevement_core.comms.token import Token
from moevement_core.rendezvous.values import Kind, Values, Watcher, in_lines

MOST_LATE = 0.05
"""Longest time for which a call of :meth:`LeaseServer.poll` goes on after its timeout, as a share of the lease time."""


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
    changed: Watcher
    """Sends a change of a value that the supervisor watches."""
    name: str = ""
    started_by: str = ""
    members: set[int] = field(default_factory=set)
    heard_at: float = 0.0


class LeaseServer:
    """Server for leases and values. One thread of the coordinator calls all methods, and calls :meth:`poll` often.

    Args:
        listener: bound socket that listens.
        holder: the coordinator.
        token: token of the job.
        on_request: called with a supervisor's request: its kind (``stop`` or ``wind_down``), the reason, and an exit
            code.
        values: values of the job.
    """

    def __init__(
        self,
        listener: socket.socket,
        holder: LeaseHolder,
        token: Token,
        on_request: Callable[[str, str, int], None],
        values: Values,
    ) -> None:
        self._holder, self._on_request, self._values = holder, on_request, values
        self._server = SignedServer(listener, token, self._take_in, self._has_gone)
        self._supervisors: dict[Caller, _Supervisor] = {}
        self._by_name: dict[str, _Supervisor] = {}
        self._answer: Mapping[str, Any] = {}

    @property
    def refused(self) -> int:
        """Number of callers that have not proved in time that they have the job's token, or have failed to."""
        return self._server.refused

    def poll(self, timeout_s: float, answer: Mapping[str, Any]) -> None:
        """Accept connections, read messages of supervisors, and answer each of them.

        The call ends at its timeout, or soon after a member has reported something. It goes on after its timeout while
        messages are waiting, because leases could run out otherwise.

        Args:
            timeout_s: seconds that the call takes if no message is waiting at its end.
            answer: fields for every answer to a beat, which tell supervisors the generation, progress and end of the
                job.
        """
        self._answer = answer
        self._server.poll(
            timeout_s, most_late_s=self._holder.lease_s * MOST_LATE, is_enough=lambda: self._values.has_news
        )

    def _take_in(self, caller: Caller, message: dict[str, Any]) -> None:
        supervisor = self._supervisors.get(caller)
        if supervisor is None:
            supervisor = self._supervisors[caller] = _Supervisor(partial(self._send_change, caller))
        answers: list[tuple[int, str | None]] = []
        for number, kind, key, value in message.get("asks", ()):
            if kind in (Kind.SET, Kind.CLAIM, Kind.RAISE):
                # A change goes out at once. The older value in an answer before it must not arrive after it.
                self._send_answers(caller, answers)
                answers = []
            answers.append((number, self._values.answer(kind, key, value, supervisor.changed)))
        self._send_answers(caller, answers)
        if "beat" in message:
            self._renew(caller, supervisor, message)

    def _send_answers(self, caller: Caller, answers: list[tuple[int, str | None]]) -> None:
        for line in in_lines(answers, lambda answer: answer[1]):
            self._server.send(caller, {"answers": line})

    def _send_change(self, caller: Caller, key: str, value: str) -> None:
        self._server.send(caller, {"changes": [(key, value)]})

    def _renew(self, caller: Caller, supervisor: _Supervisor, message: dict[str, Any]) -> None:
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
        answer = {
            "beat": message["beat"], "lease_s": self._holder.lease_s,
            "given_up": sorted(members & self._holder.given_up), **self._answer,
        }  # fmt: skip
        self._server.send(caller, answer)

    def _has_gone(self, caller: Caller) -> None:
        if (supervisor := self._supervisors.pop(caller, None)) is None:
            return
        self._values.forget(supervisor.changed)
        if self._by_name.get(supervisor.name) is supervisor:
            del self._by_name[supervisor.name]
            self._holder.disconnected(supervisor.members)

    @property
    def supervisors(self) -> int:
        """Number of supervisors that have sent a message within the lease time, with those that are still starting."""
        since = time.monotonic() - self._holder.lease_s
        return sum(supervisor.heard_at > since for supervisor in self._supervisors.values())

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
        self._server.close()
