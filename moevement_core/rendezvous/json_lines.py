"""A connection that carries lines of JSON."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

MAX_LINE_BYTES = 1 << 20


class JsonLines:
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
        """Close it."""
        self.socket.close()
