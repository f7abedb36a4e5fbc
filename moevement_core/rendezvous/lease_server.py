"""Lease server: runs in the coordinator's process, and renews the leases of processes that supervisors find alive.

Each supervisor has a connection to the server. Several times in a lease time, it sends a *beat*: the list of its
processes that are alive. The server's answer renews the leases of these processes. The server notices a broken
connection at once. Usually the supervisor has then ended, and its processes end with it.

On the same connection, the supervisor passes requests of its processes on the job's values (:class:`Values`). So a node
needs one connection for everything that its processes and the coordinator tell each other.

One supervisor also starts a standby, which calls this server too (:mod:`moevement_core.rendezvous.mirror`).
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from moevement_core.comms.address import address_of
from moevement_core.comms.signed_server import Caller, SignedServer
from moevement_core.comms.token import Token
from moevement_core.rendezvous.coordinator import Coordinator
from moevement_core.rendezvous.lease_client import LEASES_WITHOUT
from moevement_core.rendezvous.mirror import MESSAGES_IN_LEASE, Mirror
from moevement_core.rendezvous.office import FIRST_TERM, Office, Term
from moevement_core.rendezvous.values import RequestKind, Values, Watcher, in_lines

MOST_LATE = 0.05
"""Longest time for which a call of :meth:`LeaseServer.poll` goes on after its timeout, as a share of the lease time."""
LEASES_TO_STAND_BY = 3
"""Number of lease times in which the supervisor that is asked for a standby has to start it; then another is asked."""


@dataclass(slots=True, eq=False)
class _Supervisor:
    changed: Watcher
    """Sends a change of a value that the supervisor watches."""
    is_local: bool
    """True if the supervisor is on the coordinator's host."""
    has_standby: bool = False
    """True if the supervisor has started a standby, or a coordinator that was one."""
    name: str = ""
    started_by: str = ""
    members: set[int] = field(default_factory=set)
    heard_at: float = 0.0


class LeaseServer:
    """Server for leases and values. One thread of the coordinator calls all methods, and calls :meth:`poll` often.

    Args:
        listener: bound socket that listens.
        coordinator: coordinator in this process.
        token: token of the job.
        on_request: called with a supervisor's request: its kind (``stop`` or ``wind_down``), the reason, and an exit
            code.
        values: values of the job.
        office: office of the coordinator; None: the job has no other coordinator.
        expected: names of the supervisors that obeyed the coordinator before this one.
    """

    def __init__(
        self,
        listener: socket.socket,
        coordinator: Coordinator,
        token: Token,
        on_request: Callable[[str, str, int], None],
        values: Values,
        office: Office | None = None,
        expected: Iterable[str] = (),
    ) -> None:
        self.office = office or Office(Term(1, ""))
        self.wants_standby = False
        """True if a supervisor is to start a standby."""
        self._coordinator, self._on_request, self._values = coordinator, on_request, values
        self._membership = coordinator.membership
        self._server = SignedServer(listener, token, self._take_in, self._has_gone)
        self.mirror = Mirror(self._server, values, self.office)
        self._began_at = self._stepped_at = self._resumed_at = time.monotonic()
        self._taken: list[tuple[Caller, int]] = []
        """Connections and numbers of beats with deaths and requests that are not acknowledged yet."""
        self._expected = set(expected)
        """Names of supervisors that have not called this coordinator yet, but obeyed the one before it."""
        self._voters: set[str] = set()
        """Names of the supervisors that were connected, and heard within a lease time, when they were last counted."""
        self._counted_at = -float("inf")
        self._asked = ""
        """Name of the supervisor that was asked to start a standby."""
        self._asked_at = -float("inf")
        self._times_asked = 0
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
        if "stop" in answer:
            self.mirror.ends()
        self._step_standby()
        self._server.poll(
            timeout_s, most_late_s=self._membership.lease_s * MOST_LATE, is_enough=lambda: self._values.has_news
        )
        self._step_standby()
        self._server.flush()

    @property
    def is_in_office(self) -> bool:
        """True if this coordinator may decide, or has ended the job, which no other coordinator can change."""
        return self.office.has(self._membership.lease_s) or self.mirror.has_ended

    def _acknowledge_news(self) -> None:
        """Tell supervisors that the coordinator has taken their news, once the standby has what follows from them.

        The supervisors then tell no other coordinator.
        """
        if self._taken:
            self._coordinator.keep()
            for caller, beat in self._taken:
                self.mirror.publish(caller, {"taken": beat})
            self._taken.clear()

    def _step_standby(self) -> None:
        self._acknowledge_news()
        now, lease_s = time.monotonic(), self._membership.lease_s
        if now - self._stepped_at > lease_s / 4:
            self._resumed_at = now  # This process was suspended, and could not hear supervisors.
        self._stepped_at = now
        if now - self._counted_at > lease_s / MESSAGES_IN_LEASE:
            self._counted_at = now
            self._voters = {
                name for name, supervisor in self._by_name.items()
                if now - max(supervisor.heard_at, self._resumed_at) < lease_s
            }  # fmt: skip
        self.mirror.step(self._voters, lease_s)
        if self.wants_standby and not self.office.standby and not self.mirror.has_caller:
            self._ask_for_standby()

    def _ask_for_standby(self) -> None:
        """Choose the supervisor that starts a standby; a further one if the last has not done so in time."""
        now, wait_s = time.monotonic(), LEASES_TO_STAND_BY * self._membership.lease_s
        if not self._by_name or (self._asked in self._by_name and now - self._asked_at < wait_s):
            return
        free = {name: supervisor for name, supervisor in self._by_name.items() if not supervisor.has_standby}
        elsewhere = [name for name, supervisor in free.items() if not supervisor.is_local]
        if not elsewhere and now - self._began_at < wait_s:
            return  # Supervisors of other hosts may still be connecting.
        if names := sorted(elsewhere or free, key=lambda name: (len(name), name)):
            self._asked = names[self._times_asked % len(names)]
        self._asked_at, self._times_asked = now, self._times_asked + 1

    def _take_in(self, caller: Caller, message: dict[str, Any]) -> None:
        if "stands_by" in message:
            address = str(message["stands_by"])
            address_of(address)  # Raises ValueError if it is none.
            self.mirror.joins(caller, address)
            return
        if "mirrored" in message:
            self.mirror.take_in(caller, message)
            return
        supervisor = self._supervisors.get(caller)
        if supervisor is None:
            supervisor = _Supervisor(partial(self._send_change, caller), is_local=_is_local(caller.lines.socket))
            self._supervisors[caller] = supervisor
        answers: list[tuple[int, str | None]] = []
        for number, kind, key, value in message.get("asks", ()):
            if kind in (RequestKind.SET, RequestKind.CLAIM, RequestKind.RAISE):
                # A change goes out at once. The older value in an answer before it must not arrive after it.
                self._send_answers(caller, answers)
                answers = []
            answers.append((number, self._values.answer(kind, key, value, supervisor.changed)))
        self._send_answers(caller, answers)
        if "beat" in message:
            self._renew(caller, supervisor, message)

    def _send_answers(self, caller: Caller, answers: list[tuple[int, str | None]]) -> None:
        for line in in_lines(answers, lambda answer: answer[1]):
            self.mirror.publish(caller, {"answers": line})

    def _send_change(self, caller: Caller, key: str, value: str) -> None:
        self.mirror.publish(caller, {"changes": [(key, value)]})

    def _renew(self, caller: Caller, supervisor: _Supervisor, message: dict[str, Any]) -> None:
        if name := message.get("supervisor"):
            # Only the newest connection of a supervisor counts. If an older one breaks, no lease is affected.
            supervisor.name = str(name)
            self._by_name[supervisor.name] = supervisor
            self._expected.discard(supervisor.name)
            supervisor.started_by = str(message.get("started_by", ""))
            supervisor.has_standby = bool(message.get("has_standby", False))
            self.office.heard(supervisor.name, Term.decode(message.get("term", FIRST_TERM.encode())))
        if "lease_s" in message:  # A flag of the script sets the lease time, and only supervisors see the flag.
            self._membership.lease_s = float(message["lease_s"])
        for death in message.get("died", ()):
            self._coordinator.died(int(death["member"]), int(death["pid"]), str(death["how"]))
        if (request := message.get("request")) is not None:
            self._on_request(str(request["kind"]), str(request["why"]), int(request["code"]))
        if "died" in message or request is not None:
            self._taken.append((caller, int(message["beat"])))
        alive = {int(member): committed for member, committed in message.get("alive", {}).items()}
        supervisor.members = set(alive)
        self._coordinator.renew(alive)
        self._coordinator.node_health(
            supervisor.name, supervisor.members, str(message.get("unhealthy", "")),
            is_leaving=bool(message.get("is_leaving", False)),
        )  # fmt: skip
        supervisor.heard_at = time.monotonic()
        members = set(map(int, message.get("members", ())))
        fields = {key: value for key, value in self._answer.items() if key != "stop" or self.mirror.may_tell_end}
        answer = {
            "beat": message["beat"], "lease_s": self._membership.lease_s,
            "given_up": sorted(members & self._coordinator.given_up),
            "leaves": [
                (member, leave.after, leave.turn)
                for member, leave in self._coordinator.drains.leaves.items() if member in members
            ], **fields,
            "term": self.office.term.encode(), "in_office": self.is_in_office, "standby": self.mirror.standby,
            "start_standby": bool(self._asked) and supervisor.name == self._asked,
        }  # fmt: skip
        self._server.send(caller, answer)  # at once, because it also tells the term

    def _has_gone(self, caller: Caller) -> None:
        self.mirror.has_gone(caller)
        if (supervisor := self._supervisors.pop(caller, None)) is None:
            return
        self._values.forget(supervisor.changed)
        if self._by_name.get(supervisor.name) is supervisor:
            del self._by_name[supervisor.name]
            self._membership.disconnected(supervisor.members)

    @property
    def supervisors(self) -> int:
        """Number of supervisors that have sent a message within the lease time, with those that are still starting."""
        since = time.monotonic() - self._membership.lease_s
        return sum(supervisor.heard_at > since for supervisor in self._supervisors.values())

    @property
    def untold(self) -> int:
        """Number of supervisors that may still wait for news of the end of the job.

        A supervisor that has heard of the end closes its connection. One that does not hear of it gives up after some
        lease times.
        """
        since = time.monotonic() - (LEASES_WITHOUT + 1) * self._membership.lease_s
        waiting = sum(supervisor.heard_at > since for supervisor in self._supervisors.values())
        return waiting + (len(self._expected) if self._began_at > since else 0)

    @property
    def heard(self) -> set[str]:
        """Start name (:attr:`connected`) of each supervisor that has sent a message within the lease time."""
        since = time.monotonic() - self._membership.lease_s
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


def _is_local(connection: socket.socket) -> bool:
    """Return True if the other end of a connection is on this host."""
    try:
        return bool(connection.getpeername()[0] == connection.getsockname()[0])
    except OSError:  # The connection was reset.
        return False
