"""The loop of a coordinator at the end of a job: everybody hears of it, and only if no other coordinator goes on."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from moevement_core.comms.token import Token
from moevement_core.rendezvous.coordinator import State
from moevement_core.rendezvous.coordinator_loop import CoordinatorLoop, Turn
from moevement_core.rendezvous.lease_client import LeaseClient
from moevement_core.rendezvous.office import Term
from moevement_core.rendezvous.roster import STOP
from moevement_core.rendezvous.standby import Standby
from moevement_core.rendezvous.values import Values
from tests.values import Holder

TOKEN = Token.new()
LEASE_S = 0.5


class Deciding(Holder):
    """Coordinator of which a test says how far the job is."""

    def __init__(self) -> None:
        super().__init__()
        self.membership.lease_s, self.state, self.end = LEASE_S, State.RUNNING, ("", 0)
        self.roster, self.is_winding_down, self.steps = SimpleNamespace(generation=3), False, 0
        self.nowhere_to_go: str | None = None

    def end_for_notices(self) -> str | None:
        return self.nowhere_to_go

    def wind_down(self) -> None:
        self.is_winding_down, self.nowhere_to_go = True, None

    def step(self) -> None:
        self.steps += 1

    def has_trained(self) -> bool:
        return True


class Job:
    """Loop of a coordinator, and a client of it."""

    def __init__(self, term: int = 1, expected: tuple[str, ...] = ()) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = listener.getsockname()[:2]
        self.values, self.coordinator = Values(), Deciding()
        coordinator: Any = self.coordinator
        self.loop = CoordinatorLoop(
            coordinator, listener, self.values, Term(term, f"127.0.0.1:{self.address[1]}"), TOKEN,
            on_wind_down=lambda why: None, expected=expected,
        )  # fmt: skip

    def client(self, name: str = "task 0") -> LeaseClient:
        return LeaseClient(name, self.address, LEASE_S, TOKEN)

    def stop(self) -> None:
        self.coordinator.state, self.coordinator.end = State.STOPPED, ("a reason", 7)
        self.values.set(STOP, "a reason")


def until(holds: Callable[[], bool], *steps: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline
        for step in steps:
            step()


def hear_of_the_end(client: LeaseClient) -> threading.Thread:
    """Let a client wait for the end of the job on a thread, as a supervisor does."""

    def wait() -> None:
        until(lambda: client.stop is not None, lambda: client.step((), {}), lambda: time.sleep(0.01))
        client.close()

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


def test_a_coordinator_that_takes_over_an_ended_job_waits_for_those_that_do_not_know_it() -> None:
    job = Job(term=2, expected=("task 0", "task 1"))
    job.stop()
    until(lambda: job.loop.is_settled, lambda: job.loop.turn(0.01))
    client = job.client()
    thread = hear_of_the_end(client)
    began = time.monotonic()
    job.loop.end(60.0)
    thread.join()
    assert client.stop == {"reason": "a reason", "code": 7}
    assert LEASE_S < time.monotonic() - began < 10 * LEASE_S, "task 1 has given up by then"


def test_a_supervisor_that_is_silent_for_some_leases_is_waited_for() -> None:
    job = Job()
    client = job.client()
    until(lambda: client.is_connected, lambda: client.step((), {}), lambda: job.loop.turn(0.01))
    time.sleep(1.5 * LEASE_S)
    job.stop()
    until(lambda: job.loop.is_settled, lambda: job.loop.turn(0.01))
    thread = threading.Timer(LEASE_S, lambda: hear_of_the_end(client).join())
    thread.start()
    job.loop.end(60.0)
    thread.join()
    assert client.stop is not None


def test_a_coordinator_whose_standby_does_not_know_of_the_end_may_be_replaced() -> None:
    job = Job()
    client, place = job.client(), socket.create_server(("127.0.0.1", 0))
    standby = Standby(job.address, f"127.0.0.1:{place.getsockname()[1]}", place, TOKEN)
    steps = (lambda: client.step((), {}), lambda: job.loop.turn(0.01), lambda: standby.poll(0.01))
    until(lambda: bool(job.loop.server.mirror.ready) and client.other is not None, *steps)
    job.stop()  # The coordinator is suspended now.
    until(lambda: standby.is_elected, *steps[::2])
    assert standby.values.read(STOP) is None, "the job goes on"
    turns = list[Turn]()
    until(lambda: Turn.REPLACED in turns, lambda: turns.append(job.loop.turn(0.01)), lambda: standby.poll(0.01))
    assert not job.loop.is_settled
    for each in (client, standby, job.loop.server):
        each.close()


@pytest.mark.parametrize("kind", ["stop", "wind_down"])
def test_requests_of_supervisors_reach_the_coordinator(kind: str) -> None:
    job, asked = Job(), list[tuple[str, int]]()
    coordinator: Any = job.coordinator
    coordinator.stop = lambda why, code: asked.append((why, code))
    coordinator.wind_down = lambda: asked.append(("", 0))
    client = job.client()
    client.request(kind, "a reason", 5)
    until(lambda: client._request is None, lambda: client.step((), {}), lambda: job.loop.turn(0.01))
    assert asked[0] == (("a reason", 5) if kind == "stop" else ("", 0))
    client.close()
    job.loop.server.close()


def test_a_job_whose_nodes_are_taken_away_ends_at_a_boundary_and_supervisors_learn_of_it() -> None:
    job = Job()
    client = job.client()
    until(lambda: client.is_connected, lambda: job.loop.turn(0.01), lambda: client.step([0], {0: 5}))
    assert not client.is_winding_down
    client.notice("SIGUSR1 to task 0")
    until(lambda: "task 0" in job.coordinator.leaving, lambda: job.loop.turn(0.01), lambda: client.step([0], {0: 5}))
    job.coordinator.nowhere_to_go = "too few spares"
    until(lambda: client.is_winding_down, lambda: job.loop.turn(0.01), lambda: client.step([0], {0: 5}))
