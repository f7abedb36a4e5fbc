"""The TCP connections of this process.

This process is asked for its sockets, and not the host for its list, which is long on a busy one.
"""

from __future__ import annotations

import os
import socket
import stat
import struct
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

_ESTABLISHED = 1
_MOVED = struct.Struct("=QQ")
_MOVED_AT = 120
"""Bytes acknowledged and received, in Linux's ``struct tcp_info``."""

type Endpoint = tuple[str, int]
"""Address and port."""


@dataclass(frozen=True, slots=True)
class Ends:
    """Ends of a connection."""

    local: Endpoint
    remote: Endpoint | None
    """Remote end; None while the connection is being made, and once it is broken."""


@dataclass(frozen=True, slots=True)
class Connection:
    """A connection of this process."""

    descriptor: int
    """Number that its owner has for it."""
    ends: Ends
    duplicate: socket.socket
    """The same connection, until the next one is asked for."""


def connections() -> Iterator[Connection]:
    """Yield every TCP connection of this process; one that listens is none."""
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if (connection := duplicate(descriptor)) is None:
            continue
        with connection:
            if (ends := _ends_of(connection)) is not None:
                yield Connection(descriptor, ends, connection)


def _ends_of(connection: socket.socket) -> Ends | None:
    """Return None if it is no connection."""
    if not is_tcp(connection):
        return None
    if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        return None
    remote = None
    with suppress(OSError):
        remote = _endpoint(connection.getpeername())
    return Ends(_endpoint(connection.getsockname()), remote)


def is_tcp(one: socket.socket) -> bool:
    """Return whether a socket is one of TCP, a listening one included."""
    return one.family in (socket.AF_INET, socket.AF_INET6) and one.type == socket.SOCK_STREAM


def moved(connection: socket.socket) -> tuple[int, int] | None:
    """Return bytes that have arrived at the other side, and here; None where no more can arrive."""
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    if info[0] != _ESTABLISHED:
        return None
    if len(info) < _MOVED_AT + _MOVED.size:  # Linux before 4.1
        return 0, 0
    return _MOVED.unpack_from(info, _MOVED_AT)


def duplicate(descriptor: int) -> socket.socket | None:
    """Return the socket behind a descriptor of this process; None if it is none, or closed by now."""
    with suppress(OSError):
        if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            copy = os.dup(descriptor)
            try:
                return socket.socket(fileno=copy)
            except OSError:  # of a family that Python does not know
                os.close(copy)
    return None


def _endpoint(name: tuple[str, int] | tuple[str, int, int, int]) -> Endpoint:
    return name[0].removeprefix("::ffff:"), name[1]
