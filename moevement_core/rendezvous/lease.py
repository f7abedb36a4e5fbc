"""Leases between supervisors and the coordinator, over a connection that carries nothing else.

A supervisor sends, several times in a lease time, which of its processes it finds alive; each answer renews their
leases. A connection that breaks is noticed at once: a supervisor's processes end with it. Messages are lines of JSON.
"""

from __future__ import annotations

import json
import selectors
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from moevement_core.rendezvous.status_page import boot_time_s

BEATS = 10
"""How often a lease is renewed in its time."""
MAX_LINE_BYTES = 1 << 20
CONNECT_S = 1.0
ADDRESS = "leases/address"
"""In the job's store: ``host:port`` of the lease server."""


class _Lines:
    """A non-blocking connection that carries lines of JSON."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = connection
        self._received, self._unsent = b"", b""

    def receive(self) -> list[dict[str, Any]]:
        """What has come.

        Raises:
            ConnectionError: the other side is gone, or is none of ours.
        """
        while True:
            try:
                data = self.socket.recv(1 << 16)
            except (BlockingIOError, InterruptedError):
                break
            except OSError as error:
                raise ConnectionError(str(error)) from None
            if not data:
                raise ConnectionError("closed by the other side")
            self._received += data
            if len(self._received) > MAX_LINE_BYTES:
                raise ConnectionError("not a line")
        *lines, self._received = self._received.split(b"\n")
        try:
            messages = [json.loads(line) for line in lines]
        except ValueError:
            raise ConnectionError("not a line of JSON") from None
        if not all(isinstance(message, dict) for message in messages):
            raise ConnectionError("not a message")
        return messages

    def send(self, message: Mapping[str, Any]) -> None:
        """Send, or keep what the connection does not take now for the next time; beats that stack up are dropped.

        Raises:
            ConnectionError: the other side is gone.
        """
        if len(self._unsent) < MAX_LINE_BYTES:
            self._unsent += json.dumps(message).encode() + b"\n"
        with suppress(BlockingIOError, InterruptedError):
            try:
                self._unsent = self._unsent[self.socket.send(self._unsent) :]
            except BlockingIOError:
                raise
            except OSError as error:
                raise ConnectionError(str(error)) from None

    def close(self) -> None:
        self.socket.close()


class LeaseHolder(Protocol):
    """The coordinator, as far as supervisors have to do with it."""

    lease_s: float
    given_up: set[int]

    def renew(self, members: Mapping[int, int | None]) -> None:
        """These members live."""

    def disconnected(self, members: Iterable[int]) -> None:
        """The connection of their supervisor broke."""

    def died(self, member: int, pid: int, how: str) -> int | None:
        """A supervisor saw a process end."""


@dataclass(slots=True, eq=False)
class _Supervisor:
    lines: _Lines
    name: str = ""
    started_by: str = ""
    members: set[int] = field(default_factory=set)
    heard_at: float = 0.0


class LeaseServer:
    """The coordinator's side. All methods are for one thread, which asks it to :meth:`poll` often.

    Args:
        listener: a bound socket that listens.
        holder: the coordinator.
        on_request: called with what a supervisor asks of the job: ``stop`` and why, or ``wind_down`` and why.
    """

    def __init__(
        self, listener: socket.socket, holder: LeaseHolder, on_request: Callable[[str, str, int], None]
    ) -> None:
        listener.setblocking(False)
        self._listener, self._holder, self._on_request = listener, holder, on_request
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
            if time.monotonic() >= deadline:
                return

    def _accept(self) -> None:
        with suppress(OSError):
            connection, _ = self._listener.accept()
            supervisor = _Supervisor(_Lines(connection))
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
        self._selector.unregister(supervisor.lines.socket)
        del self._connections[supervisor.lines.socket]
        supervisor.lines.close()
        if self._by_name.get(supervisor.name) is supervisor:
            del self._by_name[supervisor.name]
            self._holder.disconnected(supervisor.members)

    @property
    def supervisors(self) -> int:
        """How many have been heard of within the lease time."""
        since = time.monotonic() - self._holder.lease_s
        return sum(supervisor.heard_at > since for supervisor in self._by_name.values())

    @property
    def heard(self) -> set[str]:
        """Who started the supervisors that have been heard of within the lease time."""
        since = time.monotonic() - self._holder.lease_s
        return {supervisor.started_by for supervisor in self._by_name.values() if supervisor.heard_at > since}

    @property
    def connected(self) -> set[str]:
        """Who started the supervisors that have a connection now, as they say; it breaks with their processes."""
        return {supervisor.started_by for supervisor in self._by_name.values()}

    def close(self) -> None:
        """Close every connection."""
        for supervisor in list(self._connections.values()):
            supervisor.lines.close()
        self._selector.close()
        self._listener.close()


class LeaseClient:
    """A supervisor's side. All methods are for one thread, and none of them blocks for longer than a second.

    Args:
        name: of the supervisor, which no other one has.
        address: of the server.
        lease_s: until the server has said what it is.
        started_by: sent to the server, see :attr:`LeaseServer.connected`.
    """

    def __init__(self, name: str, address: tuple[str, int], lease_s: float, started_by: str = "") -> None:
        self.lease_s = lease_s
        self.held_until = boot_time_s() + lease_s
        """In seconds of the boot-time clock."""
        self.given_up: set[int] = set()
        """Processes of this supervisor that the job goes on without."""
        self.stop: dict[str, Any] | None = None
        """Why the job has ended, and the exit code, once it has."""
        self.is_winding_down = False
        """Whether the job is to end at the next boundary between iterations."""
        self.is_connected = False
        self.generation = -1
        """The newest that has started; before the job was formed -1."""
        self._configured_lease_s = lease_s
        self._name, self._address, self._started_by = name, address, started_by
        self._lines: _Lines | None = None
        self._beat = 0
        self._sent_at: dict[int, float] = {}
        self._beat_at = self._heard_at = self._tried_at = -float("inf")
        self._news: list[dict[str, Any]] = []
        """Deaths, in the order in which they were seen, each with the beat that it was sent with."""
        self._request: dict[str, Any] | None = None

    def died(self, member: int, pid: int, how: str) -> None:
        """A process of this supervisor has ended; sent until it is answered."""
        self._news.append({"member": member, "pid": pid, "how": how, "beat": None})
        self._beat_at = -float("inf")

    def request(self, kind: str, why: str, code: int = 1) -> None:
        """Ask the coordinator to ``stop`` the job, or to ``wind_down`` (end it at a boundary); sent until answered."""
        self._request = {"kind": kind, "why": why, "code": code, "beat": None}
        self._beat_at = -float("inf")

    def step(self, members: Iterable[int], alive: Mapping[int, int | None]) -> None:
        """Send a beat if one is due, and take in what was answered.

        Args:
            members: all that this supervisor has started and that have not ended.
            alive: those of them that it finds alive, with the newest iteration that each has committed.
        """
        now = time.monotonic()
        interval_s = self.lease_s / BEATS
        # A connection that is silent may wait for long to send again once the network is back. A new one does not.
        is_silent = self._lines is not None and now - max(self._heard_at, self._tried_at) > 2 * interval_s
        if (self._lines is None or is_silent) and now - self._tried_at >= interval_s:
            self._connect(now)
        if self._lines is not None and now - self._beat_at >= interval_s:
            self._beat_at = now
            self._send(members, alive)
        self._receive()

    def _connect(self, now: float) -> None:
        self._tried_at = now
        try:
            connection = socket.create_connection(self._address, timeout=CONNECT_S)
        except OSError:
            return
        if self._lines is not None:
            self._lines.close()
        self._lines, self._beat_at = _Lines(connection), -float("inf")
        for unanswered in (*self._news, *([self._request] if self._request else ())):
            unanswered["beat"] = None

    def _send(self, members: Iterable[int], alive: Mapping[int, int | None]) -> None:
        assert self._lines is not None
        self._beat += 1
        self._sent_at = {beat: at for beat, at in self._sent_at.items() if beat > self._beat - 4 * BEATS}
        self._sent_at[self._beat] = boot_time_s()
        message: dict[str, Any] = {
            "beat": self._beat, "supervisor": self._name, "members": sorted(members), "alive": dict(alive),
            "lease_s": self._configured_lease_s, "started_by": self._started_by,
        }  # fmt: skip
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

    def _receive(self) -> None:
        if self._lines is None:
            return
        try:
            for answer in self._lines.receive():
                self._take_in(answer)
        except (ConnectionError, KeyError, TypeError, ValueError, AttributeError):
            self._disconnect()

    def _take_in(self, answer: dict[str, Any]) -> None:
        beat = int(answer["beat"])
        self._heard_at = time.monotonic()
        self.is_connected = True
        self.lease_s = float(answer["lease_s"])
        if (sent_at := self._sent_at.get(beat)) is not None:
            self.held_until = max(self.held_until, sent_at + self.lease_s)
        self.given_up |= set(answer["given_up"])
        self._news = [news for news in self._news if news["beat"] is None or news["beat"] > beat]
        if self._request is not None and self._request["beat"] is not None and self._request["beat"] <= beat:
            self._request = None
        self.is_winding_down = bool(answer.get("wind_down", False))
        self.generation = int(answer.get("generation", -1))
        if "stop" in answer:
            self.stop = answer["stop"]

    def _disconnect(self) -> None:
        if self._lines is not None:
            self._lines.close()
        self._lines, self.is_connected = None, False

    def close(self) -> None:
        """Close the connection."""
        self._disconnect()
