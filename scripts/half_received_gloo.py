"""A receive of which a part has come: torch's gloo never ends it when its connection does.

``python scripts/half_received_gloo.py`` says within seconds whether the wait ended, with torch alone: a process sends
to another and is stopped in the middle of it, and the other shuts its connections down. That is why copies of snapshots
travel over sockets (``moevement_core/replication/connections.py``).
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import threading
import time
from contextlib import suppress
from multiprocessing.connection import Connection

import psutil
import torch
import torch.distributed as dist

BYTES = 400_000_000
PATIENCE_S = 5.0


def _join(rank: int, port: int) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.TCPStore("127.0.0.1", port, 2, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)


def _wait_for(work: dist.Work | None) -> None:
    assert work is not None, "this rank is in the group"
    work.wait()


def _send(port: int) -> None:
    _join(1, port)
    _wait_for(dist.isend(torch.zeros(BYTES, dtype=torch.uint8), dst=0))


def _receive(port: int, sender: int, said: Connection) -> None:
    _join(0, port)
    data = torch.ones(BYTES, dtype=torch.uint8)
    ended = threading.Event()

    def receive() -> None:
        with suppress(RuntimeError):
            _wait_for(dist.irecv(data, src=1))
        ended.set()

    threading.Thread(target=receive, daemon=True).start()
    while data[0]:
        time.sleep(0.0001)
    os.kill(sender, signal.SIGSTOP)
    for one in psutil.Process().net_connections("tcp"):
        if one.raddr and port not in (one.laddr.port, one.raddr.port):
            with socket.socket(fileno=os.dup(one.fd)) as duplicate:
                duplicate.shutdown(socket.SHUT_RDWR)
    said.send((int((data == 0).sum()), ended.wait(PATIENCE_S)))


def main() -> None:
    """Say whether the wait ended."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = int(probe.getsockname()[1])
    processes = multiprocessing.get_context("fork")
    here, there = processes.Pipe()
    sender = processes.Process(target=_send, args=(port,), daemon=True)
    sender.start()
    receiver = processes.Process(target=_receive, args=(port, sender.pid, there), daemon=True)
    receiver.start()
    received, has_ended = here.recv()
    for one in (sender, receiver):
        one.kill()
    print(
        f"torch {torch.__version__}: {received:,} of {BYTES:,} bytes had come when connections were shut down; the "
        + ("wait ended" if has_ended else f"wait did not end within {PATIENCE_S:g} s")
    )


if __name__ == "__main__":
    main()
