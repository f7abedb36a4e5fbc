"""Members that reach the coordinator through the relay of their supervisor, over real sockets."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

import pytest

from moevement_core.comms.signed_lines import Side, SignedLines
from moevement_core.comms.token import Token
from moevement_core.rendezvous.lease_client import LeaseClient
from moevement_core.rendezvous.lease_server import LeaseServer
from moevement_core.rendezvous.relay import LocalUpstream, Relay, socket_address
from moevement_core.rendezvous.value_client import ValueClient
from moevement_core.rendezvous.values import MOST_IN_LINE, MOST_IN_VALUE, Values
from tests.values import Holder

TOKEN = Token.new()
WAIT_S = 20.0


class Node:
    """Coordinator and a supervisor's relay on a thread of their own; clients are on the threads of the test."""

    def __init__(self, *, is_local: bool = False) -> None:
        self.values, self.lock = Values(), threading.RLock()
        listener = socket.create_server(("127.0.0.1", 0))
        self.server = LeaseServer(listener, cast(Any, Holder()), TOKEN, lambda *request: None, self.values)
        self.lease = LeaseClient("task 0", listener.getsockname()[:2], 10.0, TOKEN)
        self.relay = Relay(TOKEN, LocalUpstream(self.values) if is_local else self.lease)
        self.clients: list[ValueClient] = []
        self.is_cut = False
        """True while the coordinator reads nothing."""
        self._is_over = False
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def client(self) -> ValueClient:
        client = ValueClient(self.relay.address, TOKEN)
        self.clients.append(client)
        return client

    def change(self, change: Callable[[], Any]) -> None:
        """Change something on the side of the coordinator or of the supervisor."""
        with self.lock:
            change()

    def _serve(self) -> None:
        while not self._is_over:
            with self.lock:
                self.lease.step((), {})
                self.relay.poll(0.001, self.lease.connection)
                if not self.is_cut:
                    self.server.poll(0.0, {})

    def close(self) -> None:
        self._is_over = True
        self._thread.join(WAIT_S)
        for client in self.clients:
            client.close()
        self.lease.close()
        self.relay.close()
        self.server.close()


@pytest.fixture(params=[False, True], ids=["remote", "local"])
def node(request: pytest.FixtureRequest) -> Iterator[Node]:
    running = Node(is_local=request.param)
    yield running
    running.close()


@pytest.fixture
def remote() -> Iterator[Node]:
    running = Node()
    yield running
    running.close()


def waits_for(client: ValueClient, key: str, value: str) -> bool:
    """Wait until a watched key has a value; return False if that takes too long."""
    return client.wait_until(lambda: client.watch(key) == value, WAIT_S)


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_what_a_process_sets_and_reports_is_at_the_coordinator_when_the_call_returns(node: Node) -> None:
    first, second = node.client(), node.client()
    assert first.claim("key", "first") == second.claim("key", "second") == "first"
    second.set("key", "third")
    second.raise_to("number", "4 x")
    second.raise_to("number", "3 y")
    first.report("topic/7", "here")
    assert (node.values.read("key"), first.read("number")) == ("third", "4 x")
    assert node.values.new_reports("topic") == {7: "here"}
    assert first.read("nothing") is None


def test_a_watched_value_arrives_at_once_and_is_asked_for_once(node: Node) -> None:
    clients = [node.client() for _ in range(3)]
    assert [client.watch("key") for client in clients] == [None] * 3
    waiting = [threading.Thread(target=waits_for, args=(client, "key", "b")) for client in clients]
    for thread in waiting:
        thread.start()
    for value in ("a", "b"):
        node.change(partial(node.values.set, "key", value))
    for thread in waiting:
        thread.join(WAIT_S)
    assert [client.watch("key") for client in clients] == ["b"] * 3
    assert len(node.values._watchers["key"]) == 1


def test_long_values_of_many_processes_arrive(node: Node) -> None:
    clients = [node.client() for _ in range(4)]
    texts = [str(number) * (MOST_IN_LINE - number) for number in range(4)]
    setting = [
        threading.Thread(target=client.set, args=(str(number), text))
        for number, (client, text) in enumerate(zip(clients, texts, strict=True))
    ]
    for thread in setting:
        thread.start()
    for thread in setting:
        thread.join(WAIT_S)
    assert [clients[0].watch(str(number)) for number in range(4)] == texts
    with pytest.raises(ValueError, match=str(MOST_IN_VALUE)):
        clients[0].set("key", "a" * (MOST_IN_VALUE + 1))
    assert clients[0].read("key") is None


def test_a_wait_without_a_change_ends_at_its_timeout(node: Node) -> None:
    client = node.client()
    began = time.monotonic()
    assert not client.wait_until(lambda: client.watch("key") is not None, 0.2)
    assert 0.2 <= time.monotonic() - began < WAIT_S


def test_requests_and_watched_values_survive_a_broken_connection_to_the_coordinator(remote: Node) -> None:
    client = remote.client()
    assert client.watch("key") is None
    for round_ in range(3):
        remote.change(remote.lease._disconnect)
        remote.change(partial(remote.values.set, "key", str(round_)))
        assert client.claim(f"claimed {round_}", "mine") == "mine"
        assert waits_for(client, "key", str(round_))
    assert len(remote.values._watchers["key"]) == 1, "watchers of broken connections were kept"


def test_the_newest_value_arrives_last_although_it_is_watched_and_raised_in_one_message(remote: Node) -> None:
    remote.values.set("key", "5")
    heard: list[str | None] = []

    def ask() -> None:
        remote.lease.on_change = lambda key, value: heard.append(value)
        remote.lease.ask("watch", "key", None, heard.append)
        remote.lease.ask("raise", "key", "6", lambda value: None)

    remote.change(ask)
    until(lambda: len(heard) == 2)
    assert heard == ["5", "6"]


def test_a_request_waits_while_the_coordinator_cannot_be_reached(remote: Node) -> None:
    client = remote.client()
    client.set("key", "a")
    remote.is_cut = True
    answers: list[str] = []
    asking = threading.Thread(target=lambda: answers.append(client.claim("key", "b")))
    asking.start()
    asking.join(0.5)
    assert not answers
    remote.is_cut = False
    asking.join(WAIT_S)
    assert answers == ["a"]


class Interruption(BaseException):
    """Exception that comes in the middle of a call."""


def test_a_call_after_an_interrupted_one_gets_its_own_answer(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupt calls at random places, as the thread that watches a rank does."""
    client, seeded = node.client(), random.Random(3)
    client.watch("watched")
    original = {name: getattr(SignedLines, name) for name in ("receive", "send", "flush")}

    def may_interrupt(name: str) -> Callable[..., Any]:
        def call(self: SignedLines, *arguments: Any) -> Any:
            is_of_client = self._side is Side.CALLER and self.socket.family == socket.AF_UNIX
            if is_of_client and seeded.random() < 0.2:
                raise Interruption
            result = original[name](self, *arguments)
            if is_of_client and seeded.random() < 0.2:
                raise Interruption
            return result

        return call

    for number in range(60):
        for name in original:
            monkeypatch.setattr(SignedLines, name, may_interrupt(name))
        try:
            client.set("key", f"interrupted {number}")
            client.wait_until(lambda: client.watch("key") is not None, 0.01)
        except Interruption:
            pass
        for name, function in original.items():
            monkeypatch.setattr(SignedLines, name, function)
        client.set("key", str(number))
        assert client.read("key") == str(number)
        assert client.claim(f"claimed {number}", "mine") == "mine"
        node.change(partial(node.values.set, "watched", str(number)))
        assert waits_for(client, "watched", str(number))
    until(lambda: node.relay._server.callers == 1)


def test_a_process_without_the_token_gets_nothing_and_harms_nobody(node: Node) -> None:
    client = node.client()
    client.set("key", "a")
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(socket_address(node.relay.address))
        stranger.sendall(b'{"asks": [[1, "set", "key", "b"]]}\n' * 40)
        until(lambda: node.relay.refused == 1)
    lines = _opened(node, Token.new())
    until(lambda: node.relay.refused == 2)
    lines.close()
    assert client.read("key") == "a"


def test_a_malformed_request_ends_its_connection_only(node: Node) -> None:
    client = node.client()
    client.set("key", "a")
    for asks in ([[1, "add", "key", "b"]], [[1, "set"]], 3, [["x", "read", "key", None]]):
        lines = _opened(node, TOKEN)
        lines.send({"asks": asks})
        lines.close()
    assert client.read("key") == "a"


def _opened(node: Node, token: Token) -> SignedLines:
    """Return a connection to the relay on which lines can be sent."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(socket_address(node.relay.address))
    lines = SignedLines(connection, token, Side.CALLER)
    until(lambda: bool(lines.receive()) or lines.is_open)
    return lines
