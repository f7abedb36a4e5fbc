"""Server process of the job's store on one host.

The store answers on a thread of its process. At any moment that thread may hold a lock of the C library, for example
the resolver's lock while it logs a connection. A process forked at that moment inherits the locked lock without the
thread that would release the lock, and waits forever at its first connection. The launcher forks ranks and spares as
long as the job runs, so another process serves the store.
"""

from __future__ import annotations

import os
import socket
import time
from datetime import timedelta
from typing import Any

from moevement_core.launching.children import Child, Program, end_all

TIMEOUT = timedelta(minutes=10)
"""Timeout of torch's store for operations that wait."""


class StoreProcess:
    """Server process of the job's store.

    Args:
        listener: a socket that listens on loopback; the server takes it over.

    Raises:
        OSError: no process can be started.
    """

    def __init__(self, listener: socket.socket) -> None:
        self._port = int(listener.getsockname()[1])
        self._server = Child("store", Program(_serve, (listener.fileno(), self._port)), {}, None)
        listener.close()

    def connect(self) -> Any:
        """Return a client of the store, once the server answers."""
        import torch

        return torch.distributed.TCPStore("127.0.0.1", self._port, is_master=False, timeout=TIMEOUT)

    @property
    def has_ended(self) -> bool:
        """True if the server has ended. The content of the store is lost then, and the job cannot go on."""
        return self._server.poll() is not None

    def close(self) -> None:
        """End the server. The caller ends all clients first."""
        end_all([self._server])


def _serve(descriptor: int, port: int) -> None:
    """Serve the store in the server process until the process is killed."""
    import torch

    server = torch.distributed.TCPStore(
        "127.0.0.1", port, is_master=True, wait_for_workers=False, timeout=TIMEOUT, master_listen_fd=os.dup(descriptor),
        use_libuv=True,
    )  # fmt: skip
    while server is not None:
        time.sleep(3600)
