"""Loop of a coordinator's process: hears supervisors, decides while it is in office, and else gives way.

``moevement coordinate`` and a standby that has taken over run this loop, and so does the simulation of failures.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterable
from enum import Enum
from typing import Any

from moevement_core.comms.address import address_of
from moevement_core.comms.token import Token
from moevement_core.rendezvous.coordinator import Coordinator, State
from moevement_core.rendezvous.lease_client import LeaseClient
from moevement_core.rendezvous.lease_server import LeaseServer
from moevement_core.rendezvous.office import Office, Term
from moevement_core.rendezvous.values import Values

POLL_S = 0.05
"""Longest time in seconds for which a turn waits for messages, and pause of a process that stands by."""
LEASES_ALONE = 12
"""Number of lease times after which a coordinator out of office, or a standby without any connection, ends."""


class Turn(Enum):
    """Result of one turn of the loop."""

    DECIDED = "decided"
    """The coordinator is in office, and has looked at the state of the job."""
    WAITED = "waited"
    """The coordinator has decided nothing, because its standby may have taken over."""
    REPLACED = "replaced"
    """Another coordinator has taken over, or this one has been out of office for too long."""


class CoordinatorLoop:
    """Loop of one coordinator. One thread calls all methods.

    Args:
        coordinator: the coordinator.
        listener: bound socket that listens for supervisors.
        values: values of the job.
        term: term of the coordinator.
        token: token of the job.
        on_wind_down: called with the reason when a supervisor asks the job to end at the next boundary.
        may_have_standby: True if a supervisor may start a standby.
        expected: names of the supervisors that obeyed the coordinator before this one.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        listener: socket.socket,
        values: Values,
        term: Term,
        token: Token,
        *,
        on_wind_down: Callable[[str], None],
        may_have_standby: bool = True,
        expected: Iterable[str] = (),
    ) -> None:
        self.office = Office(term)
        self.server = LeaseServer(
            listener, coordinator, token, on_request=self._take_request, values=values, office=self.office,
            expected=expected,
        )  # fmt: skip
        is_running = coordinator.state is State.RUNNING
        self.generation = coordinator.roster.generation if is_running else -1
        """Newest generation whose ranks have entered training; -1 before the first."""
        self._coordinator, self._token, self._may_have_standby = coordinator, token, may_have_standby
        self._on_wind_down = on_wind_down
        self._successor: LeaseClient | None = None
        """Connection to the standby that may have taken over; None unless this coordinator is not in office."""
        self._in_office_at = self._turned_at = time.monotonic()

    @property
    def is_over(self) -> bool:
        """True if the coordinator has ended the job. Its standby may not know that yet, and continue the job."""
        return self._coordinator.state in (State.DONE, State.STOPPED)

    @property
    def is_settled(self) -> bool:
        """True if the coordinator has ended the job, and no other one can continue it."""
        return self.is_over and self.server.mirror.may_tell_end

    def turn(self, timeout_s: float) -> Turn:
        """Hear supervisors, and decide for the job if this coordinator is in office.

        Args:
            timeout_s: seconds for which the call waits for messages.
        """
        coordinator = self._coordinator
        self.server.wants_standby = self._may_have_standby and coordinator.has_trained()
        self.server.poll(timeout_s, self._answer())
        now, lease_s = time.monotonic(), coordinator.membership.lease_s
        if now - self._turned_at > lease_s / 4:
            self._in_office_at = now  # This process was suspended.
        self._turned_at = now
        if self.office.is_deposed or now - self._in_office_at > LEASES_ALONE * lease_s:
            return Turn.REPLACED
        if not self.server.is_in_office:
            self._ask_standby()
            return Turn.WAITED
        self._in_office_at = now
        self._forget_successor()
        coordinator.step()
        if (why := coordinator.end_for_notices()) is not None:
            self.wind_down(why)
        if coordinator.state is State.RUNNING:
            self.generation = coordinator.roster.generation
        return Turn.DECIDED

    def end(self, within_s: float) -> None:
        """Tell all supervisors that the job has ended, then the standby, and close all connections.

        If there are supervisors that have not heard of the end after ``within_s`` seconds, the standby is not told. It
        then takes over, and tells those of them that reach it.
        """
        self.server.wants_standby = False
        deadline = time.monotonic() + within_s
        while self.server.untold and time.monotonic() < deadline:
            self.server.poll(POLL_S, self._answer())
        if not self.server.untold:
            self.server.mirror.dismiss()
            deadline = time.monotonic() + self._coordinator.membership.lease_s
            while self.server.mirror.has_caller and time.monotonic() < deadline:  # A close could overtake the message.
                self.server.poll(POLL_S, self._answer())
        self.server.close()

    def follow(self) -> LeaseClient:
        """Close the server, and return the connection to the coordinator that has taken over."""
        self.server.close()
        client = self._successor or self._client_of(self.office.successor or self.office.standby)
        if self.office.successor:  # It need not be the standby that this coordinator had.
            client.look_for(address_of(self.office.successor))
        return client

    def _client_of(self, address: str) -> LeaseClient:
        return LeaseClient("", address_of(address), self._coordinator.membership.lease_s, self._token)

    def _ask_standby(self) -> None:
        """Ask the standby, which does not answer as such any more, whether it takes over, and resign if it does."""
        if self._successor is None:
            self._successor = self._client_of(self.office.standby)
        self._successor.step((), {})
        if self.office.resigns_for(self._successor.term):
            self._successor.resigns = self.office.term

    def _forget_successor(self) -> None:
        """Close the connection to a standby that has not taken over."""
        if self._successor is not None:
            self._successor.close()
            self._successor = None

    def _take_request(self, kind: str, why: str, code: int) -> None:
        if kind == "wind_down":
            self.wind_down(why)
        elif not self.is_over:
            self._coordinator.stop(why, code)

    def wind_down(self, why: str) -> None:
        """Let the job save and end at the next boundary between iterations."""
        if not self._coordinator.is_winding_down:
            self._coordinator.wind_down()
            self._on_wind_down(why)

    def _answer(self) -> dict[str, Any]:
        """Return the fields of every answer to a supervisor."""
        coordinator = self._coordinator
        answer: dict[str, Any] = {
            "generation": self.generation, "wind_down": coordinator.is_winding_down,
            "has_trained": coordinator.has_trained(),
        }  # fmt: skip
        if self.is_over:
            reason, code = coordinator.end
            answer["stop"] = {"reason": reason, "code": code}
        return answer
