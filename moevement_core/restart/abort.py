"""Make everything that waits for another process give up waiting."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Collection
from contextlib import suppress

import psutil
from nvidia_resiliency_ext.inprocess.abort import Abort, AbortTorchDistributed
from nvidia_resiliency_ext.inprocess.state import FrozenState

from moevement_core.replication import transport

DRAIN_S = 5.0
"""How long sends and receives of background threads have to notice that their connections are gone."""


class AbortAll(Abort):
    """Ends every communication of this process with other ranks; runs on the wrapper's monitoring thread.

    Destroying a gloo group frees nobody who waits in it (torch 2.13 has no abort for gloo), and neither does the death
    of a rank that is only stopped. With its sockets shut down, every wait of gloo ends with an error at once.

    Args:
        store_port: connections to the job's store stay, but for those that process groups are made through.
        groups_ports: the local ports of these.
        before: called first; whatever must know that errors to come are nobody's fault.
    """

    def __init__(self, store_port: int, groups_ports: Collection[int], before: Callable[[], None]) -> None:
        self._store_port, self._groups_ports, self._before = store_port, groups_ports, before
        self._groups = AbortTorchDistributed()

    def __call__(self, state: FrozenState) -> FrozenState:  # on the wrapper's monitoring thread
        """Abort."""
        self._before()
        transport.refuse()
        shut_down_connections(but=self._store_port, except_from=self._groups_ports)
        transport.drained(DRAIN_S)
        self._groups(state)
        return state


def shut_down_connections(but: int, except_from: Collection[int] = ()) -> None:
    """Shut down every TCP connection of this process, but those to the port ``but``.

    Descriptors stay open: whoever uses them finds the connection broken and closes them.

    Args:
        but: a port, of this or of the other side.
        except_from: local ports of connections that are shut down all the same.
    """
    for connection in psutil.Process().net_connections("tcp"):
        if not connection.raddr:
            continue
        local, remote = connection.laddr.port, connection.raddr.port
        if but in (local, remote) and local not in except_from:
            continue
        with suppress(OSError), socket.socket(fileno=os.dup(connection.fd)) as duplicate:
            duplicate.shutdown(socket.SHUT_RDWR)
