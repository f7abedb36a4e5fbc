"""The job's store on one host, served by a process of its own.

The store answers on a thread of its process, and that thread may hold a lock of the C library at any moment: that of
the resolver, for example, while it prints who connects. A process that is forked then inherits the lock, held by
nobody, and waits for ever at its first connection. So the launcher, which forks ranks and spares for as long as the job
runs, serves no store itself and has no such thread.
"""

from __future__ import annotations

import os
import socket
import time
from datetime import timedelta
from typing import Any

from moevement_core.launching.children import Child, Program, end_all

TIMEOUT = timedelta(minutes=10)


class StoreProcess:
    """Server of the job's store, and this process's client of it.

    Args:
        listener: a socket that listens on loopback; it is the server's from now on.

    Raises:
        OSError: no process can be started.
    """

    def __init__(self, listener: socket.socket) -> None:
        self._port = int(listener.getsockname()[1])
        self._server = Child("store", Program(_serve, (listener.fileno(), self._port)), {}, None)
        listener.close()

    def connect(self) -> Any:
        """Return a client of the store; waits until the server answers."""
        import torch

        return torch.distributed.TCPStore("127.0.0.1", self._port, is_master=False, timeout=TIMEOUT)

    @property
    def has_ended(self) -> bool:
        """Whether the server is gone, and with it everything that the job had agreed on."""
        return self._server.poll() is not None

    def close(self) -> None:
        """End the server; nobody asks it any more."""
        end_all([self._server])


def _serve(descriptor: int, port: int) -> None:
    """Serve until this process is killed; called in it."""
    import torch

    server = torch.distributed.TCPStore(
        "127.0.0.1", port, is_master=True, wait_for_workers=False, timeout=TIMEOUT, master_listen_fd=os.dup(descriptor),
        use_libuv=True,
    )  # fmt: skip
    while server is not None:
        time.sleep(3600)
