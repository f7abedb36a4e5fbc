"""Connections between ranks beside training: order of messages, unauthenticated peers, and ranks that die."""

from __future__ import annotations

import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from moevement_core.comms import token
from moevement_core.comms.address import own_address
from moevement_core.comms.connections import BULK, LOWER_EFFORT, MOST_UNKNOWN, Address, Connections, _token_of
from moevement_core.comms.exchange import all_gather_objects
from moevement_core.comms.stripes import STRIPE_BYTES
from moevement_core.errors import ConfigError
from tests.harness import run_ranks


@pytest.fixture
def two() -> Iterator[tuple[Connections, Connections]]:
    both = Connections("127.0.0.1"), Connections("127.0.0.1")
    for rank, connections in enumerate(both):
        connections.open(rank, [peer.address for peer in both])
    yield both
    for connections in both:
        connections.close()


def _bytes(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.uint8)


def test_messages_come_in_order_on_each_channel_and_tag(two: tuple[Connections, Connections]) -> None:
    first, second = two
    for channel, tag, value in (("a", 1, 1), ("a", 2, 2), ("b", 1, 3), ("a", 1, 4)):
        first.channel(channel).send(1, tag, _bytes(value, value))
    received = []
    for channel, tag in (("b", 1), ("a", 2), ("a", 1), ("a", 1)):
        data = torch.empty(2, dtype=torch.uint8)
        second.channel(channel).receive(0, tag, data)
        received.append(data.tolist())
    assert received == [[3, 3], [2, 2], [1, 1], [4, 4]]


@pytest.mark.skipif(sys.platform != "linux", reason="classes of traffic are Linux's")
def test_what_may_wait_is_in_the_class_for_that_and_nothing_else_is(two: tuple[Connections, Connections]) -> None:
    first, second = two
    for channel, is_background in (("a", True), ("b", False)):
        first.channel(channel, is_background=is_background).send(1, 1, _bytes(1))
        second.channel(channel).receive(0, 1, _bytes(0))
        connection = first.to(channel, 1, 1)
        classes = (
            connection.getsockopt(socket.IPPROTO_IP, socket.IP_TOS),
            connection.getsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY),
        )
        assert classes == ((LOWER_EFFORT << 2, BULK) if is_background else (0, 0))


@pytest.mark.parametrize("streams", [1, 3])
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux paces what is sent")
def test_what_is_paced_takes_as_long_as_its_rate_says(streams: int) -> None:
    both = Connections("127.0.0.1", streams), Connections("127.0.0.1", streams)
    for rank, connections in enumerate(both):
        connections.open(rank, [peer.address for peer in both])
    first, second = both[0].channel("a"), both[1].channel("a")
    sent, received = torch.zeros(6 << 20, dtype=torch.uint8), torch.empty(6 << 20, dtype=torch.uint8)
    first.pace(1, 1, 10e6)
    reader = threading.Thread(target=second.receive, args=(0, 1, received))
    reader.start()
    began_s = time.perf_counter()
    first.send(1, 1, sent)
    reader.join()
    assert time.perf_counter() - began_s > 0.3, (
        "half of what the rate says, for the kernel sends the first part at once"
    )
    first.pace(1, 1, math.inf)
    first.send(1, 1, sent[:100])
    second.receive(0, 1, received[:100])
    for connections in both:
        connections.close()


@pytest.mark.parametrize("streams", [1, 2, 5])
def test_bytes_over_several_connections_come_in_order_whatever_their_pieces(streams: int) -> None:
    both = Connections("127.0.0.1", streams), Connections("127.0.0.1", streams)
    for rank, connections in enumerate(both):
        connections.open(rank, [peer.address for peer in both])
    first, second = both[0].channel("a"), both[1].channel("a")
    sent = torch.randint(0, 256, (9 * STRIPE_BYTES + 12345,), dtype=torch.uint8)
    received = torch.zeros_like(sent)

    def send() -> None:
        for piece in sent.split([1, 3 * STRIPE_BYTES + 7, 0, 2 * STRIPE_BYTES, sent.numel() - 5 * STRIPE_BYTES - 8]):
            first.send(1, 1, piece)

    sender = threading.Thread(target=send, daemon=True)
    sender.start()
    for piece in received.split([4 * STRIPE_BYTES, STRIPE_BYTES // 2, sent.numel() - 9 * STRIPE_BYTES // 2]):
        second.receive(0, 1, piece)
    sender.join()
    assert torch.equal(received, sent)
    assert len(both[1]._from) == streams
    for connections in both:
        connections.close()


def test_a_connection_of_several_that_breaks_ends_the_transfer_on_both_sides() -> None:
    both = Connections("127.0.0.1", 3), Connections("127.0.0.1", 3)
    for rank, connections in enumerate(both):
        connections.open(rank, [peer.address for peer in both])
    first, second = both[0].channel("a"), both[1].channel("a")
    data = torch.zeros(64 * STRIPE_BYTES, dtype=torch.uint8)
    before = set(threading.enumerate())
    failed: list[str] = []

    def send() -> None:
        try:
            first.send(1, 1, data)
        except RuntimeError as error:
            failed.append(str(error))

    sender = threading.Thread(target=send, daemon=True)
    sender.start()
    second.receive(0, 1, torch.empty(4 * STRIPE_BYTES, dtype=torch.uint8))
    both[1].close()
    sender.join(20)
    assert not sender.is_alive()
    assert len(failed) == 1
    assert "rank 1" in failed[0]
    deadline = time.monotonic() + 20
    while (left := [thread.name for thread in set(threading.enumerate()) - before if "stripe" in thread.name]) and (
        time.monotonic() < deadline
    ):
        time.sleep(0.02)
    assert not left
    with pytest.raises(RuntimeError):
        second.receive(0, 1, data)
    both[0].close()


def test_ranks_of_a_node_take_its_interfaces_in_turn() -> None:
    for local_rank, interface in ((0, "a"), (1, "b"), (2, "a")):
        addresses = {name: [mock.Mock(family=socket.AF_INET, address=f"10.0.0.{ord(name)}")] for name in ("a", "b")}
        with (
            mock.patch.dict(os.environ, {"LOCAL_RANK": str(local_rank), "GLOO_SOCKET_IFNAME": "lo"}),
            mock.patch("psutil.net_if_addrs", return_value=addresses),
        ):
            assert own_address(("a", "b")) == f"10.0.0.{ord(interface)}"
    with pytest.raises(ConfigError, match=r"--moevement-interfaces nosuch0\b.*\blo\b"):
        own_address(("nosuch0",))


def test_connections_begin_at_the_address_of_the_interface() -> None:
    both = Connections("127.0.0.2", is_source=True), Connections("127.0.0.3", is_source=True)
    for rank, connections in enumerate(both):
        connections.open(rank, [peer.address for peer in both])
    both[0].channel("a").send(1, 1, _bytes(5))
    both[1].channel("a").receive(0, 1, torch.empty(1, dtype=torch.uint8))
    assert both[1].come_from("a", 0, 1).getpeername()[0] == "127.0.0.2"
    for connections in both:
        connections.close()


def test_a_stranger_is_turned_away(two: tuple[Connections, Connections]) -> None:
    first, second = two
    with socket.create_connection((second.address.host, second.address.port)) as unauthenticated:
        unauthenticated.sendall(b"x" * 4096)
        unauthenticated.settimeout(10)
        with suppress(ConnectionResetError):  # the rank closes the connection before it has read all bytes
            answer = b""
            while chunk := unauthenticated.recv(4096):
                answer += chunk
            assert len(answer) <= 48, "a nonce and a MAC, which everybody gets"
    wrong = Connections("127.0.0.1")
    wrong.open(0, [wrong.address, replace(second.address, secret=b"0" * 16)])
    with pytest.raises(RuntimeError, match=r"\brank 1\b.*\banother process\b"):
        wrong.channel("a").send(1, 1, _bytes(9))
    first.channel("a").send(1, 1, _bytes(5))
    data = torch.empty(1, dtype=torch.uint8)
    second.channel("a").receive(0, 1, data)
    assert data.tolist() == [5]
    wrong.close()


def test_a_greeting_that_was_recorded_is_nothing_the_second_time(two: tuple[Connections, Connections]) -> None:
    first, second = two
    sent: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as between:
        port = between.getsockname()[1]
        first.addresses = [first.address, replace(second.address, port=port)]
        carrying = threading.Thread(target=_carry, args=(between, second.address.port, sent), daemon=True)
        carrying.start()
        first.channel("a").send(1, 1, _bytes(5))
        data = torch.empty(1, dtype=torch.uint8)
        second.channel("a").receive(0, 1, data)
        carrying.join(10)
    with socket.create_connection(("127.0.0.1", second.address.port)) as again:
        again.sendall(b"".join(sent).replace(b"\x05", b"\x06"))
        again.settimeout(10)
        with suppress(ConnectionResetError):
            while again.recv(100):
                pass
    assert len(second._from) == 1


def _carry(between: socket.socket, port: int, sent: list[bytes]) -> None:
    caller, _ = between.accept()
    called = socket.create_connection(("127.0.0.1", port))
    for size, source, target in ((56, caller, called), (48, called, caller), (33, caller, called)):
        data = b""
        while len(data) < size:
            data += source.recv(size - len(data))
        if source is caller:
            sent.append(data)
        target.sendall(data)


def test_half_open_connections_are_few_and_keep_nobody_out(two: tuple[Connections, Connections]) -> None:
    first, second = two
    silent = [socket.create_connection(("127.0.0.1", second.address.port)) for _ in range(MOST_UNKNOWN + 20)]
    for connection in silent[::2]:
        connection.sendall(b"x" * 10)
    first.channel("a").send(1, 1, _bytes(5))
    data = torch.empty(1, dtype=torch.uint8)
    second.channel("a").receive(0, 1, data)
    deadline = time.monotonic() + 10
    while len(second._sockets) > MOST_UNKNOWN + 5 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(second._sockets) <= MOST_UNKNOWN + 5
    for connection in silent:
        connection.close()


def test_the_token_of_the_job_counts_beside_the_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    address = Address("127.0.0.1", 1, b"0" * 16)
    monkeypatch.setattr(token, "_own", None)
    without = _token_of(address).text
    monkeypatch.setattr(token, "_own", token.Token("a" * 40))
    assert _token_of(address).text == without + "a" * 40


def test_what_is_sent_before_the_end_arrives(two: tuple[Connections, Connections]) -> None:
    first, second = two
    first.channel("a").send(1, 1, _bytes(1, 2, 3))
    first.close()
    data = torch.empty(3, dtype=torch.uint8)
    second.channel("a").receive(0, 1, data)
    assert data.tolist() == [1, 2, 3]
    with pytest.raises(RuntimeError, match="rank 0"):
        second.channel("a").receive(0, 1, data)
    with pytest.raises(RuntimeError, match="rank 0"):
        second.channel("a").send(0, 1, data)


def _receive_from_one_that_dies() -> str:
    rank = dist.get_rank()
    connections = Connections(own_address())
    connections.open(rank, all_gather_objects(connections.address, Address))
    channel = connections.channel("a")
    if rank == 0:
        channel.send(1, 1, torch.zeros(1 << 20, dtype=torch.uint8))
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        channel.receive(0, 1, torch.empty(1 << 21, dtype=torch.uint8))
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_receive_ends_when_the_sender_dies_in_the_middle_of_it() -> None:
    outcomes = run_ranks(_receive_from_one_that_dies, 2, check=False)
    assert "rank 0" in outcomes[1].result


def test_the_address_is_that_of_the_interface_asked_for() -> None:
    with mock.patch.dict(os.environ, {"GLOO_SOCKET_IFNAME": "lo"}):
        assert own_address() == "127.0.0.1"
    with (
        mock.patch.dict(os.environ, {"GLOO_SOCKET_IFNAME": "nosuch0"}),
        pytest.raises(ConfigError, match=r"\bGLOO_SOCKET_IFNAME=nosuch0\b.*\blo\b"),
    ):
        own_address()
    with mock.patch.dict(os.environ, {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}):
        os.environ.pop("GLOO_SOCKET_IFNAME", None)
        os.environ.pop("MOEVEMENT_STORE", None)
        assert own_address() == "127.0.0.1"
