"""Leases over real loopback connections: heartbeats, broken connections, silence, requests and answers."""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any, cast

import pytest

from moevement_core.comms import signed_server
from moevement_core.comms.signed_lines import Side, SignedLines
from moevement_core.comms.signed_server import MOST_UNKNOWN
from moevement_core.comms.token import Token
from moevement_core.rendezvous.lease_client import LeaseClient
from moevement_core.rendezvous.lease_server import LeaseServer
from moevement_core.rendezvous.status_page import boot_time_s
from moevement_core.rendezvous.values import Values
from tests.values import Holder

LEASE_S = 1.0
TOKEN = Token.new()
KILLED = "was killed by signal 9"


class Both:
    """Server and client that are stepped in turns."""

    def __init__(self) -> None:
        listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.address = listener.getsockname()[:2]
        self.holder, self.requests = Holder(), list[tuple[str, str, int]]()
        self.values = Values()
        self.server = LeaseServer(
            listener, cast(Any, self.holder), TOKEN, lambda *request: self.requests.append(request), self.values
        )
        self.answer: dict[str, Any] = {"generation": 3, "wind_down": False}
        self.client = self.connect()

    def connect(self) -> LeaseClient:
        return LeaseClient("task 0", self.address, LEASE_S, TOKEN)

    def until(self, holds: Callable[[], bool], alive: Mapping[int, int | None] | None = None) -> None:
        alive = {4: 7, 5: None} if alive is None else alive
        deadline = time.monotonic() + 10
        while not holds():
            assert time.monotonic() < deadline
            self.client.step([4, 5], alive)
            self.server.poll(0.01, self.answer)


@pytest.fixture
def both() -> Iterator[Both]:
    pair = Both()
    yield pair
    pair.client.close()
    pair.server.close()


def test_beats_renew_the_leases_of_those_that_live_and_tell_how_far_they_are(both: Both) -> None:
    both.until(lambda: both.client.is_connected)
    assert both.holder.alive == {4: 7, 5: None}
    assert both.holder.membership.lease_s == LEASE_S, "a flag of the script, which the coordinator learns from tasks"
    assert both.client.generation == 3
    assert boot_time_s() < both.client.held_until <= boot_time_s() + LEASE_S


def test_a_lease_is_counted_from_when_the_beat_was_sent_not_from_its_answer(both: Both) -> None:
    """Check that a supervisor gives up its processes before the coordinator replaces them."""
    both.until(lambda: both.client.is_connected)
    both.client._beat_at = -1e9
    sent_at = boot_time_s()
    both.client.step([4, 5], {4: 8})
    time.sleep(0.3)
    both.server.poll(0.05, both.answer)
    both.client._receive()
    assert both.holder.alive[4] == 8
    assert sent_at + LEASE_S <= both.client.held_until < sent_at + LEASE_S + 0.2


def test_without_answers_the_lease_runs_out(both: Both) -> None:
    both.until(lambda: both.client.is_connected)
    deadline = time.monotonic() + 10
    while boot_time_s() < both.client.held_until:
        both.client.step([4, 5], {4: 7})  # the server is not polled
        time.sleep(0.02)
        assert time.monotonic() < deadline
    both.until(lambda: boot_time_s() < both.client.held_until)


def test_a_death_is_sent_until_it_is_answered_over_a_new_connection_too(both: Both) -> None:
    both.until(lambda: both.client.is_connected)
    both.client.died(4, 1234, KILLED)
    both.client._disconnect()
    both.until(lambda: bool(both.holder.dead) and not both.client._news)
    assert set(both.holder.dead) == {(4, 1234, KILLED)}


def test_a_call_that_fails_does_not_change_whose_answers_a_client_gets(both: Both) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        nobody = closed.getsockname()[:2]
    both.client.close()
    both.client = LeaseClient("task 0", nobody, LEASE_S, TOKEN)
    both.client.look_for(both.address)
    while both.client._lines is None:
        both.client._connect(0.0)
    while both.client._calls % 2:  # Then the next call is of the address at which nobody listens.
        both.client._calls += 1
    both.client._connect(0.0)
    assert both.client._lines is not None
    both.until(lambda: both.client.is_connected)
    assert both.client.address == both.address


def test_a_broken_connection_is_noticed_with_those_it_spoke_for(both: Both) -> None:
    both.until(lambda: both.client.is_connected)
    assert both.client._lines is not None
    both.client._lines.socket.close()
    both.client._lines = None
    for _ in range(20):
        both.server.poll(0.01, both.answer)
    assert both.holder.lost == [4, 5]


def test_an_older_connection_of_the_same_supervisor_means_nothing(both: Both) -> None:
    """Close an old connection after a new one was opened, as a client does at once after a silence."""
    both.until(lambda: both.client.is_connected)
    old = both.client._lines
    both.client._lines = None
    both.client._tried_at = -1e9
    both.until(lambda: both.client._lines is not None and both.client.heard_at > both.client._tried_at)
    assert old is not None
    old.socket.close()
    for _ in range(20):
        both.server.poll(0.01, both.answer)
    assert both.holder.lost == []


def test_who_is_given_up_is_reported_to_its_own_supervisor_only(both: Both) -> None:
    both.holder.given_up = {5, 9}
    both.until(lambda: bool(both.client.given_up))
    assert both.client.given_up == {5}


def test_requests_reach_the_coordinator_and_its_answers_the_supervisor(both: Both) -> None:
    reason = "rank 1: ValueError: no"
    both.client.request("stop", reason, 2)
    both.until(lambda: bool(both.requests) and both.client._request is None)
    assert both.requests[0] == ("stop", reason, 2)
    both.answer = {"generation": 3, "wind_down": True}
    both.until(lambda: both.client.is_winding_down)
    both.answer = {"generation": 3, "stop": {"reason": "why", "code": 2}}
    both.until(lambda: both.client.stop is not None)
    assert both.client.stop == {"reason": "why", "code": 2}


STRANGERS = [b"GET / HTTP/1.1\r\n\r\n", b"[]\n", b'{"beat": 1, "alive": 3}\n', b"\xff" * 2_000_000]


@pytest.mark.parametrize("stranger", STRANGERS, ids=range(len(STRANGERS)))
def test_a_stranger_is_disconnected_and_harms_nobody(both: Both, stranger: bytes) -> None:
    both.until(lambda: both.client.is_connected)
    with socket.create_connection(both.address) as connection:
        connection.setblocking(False)
        sent = 0
        for _ in range(200):
            if sent < len(stranger):
                with suppress(BlockingIOError, ConnectionError):
                    sent += connection.send(stranger[sent : sent + 65536])
            both.server.poll(0.005, both.answer)
        connection.setblocking(True)
        connection.settimeout(5)
        with suppress(ConnectionError):
            assert len(connection.recv(100)) == 33, "the nonce that everybody gets"
            assert connection.recv(100) == b""
    assert both.holder.lost == []
    heard = both.client.heard_at
    both.until(lambda: both.client.heard_at > heard)


def test_a_supervisor_of_another_job_is_not_heard(both: Both) -> None:
    other = LeaseClient("task 0", both.address, LEASE_S, Token.new())
    for _ in range(50):
        other.step([4], {4: 1})
        both.server.poll(0.005, both.answer)
    assert both.holder.alive == {}
    assert not other.is_connected
    assert both.server.refused > 0
    other.close()


def test_what_was_recorded_on_one_connection_is_nothing_on_another(both: Both) -> None:
    with socket.create_server(("127.0.0.1", 0)) as between, socket.create_connection(both.address) as onward:
        # The lease is long, because a client whose lease runs out leaves this connection for another.
        client = LeaseClient("task 0", between.getsockname()[:2], 100 * LEASE_S, TOKEN)
        client.died(4, 1234, "was killed")
        client.step([4], {4: 1})
        here, _ = between.accept()
        recorded = _carry(here, onward, both, client)
        assert both.holder.dead == [(4, 1234, "was killed")]
        both.holder.dead.clear()
        with socket.create_connection(both.address) as again:
            again.sendall(recorded)
            for _ in range(20):
                both.server.poll(0.005, both.answer)
        onward.sendall(recorded.split(b"\n", 1)[1])  # the server ignores lines that come twice on one connection, too
        for _ in range(20):
            both.server.poll(0.005, both.answer)
        assert both.holder.dead == []
        client.close()
        here.close()


def _carry(here: socket.socket, onward: socket.socket, both: Both, client: LeaseClient) -> bytes:
    """Relay bytes between a client and the server until a beat is answered; return what the client sent."""
    sent, deadline = b"", time.monotonic() + 10
    for connection in (here, onward):
        connection.setblocking(False)
    while not client.is_connected and time.monotonic() < deadline:
        both.server.poll(0.005, both.answer)
        with suppress(BlockingIOError):
            here.sendall(onward.recv(1 << 16))
        client.step([4], {4: 1})
        with suppress(BlockingIOError):
            sent += (data := here.recv(1 << 16))
            onward.sendall(data)
    onward.setblocking(True)
    assert client.is_connected
    return sent


def test_half_open_connections_are_few_and_do_not_stay(both: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    both.until(lambda: both.client.is_connected)
    silent = [socket.create_connection(both.address) for _ in range(MOST_UNKNOWN + 40)]
    for _ in range(30):
        both.server.poll(0.01, both.answer)
    assert len(both.server._server._callers) <= MOST_UNKNOWN + 1
    heard = both.client.heard_at
    both.until(lambda: both.client.heard_at > heard)
    monkeypatch.setattr(signed_server, "SHORT_GREETING_S", 0.0)
    monkeypatch.setattr(signed_server, "GREETING_S", 0.0)
    both.until(lambda: len(both.server._server._callers) == 1)
    both.server.poll(0.05, both.answer)
    assert len(both.server._server._callers) == 1
    assert both.holder.lost == []
    for caller in silent:
        caller.close()


def test_a_new_supervisor_is_heard_behind_callers_that_never_greet(both: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signed_server, "SHORT_GREETING_S", 0.1)
    silent = [socket.create_connection(both.address) for _ in range(MOST_UNKNOWN + 20)]
    both.until(lambda: both.client.is_connected)
    assert both.server.refused >= 20
    for caller in silent:
        caller.close()


def test_supervisors_that_all_call_at_once_are_each_greeted_once(both: Both) -> None:
    clients = [LeaseClient(f"task {number}", both.address, 30.0, TOKEN) for number in range(4 * MOST_UNKNOWN)]
    for _ in range(2):
        deadline = time.monotonic() + 60
        while not all(client.is_connected for client in clients):
            assert time.monotonic() < deadline
            for number, client in enumerate(clients):
                client.step([number], {number: 1})
            both.server.poll(0.01, both.answer)
        assert both.server.refused == 0, "none was cut off for another one"
        for supervisor in list(both.server._server._callers.values()):
            both.server._server.drop(supervisor)
        for client in clients:
            client.is_connected = False
    for client in clients:
        client.close()


def test_an_answer_before_the_end_of_a_connection_is_heard(both: Both) -> None:
    """End the server right after its last answer, which says that the job has ended."""
    both.until(lambda: both.client.is_connected)
    both.answer = {"generation": 3, "stop": {"reason": "why", "code": 2}}
    both.client._beat_at = -1e9
    both.client.step([4, 5], {4: 7})
    both.server.poll(0.05, both.answer)
    both.server.close()
    both.client._receive()
    assert both.client.stop == {"reason": "why", "code": 2}
    both.client._receive()
    assert not both.client.is_connected


def test_calls_back_off_and_never_pause_for_long() -> None:
    client = LeaseClient("task 0", ("127.0.0.1", 1), LEASE_S, TOKEN)
    pauses = []
    for client._calls in range(8):
        pauses.append(client._pause_s(1.0))
    assert pauses[:2] == [1.0, 1.0]
    assert all(1.0 <= pause <= 4.0 for pause in pauses)
    assert max(pauses[3:]) > 1.5


def test_edited_lines_close_the_connection(both: Both) -> None:
    seeded = random.Random(7)
    for _ in range(60):
        lines = SignedLines(socket.create_connection(both.address), TOKEN, Side.CALLER)
        deadline = time.monotonic() + 5
        while not lines.is_open and time.monotonic() < deadline:
            both.server.poll(0.001, both.answer)
            lines.receive()
        line = _signed_line(lines, {"beat": 1, "alive": {"7": 3}, "died": [{"member": 7, "pid": 1, "how": "x"}]})
        data = bytearray(line)
        at = seeded.randrange(len(data) - 1)
        if seeded.random() < 0.5:
            data[at] ^= 1 << seeded.randrange(8)
        else:
            data[at:at] = seeded.randbytes(3)
        lines.socket.sendall(bytes(data) + b"\n")
        for _ in range(4):
            both.server.poll(0.002, both.answer)
        lines.close()
    assert both.holder.dead == []
    assert both.holder.alive == {}


def _signed_line(lines: SignedLines, message: dict[str, Any]) -> bytes:
    near, far = socket.socketpair()
    connection, lines.socket = lines.socket, near
    lines.send(message)
    lines.socket = connection
    with near, far:
        return far.recv(1 << 16)
