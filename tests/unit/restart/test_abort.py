"""A shutdown of connections frees the threads that wait on them, and leaves connections to the store open."""

from __future__ import annotations

import os
import select
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from nvidia_resiliency_ext.inprocess.state import State

from moevement_core.comms import transport
from moevement_core.comms.connections import Address, Connections
from moevement_core.comms.exchange import all_gather_objects
from moevement_core.restart.abort import AbortAll
from moevement_core.restart.connections import Patience, listening, shut_down, shut_down_listeners
from moevement_core.restart.leaving import Leaving
from moevement_core.util.tcp import connections
from tests.harness import run_ranks


@pytest.fixture(autouse=True)
def admitted_again() -> Iterator[None]:
    """Let the process of the test make transports again, as a rank does when it has left its generation."""
    yield
    transport.admit()


def test_every_wait_ends_but_those_of_the_store() -> None:
    with socket.create_server(("127.0.0.1", 0)) as peers, socket.create_server(("127.0.0.1", 0)) as store:
        peer, to_store = (socket.create_connection(server.getsockname()) for server in (peers, store))
        (others, _), (served, _) = peers.accept(), store.accept()
        ended = threading.Event()

        def wait() -> None:
            peer.recv(1)
            ended.set()

        threading.Thread(target=wait, daemon=True).start()
        shut_down(lambda ends: store.getsockname() not in (ends.local, ends.remote))
        assert ended.wait(10), "nobody sent anything, and the wait is over"
        to_store.sendall(b"x")
        assert served.recv(1) == b"x"
        for connection in (peer, to_store, others, served):
            connection.close()


def test_user_buffers_are_destroyed_and_the_registry_of_fp8_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the registry of FP8: the main thread may be in an FP8 region, and modules never register again."""
    called: list[str] = []
    engine, fp8 = ModuleType("transformer_engine.pytorch"), ModuleType("transformer_engine.pytorch.fp8")
    engine.module = SimpleNamespace(base=SimpleNamespace(destroy_ub=lambda: called.append("destroy_ub")))  # type: ignore[attr-defined]
    fp8.FP8GlobalStateManager = SimpleNamespace(reset=lambda: called.append("reset"))  # type: ignore[attr-defined]
    engine.fp8 = fp8  # type: ignore[attr-defined]
    for module in (ModuleType("transformer_engine"), engine, fp8):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    AbortAll({}, {}, lambda: None, Leaving(), listening())(State(0, 1).freeze())
    assert called == ["destroy_ub"]


def test_a_peer_with_the_number_of_the_stores_port_is_shut_down_too() -> None:
    """Reproduce a coincidence of large jobs: a connection to a peer has the same port number as the store."""
    with socket.create_server(("127.0.0.1", 0)) as store, socket.create_server(("127.0.0.3", 0)) as peers:
        port = store.getsockname()[1]
        peer = socket.create_connection(peers.getsockname(), source_address=("127.0.0.2", port))
        to_store = socket.create_connection(store.getsockname())
        for_groups = socket.create_connection(store.getsockname())
        (others, _), *served = peers.accept(), store.accept()[0], store.accept()[0]
        groups = {connection.ends for connection in connections() if connection.ends.local == for_groups.getsockname()}
        leaving, kept = Leaving(), listening()
        AbortAll({("127.0.0.1", port)}, groups, lambda: None, leaving, kept)(State(0, 1).freeze())
        assert list(leaving.seconds) == ["shut_down", "drain", "abort"]
        assert others.recv(1) == b"", "the peer is shut down"
        assert served[1].recv(1) == b"", "what process groups are made through, too"
        to_store.sendall(b"x")
        assert served[0].recv(1) == b"x"
        for connection in (peer, others, to_store, for_groups, *served):
            connection.close()


def test_who_waits_for_a_caller_is_freed_and_other_servers_go_on() -> None:
    """Free a thread in ``accept``, as in the creation of an NCCL communicator. No exception can end that wait."""
    with socket.create_server(("127.0.0.1", 0)) as script_server:
        kept = listening()
        assert os.fstat(script_server.fileno()).st_ino in kept
        with (
            socket.create_server(("127.0.0.1", 0)) as waiting,
            socket.create_server(("127.0.0.1", 0)) as watched,
            select.epoll() as epoll,
        ):
            epoll.register(watched, select.EPOLLIN)
            failed: list[OSError] = []

            def wait() -> None:
                try:
                    waiting.accept()
                except OSError as error:
                    failed.append(error)

            thread = threading.Thread(target=wait, daemon=True)
            thread.start()
            shut_down_listeners(kept)
            thread.join(10)
            assert len(failed) == 1
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(waiting.getsockname())
            for server in (script_server, watched):
                with socket.create_connection(server.getsockname()):
                    server.accept()[0].close()


def test_nothing_but_connections_is_touched(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams,
        (tmp_path / "file").open("w+") as file,
    ):
        left, right = socket.socketpair()
        datagrams.connect(server.getsockname())
        shut_down(lambda _: True)
        late = socket.create_connection(server.getsockname())
        accepted, _ = server.accept()
        accepted.sendall(b"a")
        assert late.recv(1) == b"a"
        left.sendall(b"b")
        assert right.recv(1) == b"b"
        assert datagrams.send(b"c") == 1
        assert file.write("d") == 1
        for each in (left, right, late, accepted):
            each.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_many_connections_end_while_others_go() -> None:
    """Check that all other connections are shut down although another thread closes some meanwhile."""
    with socket.create_server(("127.0.0.1", 0), backlog=512) as server:
        pairs = [(socket.create_connection(server.getsockname()), server.accept()[0]) for _ in range(150)]
        going = [(socket.create_connection(server.getsockname()), server.accept()[0]) for _ in range(150)]

        def close() -> None:
            for pair in going:
                for each in pair:
                    each.close()

        closing = threading.Thread(target=close)
        closing.start()
        shut_down(lambda _: True)
        closing.join()
        for each in (end for pair in pairs for end in pair):
            each.settimeout(10)
            assert each.recv(1) == b""
            each.close()


def _abort_while_receiving(is_half_received: bool) -> None:
    rank = dist.get_rank()
    connections = Connections("127.0.0.1")
    connections.open(rank, all_gather_objects(connections.address, Address))
    channel = connections.channel("test")
    failed: list[Exception] = []
    wanted = torch.ones(64 << 20, dtype=torch.uint8)
    if is_half_received:
        channel.send(1 - rank, 1, torch.zeros(1 << 20, dtype=torch.uint8))

    def receive() -> None:
        try:
            channel.receive(1 - rank, 1, wanted)
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
        channel.send(1 - rank, 1, torch.empty(8, dtype=torch.uint8))
    dist.barrier()


@pytest.mark.parametrize("is_half_received", [False, True])
def test_an_abort_ends_what_is_under_way_and_refuses_the_rest(is_half_received: bool) -> None:
    run_ranks(_abort_while_receiving, 2, is_half_received)


def _abort_in_the_middle_of_a_message() -> None:
    """Interrupt two live ranks while one sends to the other."""
    rank = dist.get_rank()
    data = torch.full((100 << 20,), 1 - rank, dtype=torch.uint8)
    ended = threading.Event()

    def move() -> None:
        with suppress(RuntimeError):
            if rank == 0:
                dist.recv(data, 1)
            else:
                dist.send(data, 0)
        ended.set()

    dist.barrier()
    threading.Thread(target=move, daemon=True).start()
    if rank == 0:
        while data[0]:
            time.sleep(0.0001)
    store = int(os.environ["MASTER_PORT"])
    shut_down(lambda ends: ends.remote is None or ends.remote[1] != store, Patience(2.0, 2.0, 30.0))
    assert ended.wait(30)
    assert rank == 1 or not data.any()


def test_a_message_under_way_arrives_before_its_connection_is_shut_down() -> None:
    run_ranks(_abort_in_the_middle_of_a_message, 2)


def test_connections_that_are_made_during_an_abort_are_refused_until_the_rank_has_left() -> None:
    transport.refuse()
    late = Connections("127.0.0.1")
    with pytest.raises(RuntimeError):
        late.open(0, [late.address])
    transport.admit()
    next_ones = Connections("127.0.0.1")
    next_ones.open(0, [next_ones.address])
    next_ones.close()
