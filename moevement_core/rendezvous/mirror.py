"""Copy of the job's values at a standby, as the coordinator keeps it.

Nobody learns of a change before the standby has it. So when the standby takes over, it knows everything that any
process of the job knows from the coordinator. What processes have told the coordinator without an answer, they tell the
next one again.

In an iteration without a failure no value changes, so the standby costs two small messages a tenth of the lease time.
In a recovery, each change and each report goes to the standby too: O(N) bytes, and a round trip for each step.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from moevement_core.comms.address import address_of
from moevement_core.comms.signed_server import Caller, SignedServer
from moevement_core.rendezvous.office import Office
from moevement_core.rendezvous.status_page import boot_time_s
from moevement_core.rendezvous.values import Operation, Values, in_lines

MESSAGES_IN_LEASE = 10
"""Number of messages to the standby in a lease time, at least."""
LOOKS_IN_LEASE = 3
"""Number of attempts in a lease time to call a standby that seems to be lost."""
LOOK_S = 0.2
"""Longest time of such an attempt in seconds."""
BEATS_TO_KNOW = 4
"""Part of a lease time after which all supervisors have heard of a new standby, with their beats."""
LEASES_TO_COPY = 6
"""Number of lease times in which a standby has to copy all values."""


class Mirror:
    """Connection of a coordinator to its standby. One thread calls all methods.

    Args:
        server: server at which the standby calls.
        values: values of the job.
        office: office of this coordinator.
        clock: the clock of the office.
    """

    def __init__(
        self, server: SignedServer, values: Values, office: Office, clock: Callable[[], float] = boot_time_s
    ) -> None:
        self._server, self._values, self._office, self._clock = server, values, office, clock
        self._caller: Caller | None = None
        """Connection of the standby; None without one."""
        self._address = ""
        """Address of the standby that has called."""
        self._joined_at = 0.0
        """Value of the clock when it called."""
        self._has_copied = False
        """True once it has a copy of all values."""
        self._knows_at: float | None = None
        """Value of the clock when it first answered that it may take over; None before that."""
        self._number = self._mirrored = self._copied = 0
        """Number of operations so far, of those that the standby has, and of those that make the first copy."""
        self._waiting: list[Operation] = []
        """Operations that :meth:`step` sends."""
        self._voters: frozenset[str] = frozenset()
        """Names of the voters that were last sent to the standby."""
        self._held: deque[tuple[int, Caller, Mapping[str, Any]]] = deque()
        """Messages for supervisors, each with the number of the operation that the standby must have first."""
        self._end: int | None = None
        """Number of the operation with which the job has ended; None before that."""
        self._sent_at = -float("inf")
        self._looked_at = -float("inf")
        """Value of the clock when this process last called a standby that seemed to be lost."""
        self._stepped_at = self._resumed_at = -float("inf")
        self._lease_s = float("inf")
        values.on_operation = self._note

    @property
    def standby(self) -> str:
        """Address of the standby that is connected, or may take over; empty if there is none."""
        return self._address if self._caller is not None else self._office.standby

    @property
    def ready(self) -> str:
        """Address of the standby, once it knows that it may take over and all supervisors know of it; else empty."""
        is_known = self._knows_at is not None and self._clock() - self._knows_at > self._lease_s / BEATS_TO_KNOW
        return self._office.standby if is_known else ""

    @property
    def has_caller(self) -> bool:
        """True if a standby is connected."""
        return self._caller is not None

    def joins(self, caller: Caller, address: str) -> None:
        """Begin to copy all values to a standby that has called, unless there is another standby."""
        if self._caller is not None or self._office.standby:
            return
        self._caller, self._address = caller, address
        self._joined_at, self._has_copied, self._knows_at = self._clock(), False, None
        self._waiting = list(self._values.operations())
        self._number = self._copied = len(self._waiting)
        self._end = None if self._end is None else self._number  # The copy has the end, too.
        self._mirrored = -1
        self._server.send(caller, {"begins": True})
        self._offer(self._voters)

    def take_in(self, caller: Caller, message: Mapping[str, Any]) -> None:
        """Take in an answer of the standby: the number of operations that it has, and the message that it answers."""
        if caller is not self._caller:
            return
        self._mirrored, sent_at = int(message["mirrored"]), float(message["at"])
        if self._office.standby:
            self._office.answered(sent_at, self._mirrored)
            self._knows_at = self._knows_at or self._clock()
        elif self._mirrored >= self._copied and not self._has_copied:
            self._has_copied = True
            self._office.begin_with(self._address, sent_at, self._voters, self._copied)
            self._sent_at = -float("inf")  # The standby is to learn that it may take over.
        self._release()

    def has_gone(self, caller: Caller) -> None:
        """Note that a connection is closed; if it is the standby's, begin to go on without a standby."""
        if caller is self._caller:
            self._caller = None
            self._office.drop()

    def publish(self, caller: Caller, message: Mapping[str, Any]) -> None:
        """Send a message to a supervisor, once the standby knows everything that the coordinator knows now."""
        if self._held or not self._may_send(self._number):
            self._held.append((self._number, caller, message))
        else:
            self._server.send(caller, message)

    def step(self, voters: Collection[str], lease_s: float) -> None:
        """Send to the standby what it does not have yet, and go on without it if it does not answer.

        Args:
            voters: names of the supervisors that are connected.
            lease_s: lease time in seconds.
        """
        self._lease_s = lease_s
        self._drop_lost()
        if self._caller is not None and self._is_left_out(lease_s):
            self._server.drop(self._caller)
        if self._caller is not None and frozenset(voters) != self._voters:
            self._offer(frozenset(voters))
        self._voters = frozenset(voters)
        self._release()
        if self._waiting or self._clock() - self._sent_at > lease_s / MESSAGES_IN_LEASE:
            self._send()

    def ends(self) -> None:
        """Note that the last operation has ended the job. Once the standby has it, no other coordinator can undo it."""
        if self._end is None:
            self._end = self._number

    @property
    def has_ended(self) -> bool:
        """True if the job has ended and the standby knows that."""
        return self._end is not None and bool(self._office.standby) and self._mirrored >= self._end

    @property
    def may_tell_end(self) -> bool:
        """True if supervisors may learn that the job has ended."""
        return self._end is not None and self._may_send(self._end)

    def dismiss(self) -> None:
        """Tell the standby that nobody needs it any more."""
        if self._caller is not None:
            self._server.send(self._caller, {"is_over": True})

    def _drop_lost(self) -> None:
        """Begin to go on without a standby that does not answer, and do so if its process has certainly ended."""
        now, lease_s = self._clock(), self._lease_s
        if now - self._stepped_at > lease_s / 4:
            self._resumed_at = now  # This process was suspended, and could not hear the standby.
        self._stepped_at = now
        if self._office.misses_standby(lease_s, self._resumed_at):
            self._office.drop()
        # Later, a standby that has ended may have taken over before, and may have had a standby of its own.
        is_in_time = self._office.is_dropping and self._office.has(lease_s)
        if is_in_time and now - self._looked_at > lease_s / LOOKS_IN_LEASE:
            self._looked_at = now
            if is_refused(address_of(self._office.standby)):
                self._office.standby_has_ended()

    def _send(self) -> None:
        """Send the standby what it does not have yet, or at least that this coordinator lives."""
        if self._caller is None:
            return
        self._sent_at = self._clock()
        *lines, last = [*in_lines(self._waiting, lambda operation: operation[2])] or [[]]
        for line in lines:
            self._server.send(self._caller, {"operations": line})
        # The standby executes all of them at once, so that it never has only a part of a roster.
        office = self._office
        self._server.send(
            self._caller,
            {
                "operations": last, "number": self._number, "at": self._sent_at, "lease_s": self._lease_s,
                "term": office.term_of_standby.encode(), "may_take_over": office.standby == self._address,
            },
        )  # fmt: skip
        self._waiting = []

    def _is_left_out(self, lease_s: float) -> bool:
        """Return True if the coordinator goes on without the standby that is connected, because it is too slow."""
        if self._has_copied:
            return not self._office.standby
        return self._clock() - self._joined_at > LEASES_TO_COPY * lease_s

    def _note(self, operation: Operation) -> None:
        if self._caller is not None or self._office.standby:
            self._number += 1
        if self._caller is not None:
            self._waiting.append(operation)

    def _offer(self, voters: Iterable[str]) -> None:
        self._note(("voters", "", ",".join(sorted(voters))))
        if self._office.standby:
            self._office.offer(frozenset(voters), self._number)
        else:
            self._copied = self._number

    def _may_send(self, number: int) -> bool:
        """Return True if supervisors may learn of the operation ``number``: no other coordinator can lack it."""
        office = self._office
        return self.has_ended or (office.has(self._lease_s) and (not office.standby or number <= self._mirrored))

    def _release(self) -> None:
        while self._held and self._may_send(self._held[0][0]):
            _, caller, message = self._held.popleft()
            self._server.send(caller, message)


def is_refused(address: tuple[str, int]) -> bool:
    """Return True if a host answers, but no process listens at an address any more."""
    try:
        socket.create_connection(address, timeout=LOOK_S).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False
