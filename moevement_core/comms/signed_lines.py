"""Connection that carries signed lines of JSON between two processes with the same job token.

The side that accepted the connection sends a nonce. The caller (the side that connected) answers with another nonce and
a MAC over both nonces. Each further line has a MAC over the direction, number and text of the line, with a key that
both sides derive from the token and both nonces. So an attacker cannot replay, drop or reflect a line, or use a line of
another connection. The accepting side sends no MAC with its nonce; the MAC of its first line proves that it has the
token.
"""

from __future__ import annotations

import hmac
import json
import secrets
import socket
from collections.abc import Mapping
from contextlib import suppress
from enum import Enum
from typing import Any

from moevement_core.comms.token import Token

MAX_LINE_BYTES = 1 << 24
"""Most bytes of a received line, and most bytes that may wait to be sent when :meth:`SignedLines.send` is called."""
MAX_UNKNOWN_BYTES = 512
"""Most bytes that a caller may send before it has proved that it has the token."""
_MAC_CHARACTERS = 64
"""Number of hexadecimal digits of a MAC."""


class NotAuthenticated(ConnectionError):
    """Error: the other side has no token or another token, so no further line of it is read."""


class Side(Enum):
    """Side of a connection: the process that made it, or the one that accepted it."""

    CALLER = "caller"
    CALLED = "called"


class SignedLines:
    """Connection with signed lines of JSON; no method blocks.

    Args:
        connection: TCP connection, or connection of a Unix socket.
        token: token of the job.
        side: side of this process.
    """

    def __init__(self, connection: socket.socket, token: Token, side: Side) -> None:
        connection.setblocking(False)
        with suppress(OSError):  # A Unix socket has no such option.
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = connection
        self._token, self._side = token, side
        self._other = Side.CALLED if side is Side.CALLER else Side.CALLER
        self._received, self._unsent = b"", b""
        self._nonce = secrets.token_hex(16)
        self._key: Token | None = None
        self._broken: ConnectionError | None = None
        """Error of a connection that has ended; None while it is open."""
        self._sent_lines = self._received_lines = 0
        if side is Side.CALLED:
            self._unsent = self._nonce.encode() + b"\n"
            with suppress(ConnectionError):  # The next call of receive() raises the error.
                self.flush()

    @property
    def is_open(self) -> bool:
        """True once messages can be sent. On the accepting side, this also means that the caller has the token."""
        return self._key is not None

    @property
    def has_unsent(self) -> bool:
        """True if data waits until the other side reads; :meth:`flush` sends it."""
        return bool(self._unsent)

    def receive(self) -> list[dict[str, Any]]:
        """Return the messages that have arrived since the last call.

        Raises:
            NotAuthenticated: the other side has not proved that it has the token.
            ConnectionError: the other side is gone, or sent something else than signed lines.
        """
        if self._broken is not None:
            raise self._broken
        self._read()
        *lines, self._received = self._received.split(b"\n")
        if len(self._received) > MAX_LINE_BYTES:
            raise self._wrong("received data is not a line")
        if self._key is None and lines:
            self._greet(lines.pop(0))
        if self._key is None and len(self._received) > MAX_UNKNOWN_BYTES:
            raise NotAuthenticated("received data is not a greeting")
        messages = [self._message(line) for line in lines]
        if self._broken is not None and not messages:
            raise self._broken
        return messages

    def _read(self) -> None:
        """Read what has arrived, and note if the connection has ended, for the time after the last message."""
        while len(self._received) <= MAX_LINE_BYTES:
            try:
                data = self.socket.recv(1 << 18)
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                self._broken = ConnectionError(str(error))
                return
            if not data:
                self._broken = ConnectionError("closed by the other side")
                return
            self._received += data
            if self._key is None and self._side is Side.CALLED and len(self._received) > MAX_UNKNOWN_BYTES:
                return  # The first line of a caller with the token is shorter than the limit.

    def _greet(self, line: bytes) -> None:
        if self._side is Side.CALLER:
            both = line + b" " + self._nonce.encode()
            self._unsent += self._nonce.encode() + self._token.mac("lease greeting", both).hex().encode() + b"\n"
            self.flush()
        else:
            nonce, mac = line[:-_MAC_CHARACTERS], line[-_MAC_CHARACTERS:]
            both = self._nonce.encode() + b" " + nonce
            if not hmac.compare_digest(mac, self._token.mac("lease greeting", both).hex().encode()):
                raise NotAuthenticated("the caller has another token than this job")
        self._key = Token(self._token.mac("lease session", both).hex())

    def _message(self, line: bytes) -> dict[str, Any]:
        assert self._key is not None
        mac, text = line[:_MAC_CHARACTERS], line[_MAC_CHARACTERS:]
        if not hmac.compare_digest(mac, self._mac(self._other, self._received_lines, text)):
            raise self._wrong("received line does not belong to this connection")
        self._received_lines += 1
        try:
            message = json.loads(text)
        except ValueError:
            raise ConnectionError("received line is not JSON") from None
        if not isinstance(message, dict):
            raise ConnectionError("received line is not a JSON object")
        return message

    def _wrong(self, text: str) -> ConnectionError:
        """Return the error for data that no process of the job has sent on this connection, or that was damaged."""
        return ConnectionError(text) if self._received_lines else NotAuthenticated(text)

    def _mac(self, side: Side, number: int, text: bytes) -> bytes:
        assert self._key is not None
        return self._key.mac(side.value, number.to_bytes(8, "big"), text).hex().encode()

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message. What the connection does not accept now waits for :meth:`flush` or for the next message.

        Raises:
            ConnectionError: the other side is gone, or has not read for so long that :data:`MAX_LINE_BYTES` wait.
        """
        if len(self._unsent) >= MAX_LINE_BYTES:
            raise ConnectionError("the other side does not read")
        text = json.dumps(message).encode()
        self._unsent += self._mac(self._side, self._sent_lines, text) + text + b"\n"
        self._sent_lines += 1
        self.flush()

    def flush(self) -> None:
        """Send waiting data, as far as the connection accepts it now.

        Raises:
            ConnectionError: the other side is gone.
        """
        with suppress(BlockingIOError, InterruptedError):
            while self._unsent:
                try:
                    self._unsent = self._unsent[self.socket.send(self._unsent) :]
                except BlockingIOError:
                    raise
                except OSError as error:
                    raise ConnectionError(str(error)) from None

    def close(self) -> None:
        """End the connection; unsent lines are lost."""
        with suppress(OSError):  # Forks of this process may have copies of the socket.
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()
