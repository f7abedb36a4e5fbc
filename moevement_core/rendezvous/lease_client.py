"""The supervisor's side of leases; see :mod:`moevement_core.rendezvous.lease_server`."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable, Mapping
from typing import Any

from moevement_core.rendezvous.signed_lines import Side, SignedLines
from moevement_core.rendezvous.status_page import boot_time_s
from moevement_core.rendezvous.token import Token

BEATS = 10
"""Renewals of a lease within its time."""
CONNECT_S = 1.0


class LeaseClient:
    """A supervisor's side. All methods are for one thread, and none of them blocks for longer than a second.

    Args:
        name: of the supervisor, which no other one has.
        address: of the server.
        lease_s: until the server has said what it is.
        token: the job's.
        started_by: sent to the server, see :attr:`~moevement_core.rendezvous.lease_server.LeaseServer.connected`.
    """

    def __init__(self, name: str, address: tuple[str, int], lease_s: float, token: Token, started_by: str = "") -> None:
        self.lease_s = lease_s
        self.held_until = boot_time_s() + lease_s
        """Time until which the lease lasts, in seconds of the boot-time clock."""
        self.given_up: set[int] = set()
        """Processes of this supervisor that the job goes on without."""
        self.stop: dict[str, Any] | None = None
        """Why the job has ended, and the exit code, once it has."""
        self.is_winding_down = False
        """True if the job is to end at the next boundary between iterations."""
        self.is_connected = False
        self.generation = -1
        """The newest that has started; before the job was formed -1."""
        self.has_trained = False
        """True if the job has committed an iteration."""
        self._configured_lease_s, self._token = lease_s, token
        self._name, self._address, self._started_by = name, address, started_by
        self._lines: SignedLines | None = None
        self._replaced: SignedLines | None = None
        """A silent one, which is closed when the new one speaks: its end would say that this supervisor is gone."""
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
        if self._lines is not None and not self._lines.is_open:
            self._receive()
        if self._lines is not None and self._lines.is_open and now - self._beat_at >= interval_s:
            self._beat_at = now
            self._send(members, alive)
        self._receive()

    def _connect(self, now: float) -> None:
        self._tried_at = now
        try:
            connection = socket.create_connection(self._address, timeout=CONNECT_S)
        except OSError:
            return
        if self._lines is not None and self._lines.is_open and self._replaced is None:
            self._replaced = self._lines
        elif self._lines is not None:
            self._lines.close()
        self._lines, self._beat_at = SignedLines(connection, self._token, Side.CALLER), -float("inf")
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
        self._close_replaced()

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
        self.has_trained = bool(answer.get("has_trained", False))
        if "stop" in answer:
            self.stop = answer["stop"]

    def _disconnect(self) -> None:
        if self._lines is not None:
            self._lines.close()
        self._lines, self.is_connected = None, False

    def _close_replaced(self) -> None:
        if self._replaced is not None:
            self._replaced.close()
            self._replaced = None

    def close(self) -> None:
        """Close all connections of this client."""
        self._close_replaced()
        self._disconnect()
