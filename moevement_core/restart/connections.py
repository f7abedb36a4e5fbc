"""Shutdown of this process's TCP connections that leaves no message half received."""

from __future__ import annotations

import fcntl
import os
import re
import socket
import struct
import termios
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from moevement_core.util.tcp import Ends, connections, duplicate, is_tcp, moved

LOOK_S = 0.005
"""Seconds between two checks of the bytes that have moved on connections."""
_WATCHED_INODE = re.compile(r"^tfd:.*\bino:\s*([0-9a-f]+)", re.MULTILINE)
"""Pattern of a line in ``/proc/PID/fdinfo`` that names a descriptor watched by an epoll (Linux 5.1)."""


@dataclass(frozen=True, slots=True)
class Patience:
    """Limits in seconds on the wait for data that is under way."""

    idle_s: float = 0.02
    """Seconds from the first check until a connection on which no data moves counts as idle."""
    moved_s: float = 0.06
    """Seconds without data after which a connection counts as idle if data has moved on it since the first check.

    This limit is longer than ``idle_s``, because a sender may pause within a message to wait for a processor.
    """
    limit_s: float = 0.5
    """Limit on the wait for all connections together, because a failed rank never sends the rest of its message."""


def listening() -> set[int]:
    """Return the inodes of this process's sockets that listen for TCP connections."""
    return {inode for inode, _ in _listeners()}


def shut_down_listeners(kept: Collection[int]) -> None:
    """Shut down listening sockets, so that threads that wait in ``accept`` get an error.

    The function leaves a socket alone if an epoll watches it. No thread waits in ``accept`` on such a socket, and the
    epoll would report the shutdown to a gloo thread in an endless loop.

    Args:
        kept: inodes of sockets to leave alone; see :func:`listening`.
    """
    watched = _watched()
    for inode, listener in _listeners():
        if inode not in kept and inode not in watched:
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)


def _listeners() -> Iterator[tuple[int, socket.socket]]:
    """Yield inode and duplicate of every listening TCP socket; a duplicate is closed at the next iteration."""
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if (listener := duplicate(descriptor)) is None:
            continue
        with listener:
            if is_tcp(listener) and listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                yield os.fstat(listener.fileno()).st_ino, listener


def _watched() -> set[int]:
    """Return the inodes of all files that the epolls of this process watch."""
    inodes = set[int]()
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if os.readlink(f"/proc/self/fd/{descriptor}") == "anon_inode:[eventpoll]":
                text = Path(f"/proc/self/fdinfo/{descriptor}").read_text(encoding="ascii")
                inodes |= {int(inode, 16) for inode in _WATCHED_INODE.findall(text)}
    return inodes


def shut_down(is_meant: Callable[[Ends], bool], patience: Patience = Patience()) -> None:
    """Shut down connections. Before it shuts one down, the function waits until the data under way on it has arrived.

    The function includes connections that are made during the call. Descriptors stay open. Their owners find that the
    connections are broken, and close them.

    If a connection ends in the middle of a message, a gloo receive of this message never returns (torch 2.13,
    ``scripts/half_received_gloo.py``). So the function waits for the rest of the message, which arrives if both sides
    live. If no data moves on a connection, it is shut down after ``patience.idle_s``.

    Args:
        is_meant: returns True for the ends of a connection that is to be shut down.
        patience: limits on the wait for data under way.
    """
    seen: dict[Ends, _Seen] = {}
    ends_s = time.monotonic() + patience.limit_s
    while True:
        now_s, before, seen = time.monotonic(), seen, {}
        for current in connections():
            ends, connection = current.ends, current.duplicate
            if not is_meant(ends):
                continue
            now = _look(connection, before.get(ends), now_s)
            if now is None or now.is_quiet(now_s, patience) or now_s >= ends_s:
                with suppress(OSError):  # The connection is broken already.
                    connection.shutdown(socket.SHUT_RDWR)
            else:
                seen[ends] = now
        if not seen:
            return
        time.sleep(LOOK_S)


@dataclass(frozen=True, slots=True)
class _Seen:
    """State of a connection at the last check."""

    moved: tuple[int, int]
    """Numbers of bytes so far: acknowledged by the other side, and received here."""
    since_s: float
    """Monotonic time in seconds at which data last moved or was pending."""
    has_moved: bool
    """True if data has moved or was pending since the first check."""

    def is_quiet(self, now_s: float, patience: Patience) -> bool:
        return now_s - self.since_s >= (patience.moved_s if self.has_moved else patience.idle_s)


def _look(connection: socket.socket, before: _Seen | None, now_s: float) -> _Seen | None:
    """Return the new state of a connection; None if no more data can arrive on it."""
    if (counts := moved(connection)) is None:
        return None
    if before is None:
        return _Seen(counts, now_s, _is_pending(connection))
    if counts != before.moved or _is_pending(connection):
        return _Seen(counts, now_s, has_moved=True)
    return before


def _is_pending(connection: socket.socket) -> bool:
    """Return True if received data is unread, or sent data is not acknowledged."""
    return any(
        struct.unpack("=i", fcntl.ioctl(connection, request, bytes(4)))[0]
        for request in (termios.FIONREAD, termios.TIOCOUTQ)
    )
