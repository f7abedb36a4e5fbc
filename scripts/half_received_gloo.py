"""Reproduction of a fault of torch: gloo never ends a partly completed receive when its connection closes.

``python scripts/half_received_gloo.py`` reports within seconds whether the wait of the receiver ended. The script uses
torch alone. The receiver stops the sender in the middle of a message, and then shuts the connections down. Because of
this fault, this project sends copies of snapshots over its own sockets (``moevement_core/comms/connections.py``).
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


def _receive(port: int, sender: int, results: Connection) -> None:
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
    for connection in psutil.Process().net_connections("tcp"):
        if connection.raddr and port not in (connection.laddr.port, connection.raddr.port):
            with socket.socket(fileno=os.dup(connection.fd)) as duplicate:
                duplicate.shutdown(socket.SHUT_RDWR)
    results.send((int((data == 0).sum()), ended.wait(PATIENCE_S)))


def main() -> None:
    """Run the sender and the receiver, and print whether the wait of the receiver ended."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = int(probe.getsockname()[1])
    processes = multiprocessing.get_context("fork")
    here, there = processes.Pipe()
    sender = processes.Process(target=_send, args=(port,), daemon=True)
    sender.start()
    receiver = processes.Process(target=_receive, args=(port, sender.pid, there), daemon=True)
    receiver.start()
    received, has_ended = here.recv()
    for process in (sender, receiver):
        process.kill()
    print(
        f"torch {torch.__version__}: {received:,} of {BYTES:,} bytes had arrived when connections were shut down; the "
        + ("wait ended" if has_ended else f"wait did not end within {PATIENCE_S:g} s")
    )


if __name__ == "__main__":
    main()
