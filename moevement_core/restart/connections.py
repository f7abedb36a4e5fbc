"""An end to the TCP connections of this process that leaves no message half received."""

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

from moevement_core.tcp import Ends, connections, duplicate, is_tcp, moved

LOOK_S = 0.005
"""Seconds between two checks of what has moved."""
_WATCHED_INODE = re.compile(r"^tfd:.*\bino:\s*([0-9a-f]+)", re.MULTILINE)
"""Line of a watched descriptor in what ``/proc`` shows of an epoll (Linux 5.1)."""


@dataclass(frozen=True, slots=True)
class Patience:
    """Limits of waiting for messages under way, in seconds."""

    idle_s: float = 0.02
    """Seconds without movement after which a connection counts as idle."""
    moved_s: float = 0.06
    """The same for one on which something has: who sends the rest of a message may not be scheduled just then."""
    limit_s: float = 0.5
    """Most seconds for all connections together: a rank that failed while it sent sends no more."""


def listening() -> set[int]:
    """Return the sockets of this process that listen for TCP connections, by their inodes."""
    return {inode for inode, _ in _listeners()}


def shut_down_listeners(kept: Collection[int]) -> None:
    """End every wait for a caller: who waits in ``accept`` gets an error, and nobody can connect any more.

    A socket that an epoll watches stays as it is: nobody waits in ``accept`` on it, and the thread of gloo that owns
    the epoll would be told of the end again and again.

    Args:
        kept: inodes of sockets that stay as they are; see :func:`listening`.
    """
    watched = _watched()
    for inode, listener in _listeners():
        if inode not in kept and inode not in watched:
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)


def _listeners() -> Iterator[tuple[int, socket.socket]]:
    """Every listening TCP socket, as a duplicate that is closed when the next is asked for."""
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if (one := duplicate(descriptor)) is None:
            continue
        with one:
            if is_tcp(one) and one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                yield os.fstat(one.fileno()).st_ino, one


def _watched() -> set[int]:
    """Return the inodes of all that the epolls of this process watch."""
    found = set[int]()
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if os.readlink(f"/proc/self/fd/{descriptor}") == "anon_inode:[eventpoll]":
                text = Path(f"/proc/self/fdinfo/{descriptor}").read_text(encoding="ascii")
                found |= {int(inode, 16) for inode in _WATCHED_INODE.findall(text)}
    return found


def shut_down(is_meant: Callable[[Ends], bool], patience: Patience = Patience()) -> None:
    """Shut down connections, each as soon as what is under way on it has arrived; those made meanwhile, too.

    Descriptors stay open: whoever uses them finds the connection broken and closes them. A receive of gloo of which a
    part has come never ends when its connection does (torch 2.13, ``scripts/half_received_gloo.py``): where both sides
    live, the rest comes first. Who waits for a message of which nothing has come is freed after ``patience.idle_s``.

    Args:
        is_meant: whether a connection is to be shut down.
        patience: with what is under way.
    """
    seen: dict[Ends, _Seen] = {}
    ends_s = time.monotonic() + patience.limit_s
    while True:
        now_s, before, seen = time.monotonic(), seen, {}
        for one in connections():
            ends, connection = one.ends, one.duplicate
            if not is_meant(ends):
                continue
            now = _look(connection, before.get(ends), now_s)
            if now is None or now.is_quiet(now_s, patience) or now_s >= ends_s:
                with suppress(OSError):  # it is broken already
                    connection.shutdown(socket.SHUT_RDWR)
            else:
                seen[ends] = now
        if not seen:
            return
        time.sleep(LOOK_S)


@dataclass(frozen=True, slots=True)
class _Seen:
    """State of a connection at its last check."""

    moved: tuple[int, int]
    """Bytes that have arrived at the other side, and here."""
    since_s: float
    """Time at which something had moved last, or was on its way."""
    has_moved: bool

    def is_quiet(self, now_s: float, patience: Patience) -> bool:
        return now_s - self.since_s >= (patience.moved_s if self.has_moved else patience.idle_s)


def _look(connection: socket.socket, before: _Seen | None, now_s: float) -> _Seen | None:
    """Nothing where no more can arrive."""
    if (counts := moved(connection)) is None:
        return None
    if before is None:
        return _Seen(counts, now_s, _is_pending(connection))
    if counts != before.moved or _is_pending(connection):
        return _Seen(counts, now_s, has_moved=True)
    return before


def _is_pending(connection: socket.socket) -> bool:
    """Return whether bytes have arrived that were not read, or were sent and have not arrived."""
    return any(
        struct.unpack("=i", fcntl.ioctl(connection, request, bytes(4)))[0]
        for request in (termios.FIONREAD, termios.TIOCOUTQ)
    )
