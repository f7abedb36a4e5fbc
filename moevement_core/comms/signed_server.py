"""Server whose callers prove that they have the job's token, and then exchange signed lines with it.

The server limits the number of connections whose callers have not proved this yet, and closes a connection if the proof
does not arrive in time. So callers without the token cannot keep the others away.
"""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from moevement_core.comms.signed_lines import NotAuthenticated, Side, SignedLines
from moevement_core.comms.token import Token

GREETING_S = 10.0
"""Seconds after which the server closes a connection whose caller has not proved that it has the job's token."""
MOST_UNKNOWN = 64
"""Largest number of accepted connections whose callers have not yet proved that they have the job's token. Later
callers wait in the listener's queue."""
SHORT_GREETING_S = 1.0
"""Value that replaces :data:`GREETING_S` while :data:`MOST_UNKNOWN` callers have not sent their proof yet.

A second is enough, because the proof takes only one round trip.
"""


@dataclass(slots=True, eq=False)
class Caller:
    """Connection of a process that has called the server."""

    lines: SignedLines
    since: float
    """Monotonic time in seconds at which the connection was accepted."""
    messages: list[Mapping[str, Any]] = field(default_factory=list)
    """Messages that :meth:`SignedServer.flush` sends."""


class SignedServer:
    """Server of signed lines. One thread calls all methods, and calls :meth:`poll` often.

    Args:
        listener: bound socket that listens.
        token: token of the job.
        take_in: called with each message and its caller. If the message is malformed, the function raises LookupError,
            TypeError, ValueError, ArithmeticError, RecursionError or AttributeError, and the server closes the
            connection.
        has_gone: called with a caller whose connection is closed.
    """

    def __init__(
        self,
        listener: socket.socket,
        token: Token,
        take_in: Callable[[Caller, dict[str, Any]], None],
        has_gone: Callable[[Caller], None],
    ) -> None:
        listener.setblocking(False)
        self._listener, self._token, self._take_in, self._has_gone = listener, token, take_in, has_gone
        self.refused = 0
        """Number of callers that have not proved in time that they have the job's token, or have failed to."""
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ, None)
        self._is_accepting = True
        self._callers: dict[socket.socket, Caller] = {}
        self._unknown: dict[Caller, None] = {}
        """Callers that have not yet proved that they have the job's token, the oldest first."""
        self._to_flush: dict[Caller, None] = {}
        """Callers for which data waits."""

    @property
    def callers(self) -> int:
        """Number of open connections."""
        return len(self._callers)

    def poll(
        self,
        timeout_s: float,
        *,
        most_late_s: float = 0.0,
        is_enough: Callable[[], bool] = lambda: False,
        also: socket.socket | None = None,
    ) -> None:
        """Send what waits, accept connections, and read messages.

        Args:
            timeout_s: seconds that the call takes if nothing ends it earlier.
            most_late_s: seconds for which the call goes on while messages are waiting, although it is to end. Otherwise
                the messages of thousands of callers would wait for ever more calls.
            is_enough: returns True if the call is to end, because there is something to do.
            also: a further socket; the call ends if it can be read.
        """
        deadline = time.monotonic() + timeout_s
        if also is not None:
            self._selector.register(also, selectors.EVENT_READ, None)
        try:
            while True:
                self.flush()
                ready = self._selector.select(max(0.0, deadline - time.monotonic()))
                files = [key.fileobj for key, _ in ready]
                for file in files:
                    if file is self._listener:
                        self._accept()
                    elif (caller := self._callers.get(file)) is not None:  # type: ignore[call-overload]
                        self._read(caller)
                self._bound_unknown()
                if also in files:  # This class does not read from it, so it would stay ready.
                    break
                if is_enough():
                    deadline = min(deadline, time.monotonic())
                late_s = time.monotonic() - deadline
                if late_s >= 0 and (not ready or late_s > most_late_s):
                    break
        finally:
            if also is not None:
                self._selector.unregister(also)
        self.flush()

    def send(self, caller: Caller, message: Mapping[str, Any]) -> None:
        """Send a message at the next :meth:`flush`. If the connection has broken, the message is lost."""
        caller.messages.append(message)
        self._to_flush[caller] = None

    def flush(self) -> None:
        """Send what waits, as far as the connections accept it now, and close broken connections."""
        waiting, self._to_flush = self._to_flush, {}
        for caller in waiting:
            messages, caller.messages = caller.messages, []
            if caller.lines.socket not in self._callers:
                continue
            try:
                caller.lines.flush()
                for message in messages:
                    caller.lines.send(message)
            except ConnectionError:
                self.drop(caller)
                continue
            if caller.lines.has_unsent:
                self._to_flush[caller] = None

    def _accept(self) -> None:
        with suppress(OSError):
            while len(self._unknown) < MOST_UNKNOWN:
                connection, _ = self._listener.accept()
                caller = Caller(SignedLines(connection, self._token, Side.CALLED), time.monotonic())
                self._callers[connection] = caller
                self._unknown[caller] = None
                self._selector.register(connection, selectors.EVENT_READ)

    def _read(self, caller: Caller) -> None:
        try:
            messages = caller.lines.receive()
            if caller.lines.is_open:
                self._unknown.pop(caller, None)
            for message in messages:
                self._take_in(caller, message)
        except NotAuthenticated:
            self.refused += 1
            self.drop(caller)
        except (ConnectionError, LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError):
            self.drop(caller)

    def _bound_unknown(self) -> None:
        """Limit the number of connections whose callers have not proved yet that they have the job's token.

        Close a connection if its proof does not arrive in time. Accept no further connection while
        :data:`MOST_UNKNOWN` proofs are pending. Never close a connection only to accept another: after an outage of the
        network, all supervisors connect at once, and each has to wait only for the proofs of the callers before it.
        """
        now = time.monotonic()
        allowed_s = SHORT_GREETING_S if len(self._unknown) >= MOST_UNKNOWN else GREETING_S
        while self._unknown and now - (oldest := next(iter(self._unknown))).since > allowed_s:
            self.refused += 1
            self.drop(oldest)
        if (is_accepting := len(self._unknown) < MOST_UNKNOWN) is self._is_accepting:
            return
        self._is_accepting = is_accepting
        if is_accepting:
            self._selector.register(self._listener, selectors.EVENT_READ, None)
        else:
            self._selector.unregister(self._listener)

    def drop(self, caller: Caller) -> None:
        """Close the connection of a caller."""
        if self._callers.pop(caller.lines.socket, None) is None:
            return
        self._selector.unregister(caller.lines.socket)
        self._unknown.pop(caller, None)
        caller.lines.close()
        self._has_gone(caller)

    def close(self) -> None:
        """Close every connection and the listening socket."""
        for caller in self._callers.values():
            caller.lines.close()
        self._callers.clear()
        self._selector.close()
        self._listener.close()
