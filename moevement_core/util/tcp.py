"""TCP connections of this process, found through its open descriptors.

The kernel's own list of TCP connections has those of all processes of the host, which can be very many.
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
"""Offset, in Linux's ``struct tcp_info``, of the two counters of acknowledged and received bytes."""

type Endpoint = tuple[str, int]
"""Address and port of one end of a connection."""


@dataclass(frozen=True, slots=True)
class Ends:
    """Ends of a TCP connection: local and remote address."""

    local: Endpoint
    remote: Endpoint | None
    """Remote address; None before the connection is established and after it breaks."""


@dataclass(frozen=True, slots=True)
class Connection:
    """Connection of this process, with its descriptor."""

    descriptor: int
    """Number of the descriptor in this process."""
    ends: Ends
    duplicate: socket.socket
    """Duplicate of the socket. :func:`connections` closes it when its caller asks for the next connection."""


def connections() -> Iterator[Connection]:
    """Yield every TCP connection of this process, without listening sockets."""
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if (connection := duplicate(descriptor)) is None:
            continue
        with connection:
            if (ends := _ends_of(connection)) is not None:
                yield Connection(descriptor, ends, connection)


def _ends_of(connection: socket.socket) -> Ends | None:
    """Return the ends of a TCP connection; None for a listening socket, and for a socket that does not use TCP."""
    if not is_tcp(connection):
        return None
    if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        return None
    remote = None
    with suppress(OSError):
        remote = _endpoint(connection.getpeername())
    return Ends(_endpoint(connection.getsockname()), remote)


def is_tcp(connection: socket.socket) -> bool:
    """Return True if a socket uses TCP, whether it is connected or listening."""
    return connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM


def moved(connection: socket.socket) -> tuple[int, int] | None:
    """Return the bytes that the other side has acknowledged so far, and the bytes that this process has received.

    Returns:
        None if the connection is not established; zeros on Linux before 4.1.
    """
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    if info[0] != _ESTABLISHED:
        return None
    if len(info) < _MOVED_AT + _MOVED.size:  # Linux before 4.1 does not count bytes.
        return 0, 0
    return _MOVED.unpack_from(info, _MOVED_AT)


def duplicate(descriptor: int) -> socket.socket | None:
    """Return a duplicate of the socket behind a descriptor; None if the descriptor is not an open socket."""
    with suppress(OSError):
        if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            copy = os.dup(descriptor)
            try:
                return socket.socket(fileno=copy)
            except OSError:  # Python does not know the address family.
                os.close(copy)
    return None


def _endpoint(name: tuple[str, int] | tuple[str, int, int, int]) -> Endpoint:
    return name[0].removeprefix("::ffff:"), name[1]
