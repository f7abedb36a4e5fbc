"""Standbys over loopback connections: they know what supervisors know, and take over only from a lost coordinator."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest

from moevement_core.comms.address import address_of
from moevement_core.comms.token import Token
from moevement_core.rendezvous.lease_client import CONNECT_S, LeaseClient, connect_s
from moevement_core.rendezvous.lease_server import LeaseServer
from moevement_core.rendezvous.office import Office, Term
from moevement_core.rendezvous.roster import STOP
from moevement_core.rendezvous.standby import Standby
from moevement_core.rendezvous.values import RequestKind, Values
from tests.values import Holder

TOKEN = Token.new()
LEASE_S = 1.0
KEY = "generation/roster"


class Job:
    """Coordinator, standby and three supervisors, which a test steps in turns."""

    def __init__(self) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        host, port = listener.getsockname()[:2]
        self.values, self.office = Values(), Office(Term(1, f"{host}:{port}"))
        self.holder = Holder()
        self.holder.membership.lease_s = LEASE_S
        self.server = LeaseServer(
            listener, cast(Any, self.holder), TOKEN, lambda *request: None, self.values, self.office
        )
        self.clients = [LeaseClient(f"task {number}", (host, port), LEASE_S, TOKEN) for number in range(3)]
        self.received: list[list[str]] = [[], [], []]
        for client, values in zip(self.clients, self.received, strict=True):
            client.on_change = lambda key, value, values=values: values.append(value)  # type: ignore[misc]
            client.ask(RequestKind.WATCH, KEY, None, lambda value: None)
        place = socket.create_server(("127.0.0.1", 0))
        self.standby = Standby((host, port), f"127.0.0.1:{place.getsockname()[1]}", place, TOKEN)
        self.silent: set[object] = set()
        """Clients, the standby or the server, if they are not stepped any more."""
        self.is_lost = False
        self.answer: dict[str, Any] = {"generation": 0}

    def step(self) -> None:
        for client in self.clients:
            if client not in self.silent:
                client.step((), {})
        if not self.is_lost and self.server not in self.silent:
            self.server.poll(0.001, self.answer)
        if self.standby not in self.silent:
            self.standby.poll(0.001)

    def until(self, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 20
        while not holds():
            assert time.monotonic() < deadline
            self.step()

    def goes_on(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.step()

    def end(self) -> None:
        """End the job, as the coordinator does when all ranks have reached the end."""
        self.values.set(STOP, "")
        self.answer = {"generation": 0, "stop": {"reason": "", "code": 0}}

    def lose(self) -> None:
        """End the coordinator, as SIGKILL does."""
        self.is_lost = True
        self.server.close()

    def close(self) -> None:
        self.lose()
        self.standby.close()
        for client in self.clients:
            client.close()


@pytest.fixture
def job() -> Iterator[Job]:
    new = Job()
    new.until(lambda: bool(new.server.mirror.ready) and all(client.other for client in new.clients))
    assert new.standby._voters == {"task 0", "task 1", "task 2"}
    yield new
    new.close()


def test_supervisors_learn_nothing_that_the_standby_does_not_have(job: Job) -> None:
    job.silent.add(job.standby)
    job.values.set(KEY, "5 roster")
    job.goes_on(LEASE_S / 5)
    assert job.received == [[], [], []]
    job.silent.clear()
    job.until(lambda: all(job.received))
    assert job.standby.values.read(KEY) == "5 roster"


def test_the_standby_of_a_coordinator_that_is_killed_takes_over_with_all_values(job: Job) -> None:
    job.values.set(KEY, "5 roster")
    job.values.report("members/joined", 3, "card")
    job.until(lambda: all(job.received))
    began = time.monotonic()
    job.lose()
    job.until(lambda: job.standby.is_elected)
    assert time.monotonic() - began < 2 * LEASE_S
    assert job.standby.values.read(KEY) == "5 roster"
    assert job.standby.values.reports("members/joined") == {3: "card"}
    assert job.standby.term.number == 2
    assert sum(client.term == job.standby.term for client in job.clients) >= 2


def test_supervisors_call_a_new_coordinator_before_the_one_that_it_replaced(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Close the standby's connections, as it does when it becomes the coordinator; calls of a lost host take time."""
    job.lose()
    job.until(lambda: all(client.term.number == 2 for client in job.clients))
    called: list[tuple[str, int]] = []
    connect = socket.create_connection

    def noted(address: tuple[str, int], timeout: float) -> socket.socket:
        called.append(address)
        return connect(address, timeout)

    monkeypatch.setattr(socket, "create_connection", noted)
    address = address_of(job.standby.term.owner)
    job.standby.close()
    with socket.create_server(address):
        for number, client in enumerate(job.clients, start=1):
            assert client._called == client.address
            client._calls = 1  # The next call would be to the old coordinator.
            client._receive()  # The connection has ended.
            while len(called) < number:
                client.step((), {})
    assert called == [address] * len(job.clients)


def test_an_attempt_to_connect_takes_a_part_of_a_short_lease() -> None:
    assert connect_s(2.0) == 0.5
    assert connect_s(60.0) == CONNECT_S


def test_the_standby_of_a_coordinator_that_is_frozen_takes_over(job: Job) -> None:
    job.silent.add(job.server)
    job.until(lambda: job.standby.is_elected)
    assert not job.server.is_in_office
    job.silent.clear()
    job.until(lambda: job.office.is_deposed or not job.server.is_in_office)
    job.goes_on(LEASE_S / 2)
    assert not job.server.is_in_office, "although it hears and sends again"


def test_one_supervisor_that_loses_the_coordinator_changes_nothing(job: Job) -> None:
    job.clients[0]._disconnect()
    job.clients[0]._calls, job.clients[0]._tried_at = 1, -1e9  # The next call goes to the standby.
    job.goes_on(2 * LEASE_S)
    assert not job.standby.is_elected
    assert job.server.is_in_office
    job.until(lambda: job.clients[0].is_connected)
    assert [client.term.number for client in job.clients] == [1, 1, 1]


def test_a_standby_takes_over_only_with_more_than_half_of_the_supervisors(job: Job) -> None:
    job.silent |= {job.clients[0], job.clients[1]}
    job.lose()
    job.goes_on(4 * LEASE_S)
    assert not job.standby.is_elected
    assert job.clients[2].term.number == 1
    job.silent.discard(job.clients[1])
    job.until(lambda: job.standby.is_elected)


def test_a_coordinator_goes_on_without_a_standby_that_is_silent(job: Job) -> None:
    job.silent.add(job.standby)
    job.values.set(KEY, "6 roster")
    job.until(lambda: all(job.received))
    assert job.office.standby == ""
    assert job.office.term.number == 2
    assert job.server.is_in_office
    job.silent.clear()
    job.goes_on(LEASE_S)
    assert not job.standby.is_elected
    job.until(lambda: job.office.standby == job.standby._address)
    assert job.standby.values.read(KEY) == "6 roster", "it stands by again, with a new copy"


def test_a_coordinator_goes_on_at_once_if_the_process_of_its_standby_has_ended(job: Job) -> None:
    job.silent |= {job.clients[0], job.clients[1], job.clients[2]}
    job.silent.add(job.standby)
    job.standby.close()
    job.until(lambda: job.office.standby == "")
    assert job.server.is_in_office


def test_a_second_standby_waits_until_the_first_is_lost(job: Job) -> None:
    place = socket.create_server(("127.0.0.1", 0))
    other = Standby(job.clients[0].address, f"127.0.0.1:{place.getsockname()[1]}", place, TOKEN)
    first, job.standby = job.standby, other
    try:
        job.silent.add(first)
        job.until(lambda: job.office.standby == other._address)
    finally:
        first.close()


def test_a_death_is_acknowledged_only_once_the_standby_has_what_follows_from_it(job: Job) -> None:
    job.holder.keep = lambda: job.values.set(KEY, "7 roster")  # type: ignore[method-assign]
    job.silent.add(job.standby)
    job.clients[1].died(3, 1234, "was killed")
    job.until(lambda: bool(job.holder.dead))
    job.goes_on(LEASE_S / 5)
    assert job.clients[1]._news
    job.silent.clear()
    job.until(lambda: not job.clients[1]._news)
    assert job.standby.values.read(KEY) == "7 roster"


def test_nobody_learns_of_the_end_before_the_standby(job: Job) -> None:
    job.silent.add(job.standby)
    job.end()
    job.goes_on(LEASE_S / 5)
    assert [client.stop for client in job.clients] == [None, None, None]
    job.silent.clear()
    job.until(lambda: all(client.stop is not None for client in job.clients))
    assert job.standby.values.read(STOP) == ""


def test_a_coordinator_that_has_ended_the_job_says_so_although_its_standby_is_lost_too(job: Job) -> None:
    job.silent.update(job.clients)
    job.end()
    job.until(lambda: job.standby.values.read(STOP) is not None and job.server.is_in_office)
    job.goes_on(LEASE_S / 4)
    job.silent.add(job.standby)
    job.goes_on(1.5 * LEASE_S)
    job.silent.discard(job.clients[0])  # The others have ended, and can agree to nothing.
    job.until(lambda: job.clients[0].stop is not None)


def test_the_standby_of_a_coordinator_that_is_lost_at_the_end_takes_over_alone(job: Job) -> None:
    job.silent.update({job.clients[0], job.clients[1]})
    job.end()
    job.until(lambda: job.clients[2].stop is not None)
    job.lose()
    job.silent.add(job.clients[2])
    job.until(lambda: job.standby.is_elected)
    assert job.standby.term.number == 2
    assert job.standby.values.read(STOP) == ""


def test_a_standby_that_is_dismissed_does_not_take_over(job: Job) -> None:
    job.end()
    job.until(lambda: all(client.stop is not None for client in job.clients))
    job.server.mirror.dismiss()
    job.until(lambda: job.standby.is_over)
    job.standby.close()
    job.silent.add(job.standby)
    job.until(lambda: not job.server.mirror.has_caller)
    assert not job.standby.is_elected


def test_a_standby_that_joins_after_the_end_holds_up_nobody(job: Job) -> None:
    for number in range(60):  # operations, of which the copy for the next standby has only one
        job.values.set(KEY, f"{number} roster")
    job.until(lambda: len(job.received[2]) > 0 and job.received[2][-1] == "59 roster")
    job.silent.add(job.standby)
    job.standby.close()
    job.silent.update(job.clients)
    job.end()
    job.until(lambda: job.office.standby == "")
    place = socket.create_server(("127.0.0.1", 0))
    job.standby = Standby(job.clients[0].address, f"127.0.0.1:{place.getsockname()[1]}", place, TOKEN)
    job.until(lambda: job.server.mirror.has_caller)
    job.silent.clear()
    job.until(lambda: all(client.stop is not None for client in job.clients))


def test_a_supervisor_that_calls_the_standby_stays_connected_to_the_coordinator(job: Job) -> None:
    client = job.clients[0]
    before = client._lines
    client._calls = 1  # The next call goes to the standby.
    client._connect(0.0)
    assert client._called != job.clients[1].address
    job.goes_on(LEASE_S)
    assert "task 0" in job.server._by_name
    assert client._called == job.clients[1].address
    assert before is not None
    job.until(lambda: client.is_connected)
