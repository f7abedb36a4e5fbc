"""Connections that are shut down free whoever waits on them; the store's stay."""

from __future__ import annotations

import socket
import threading
import time

import pytest
import torch
import torch.distributed as dist

from moevement_core.replication import transport
from moevement_core.replication.connections import Address, Connections
from moevement_core.restart.abort import shut_down_connections
from moevement_core.session.exchange import all_gather_objects
from tests.harness import run_ranks


def test_every_wait_ends_but_those_of_the_store() -> None:
    with socket.create_server(("127.0.0.1", 0)) as peers, socket.create_server(("127.0.0.1", 0)) as store:
        peer, to_store = (socket.create_connection(server.getsockname()) for server in (peers, store))
        (others, _), (served, _) = peers.accept(), store.accept()
        ended = threading.Event()

        def wait() -> None:
            peer.recv(1)
            ended.set()

        threading.Thread(target=wait, daemon=True).start()
        shut_down_connections(but=store.getsockname()[1])
        assert ended.wait(10), "nobody sent anything, and the wait is over"
        to_store.sendall(b"x")
        assert served.recv(1) == b"x"
        for one in (peer, to_store, others, served):
            one.close()


def _abort_while_receiving(is_half_received: bool) -> None:
    rank = dist.get_rank()
    connections = Connections("127.0.0.1")
    connections.open(rank, all_gather_objects(connections.address, Address))
    mine = connections.channel("test")
    failed: list[Exception] = []
    wanted = torch.ones(64 << 20, dtype=torch.uint8)
    if is_half_received:
        mine.send(1 - rank, 1, torch.zeros(1 << 20, dtype=torch.uint8))

    def receive() -> None:
        try:
            mine.receive(1 - rank, 1, wanted)
        except RuntimeError as error:
            failed.append(error)

    thread = threading.Thread(target=receive, daemon=True)
    thread.start()
    deadline = time.monotonic() + 10
    while (not connections._under_way or bool(wanted[0]) == is_half_received) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not transport.drained(0.0), "nobody sends the rest, so the receive is under way"
    dist.barrier()
    transport.refuse()
    assert transport.drained(10), "the broken connection has ended it"
    thread.join(10)
    assert len(failed) == 1
    with pytest.raises(RuntimeError, match="aborted"):
        mine.send(1 - rank, 1, torch.empty(8, dtype=torch.uint8))
    dist.barrier()


@pytest.mark.parametrize("is_half_received", [False, True])
def test_an_abort_ends_what_is_under_way_and_refuses_the_rest(is_half_received: bool) -> None:
    run_ranks(_abort_while_receiving, 2, is_half_received)
