"""Process that holds the store of torch's process groups, for a job on one host.

The launcher does not hold the store itself, because it forks ranks and spares as long as the job runs. The store
answers on a thread. At any moment that thread may hold a lock of the C library, for example the resolver's lock while
it logs a connection. A process forked at that moment inherits the locked lock without the thread that would release it,
and waits forever at its first connection.
"""

from __future__ import annotations

import os
import socket
import time
from datetime import timedelta
from typing import Any

from moevement_core.launching.children import Child, Program, end_all

TIMEOUT = timedelta(minutes=10)
"""Timeout of operations of torch's store that wait for a value."""


class StoreProcess:
    """Process that holds the store of process groups, and answers requests of ranks and the launcher.

    Args:
        listener: a socket that listens on loopback. The process takes it over, and the caller's copy is closed.

    Raises:
        OSError: no process can be started.
    """

    def __init__(self, listener: socket.socket) -> None:
        self._port = int(listener.getsockname()[1])
        self._server = Child("store", Program(_serve, (listener.fileno(), self._port)), {}, None)
        listener.close()

    def connect(self) -> Any:
        """Wait until the store answers, and return a client of it."""
        import torch

        return torch.distributed.TCPStore("127.0.0.1", self._port, is_master=False, timeout=TIMEOUT)

    @property
    def has_ended(self) -> bool:
        """True if the process has ended. Then the content of the store is lost, and the job cannot go on."""
        return self._server.poll() is not None

    def close(self) -> None:
        """End the process. The caller must have ended all clients before."""
        end_all([self._server])


def _serve(descriptor: int, port: int) -> None:
    """Hold the store and answer requests until this process is killed; a fork of the launcher runs this function."""
    import torch

    server = torch.distributed.TCPStore(
        "127.0.0.1", port, is_master=True, wait_for_workers=False, timeout=TIMEOUT, master_listen_fd=os.dup(descriptor),
        use_libuv=True,
    )  # fmt: skip
    while server is not None:
        time.sleep(3600)
