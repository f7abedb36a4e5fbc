"""Client with which a process of the job shares values (:class:`~moevement_core.rendezvous.values.JobValues`).

It talks to the relay of the process's supervisor over a Unix socket. An abort of this process's communication does not
touch that socket.
"""

from __future__ import annotations

import os
import secrets
import select
import selectors
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

from moevement_core.comms.signed_lines import Side, SignedLines
from moevement_core.comms.token import Token, own_token
from moevement_core.errors import ConfigError
from moevement_core.rendezvous.relay import socket_address
from moevement_core.rendezvous.values import AskedValues, RequestKind, check
from moevement_core.util.environment import SUPERVISOR_ENV

SLICE_S = 0.5
"""Longest single wait in C code, in seconds. Between waits, an interruption can reach the thread."""
RETRY_S = 0.05
"""Seconds between two attempts to reach the supervisor."""
PATIENCE_S = 600.0
"""Seconds without an answer of the supervisor after which a call raises an error.

A supervisor that has ended takes its processes with it. So only one that is stopped stays without an answer.
"""


class ValueClient(AskedValues):
    """Client of a supervisor's relay. One thread calls all methods.

    An exception that interrupts the thread may come in the middle of a call. The next call then begins on a new
    connection, and asks again for what it watches.

    Args:
        address: address of the relay.
        token: token of the job.
    """

    def __init__(self, address: str, token: Token) -> None:
        self._address, self._token = address, token
        self._lines: SignedLines | None = None
        self._selector: Any = None
        self._is_busy = False
        """True during a call, and after a call that an exception has interrupted."""
        self._number = 0
        """Number of the newest request."""
        self._answers: dict[int, str | None] = {}
        """Answers to requests on this connection, by number."""
        self._known: dict[str, str | None] = {}
        """Newest value of each watched key."""
        self._changes = 0
        """Number of changes of watched values that have arrived."""
        self._again: dict[int, str] = {}
        """Keys that this process asks to watch again on a new connection, by the number of the request."""

    def watch(self, key: str) -> str | None:
        """Return the newest value of a key that has arrived here; only the first call for a key asks for it."""
        if key not in self._known:
            value = self._ask(RequestKind.WATCH, key, None)
            self._known.setdefault(key, value)
        return self._known[key]

    def wait_until(self, holds: Callable[[], bool], timeout_s: float = float("inf")) -> bool:
        """Wait until ``holds()``, which depends on watched values; return False if the timeout comes first."""
        deadline = time.monotonic() + timeout_s
        while True:
            with self._connection():
                self._receive(0.0)
            before = self._changes
            if holds():
                return True
            if (left_s := deadline - time.monotonic()) <= 0:
                return False
            if self._changes != before:  # Values have changed while ``holds`` asked for one.
                continue
            with self._connection():
                self._receive(min(left_s, SLICE_S))

    def close(self) -> None:
        """Close the connection to the supervisor; a later call opens another."""
        if self._lines is not None:
            self._lines.close()
        if self._selector is not None:
            self._selector.close()
        self._lines = self._selector = None

    def _ask(self, kind: RequestKind, key: str, value: str | None) -> str | None:
        """Send a request until it is answered, and return the answer. A request may be executed more than once."""
        check(kind, key, value)
        deadline = time.monotonic() + PATIENCE_S
        while True:
            with self._connection():
                self._number += 1
                number = self._number
                lines = self._lines_now
                lines.send({"asks": [[number, kind, key, value]]})
                while lines.has_unsent:
                    _wait_until_writable(lines.socket)
                    lines.flush()
            while self._lines is not None:
                if number in self._answers:
                    return self._answers.pop(number)
                with self._connection():
                    self._receive(SLICE_S)
                if number not in self._answers and time.monotonic() > deadline:
                    raise TimeoutError(f"the supervisor of this process has not answered for {PATIENCE_S:g} s")

    @contextmanager
    def _connection(self) -> Iterator[None]:
        """Open the connection if there is none. If it breaks in the ``with`` block, close it for the next call."""
        if self._is_busy:
            self.close()
        self._is_busy = True
        try:
            if self._lines is None:
                self._open()
            yield
        except ConnectionError:
            self.close()
        self._is_busy = False

    @property
    def _lines_now(self) -> SignedLines:
        assert self._lines is not None
        return self._lines

    def _open(self) -> None:
        """Connect to the supervisor, and ask again for the values that this process watches."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                if self._lines is None:
                    lines = SignedLines(self._connected(), self._token, Side.CALLER)
                    self._selector = selectors.DefaultSelector()
                    self._selector.register(lines.socket, selectors.EVENT_READ)
                    self._lines = lines
                if self._lines.is_open:
                    self._watch_again(self._lines)
                    return
                self._receive(SLICE_S)
            except ConnectionError:
                self.close()
                time.sleep(RETRY_S)
            if time.monotonic() > deadline:
                raise TimeoutError(f"the supervisor of this process has not answered for {PATIENCE_S:g} s")

    def _watch_again(self, lines: SignedLines) -> None:
        """Ask on a new connection for the values that this process watches."""
        self._answers.clear()
        self._again.clear()
        for key in self._known:
            self._number += 1
            self._again[self._number] = key
            lines.send({"asks": [[self._number, RequestKind.WATCH, key, None]]})

    def _receive(self, timeout_s: float) -> None:
        """Take in what has arrived; first wait for it up to ``timeout_s`` seconds."""
        if timeout_s > 0:
            self._selector.select(timeout_s)
        for message in self._lines_now.receive():
            for number, value in message.get("answers", ()):
                if (key := self._again.pop(number, None)) is not None:
                    self._known[key] = value
                    self._changes += 1
                else:
                    self._answers[number] = value
            for key, value in message.get("changes", ()):
                self._known[key] = value
                self._changes += 1

    def _connected(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(SLICE_S)  # Strangers may have filled the listener's queue.
        try:
            connection.connect(socket_address(self._address))
        except OSError as error:
            connection.close()
            raise ConnectionError(str(error)) from None
        return connection


def _wait_until_writable(connection: socket.socket) -> None:
    waiting = select.poll()  # select.select() refuses descriptors above 1,023.
    waiting.register(connection, select.POLLOUT)
    waiting.poll(1000 * SLICE_S)


def supervisor_address() -> str | None:
    """Return the address of the relay of this process's supervisor; None without a supervisor."""
    return os.environ.get(SUPERVISOR_ENV) or None


def connect() -> ValueClient:
    """Return a client of the relay of this process's supervisor.

    Raises:
        ConfigError: this process has no supervisor, or no job token.
    """
    if (address := supervisor_address()) is None:
        raise ConfigError(f"{SUPERVISOR_ENV} is not set; start this process with moevement launch")
    return ValueClient(address, own_token())


def is_first_to_claim(key: str) -> bool:
    """Claim a key for the caller; return False if another caller of this job has claimed it before.

    Any thread may call it. In a process without a supervisor, every claim succeeds.
    """
    if supervisor_address() is None:
        return True
    claimant = f"{socket.gethostname()} {os.getpid()} {secrets.token_hex(8)}"
    with closing(connect()) as values:
        return values.claim(key, claimant) == claimant
