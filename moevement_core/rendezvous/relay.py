"""Relay: runs in a supervisor, and passes requests of the processes on its host to the coordinator.

So a node has one connection to the coordinator, however many processes it runs, and a value that all of them watch
comes over that connection once.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from moevement_core.comms.signed_server import Caller, SignedServer
from moevement_core.comms.token import Token
from moevement_core.rendezvous.values import RequestKind, Values, Watcher, check

BACKLOG = 1024
"""Number of connections that may wait until the relay accepts them."""

MOST_LATE_S = 0.01
"""Longest time in seconds for which a relay gathers requests before it passes them on."""


class Upstream(Protocol):
    """Way from a relay to the coordinator."""

    on_change: Watcher
    """Function that the upstream calls with each change of a watched value."""

    def ask(self, kind: str, key: str, value: str | None, then: Callable[[str | None], None]) -> None:
        """Pass a request (:meth:`Values.answer`) to the coordinator, and call ``then`` with the answer."""

    def flush(self) -> None:
        """Send the requests that wait."""


class LocalUpstream:
    """Way to a coordinator in this process.

    Args:
        values: values of the job.
    """

    def __init__(self, values: Values) -> None:
        self._values = values
        self.on_change: Watcher = lambda key, value: None

    def ask(self, kind: str, key: str, value: str | None, then: Callable[[str | None], None]) -> None:
        """Execute a request, and call ``then`` with the answer."""
        then(self._values.answer(kind, key, value, self._changed))

    def _changed(self, key: str, value: str) -> None:
        self.on_change(key, value)

    def flush(self) -> None:
        """Do nothing, because no request waits."""


class Relay:
    """Relay of one supervisor. One thread calls all methods, and calls :meth:`poll` often.

    Args:
        token: token of the job.
        upstream: way to the coordinator.
        listener: Unix socket that listens; None: the relay makes one, without a file.
    """

    def __init__(self, token: Token, upstream: Upstream, listener: socket.socket | None = None) -> None:
        self.address = f"@moevement-{secrets.token_hex(8)}"
        """Address of the relay; ``@`` stands for the zero byte of an address without a file."""
        if listener is None:
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            listener.bind(socket_address(self.address))
            listener.listen(BACKLOG)
        self._server = SignedServer(listener, token, self._take_in, self._has_gone)
        self._upstream, self._is_asked = upstream, False
        upstream.on_change = self._changed
        self._known: dict[str, str | None] = {}
        """Newest value of each watched key; a key is absent until the first answer has arrived."""
        self._watchers: dict[str, dict[Caller, None]] = {}
        self._reads: dict[str, list[tuple[Caller, int]]] = {}
        """Requests to read a key that one request to the coordinator answers, each with its caller and its number."""
        self._waiting: dict[str, list[tuple[Caller, int]]] = {}
        """Callers that wait for the first answer for a key, each with the number of its request."""

    @property
    def refused(self) -> int:
        """Number of callers that have not proved in time that they have the job's token, or have failed to."""
        return self._server.refused

    def poll(self, timeout_s: float, also: socket.socket | None = None) -> None:
        """Serve the processes of this host for at most ``timeout_s`` seconds; return soon after any request.

        Args:
            timeout_s: longest duration of the call in seconds.
            also: a further socket; the call ends if it can be read.
        """
        self._is_asked = False
        self._server.poll(timeout_s, most_late_s=MOST_LATE_S, is_enough=lambda: self._is_asked, also=also)
        reads, self._reads = self._reads, {}
        for key, callers in reads.items():
            self._upstream.ask(RequestKind.READ, key, None, partial(self._answer_all, callers))
        self._upstream.flush()
        self._server.flush()

    def _take_in(self, caller: Caller, message: dict[str, Any]) -> None:
        for number, kind, key, value in message["asks"]:
            check(kind, key, value)  # One process must not break the connection of all processes of the node.
            self._is_asked = True
            if kind == RequestKind.WATCH:
                self._watch(caller, int(number), key)
            elif kind == RequestKind.READ:  # Ranks read the same value after each iteration.
                self._reads.setdefault(key, []).append((caller, int(number)))
            else:
                self._upstream.ask(kind, key, value, partial(self._answer, caller, int(number)))

    def _answer_all(self, callers: list[tuple[Caller, int]], value: str | None) -> None:
        for caller, number in callers:
            self._answer(caller, number, value)

    def _answer(self, caller: Caller, number: int, value: str | None) -> None:
        self._server.send(caller, {"answers": [[number, value]]})

    def _watch(self, caller: Caller, number: int, key: str) -> None:
        is_new = key not in self._watchers
        self._watchers.setdefault(key, {})[caller] = None
        if key in self._known:
            self._answer(caller, number, self._known[key])
            return
        self._waiting.setdefault(key, []).append((caller, number))
        if is_new:
            self._upstream.ask(RequestKind.WATCH, key, None, partial(self._first, key))

    def _first(self, key: str, value: str | None) -> None:
        self._known[key] = value
        self._answer_all(self._waiting.pop(key, []), value)

    def _changed(self, key: str, value: str) -> None:
        self._known[key] = value
        for caller in self._watchers.get(key, ()):
            self._server.send(caller, {"changes": [[key, value]]})

    def _has_gone(self, caller: Caller) -> None:
        for watchers in self._watchers.values():
            watchers.pop(caller, None)

    def close(self) -> None:
        """Close all connections and the listening socket."""
        self._server.close()


def socket_address(address: str) -> str:
    """Return the address of a Unix socket as the kernel has it."""
    return address.replace("@", "\0", 1)
