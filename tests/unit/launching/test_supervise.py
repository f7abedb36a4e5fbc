"""Signals to a task are passed on to the coordinator as what they mean to the job at that time."""

from __future__ import annotations

import signal
import time
from typing import override

import pytest

from moevement_core.comms.token import Token
from moevement_core.launching.signals import Signals
from moevement_core.launching.supervise import NODE_LEAVES, pass_on
from moevement_core.rendezvous.lease_client import LeaseClient


class RecordedClient(LeaseClient):
    """Client that is not connected, and keeps the kinds of its requests."""

    def __init__(self) -> None:
        super().__init__("task 0", ("127.0.0.1", 1), 10.0, Token.new())
        self.requests: list[str] = []

    @override
    def request(self, kind: str, why: str, code: int = 1) -> None:
        self.requests.append(kind)


@pytest.fixture
def client() -> RecordedClient:
    return RecordedClient()


def asked(number: int) -> Signals:
    signals = Signals()
    signals.asked_by, signals.asked_at = number, time.monotonic()
    return signals


def test_a_node_that_leaves_a_formed_job_is_drained(client: RecordedClient) -> None:
    signals, client.generation = asked(NODE_LEAVES), 0
    pass_on(signals, client, "task 0")
    assert client.is_leaving
    assert (signals.asked_by, signals.may_wind_down) == (None, True)


@pytest.mark.parametrize("generation", [-1, 0])
def test_a_task_that_has_not_heard_of_the_job_waits_for_an_answer(client: RecordedClient, generation: int) -> None:
    """Send the signal before the first answer after the job was formed, as a quick job can."""
    client.heard_at = time.monotonic()
    signals = asked(NODE_LEAVES)
    pass_on(signals, client, "task 0")
    assert signals.asked_by == NODE_LEAVES
    assert not client.is_leaving
    client.generation, client.heard_at = generation, time.monotonic()
    pass_on(signals, client, "task 0")
    assert signals.asked_by is None
    assert client.is_leaving == (generation == 0)
    assert client.requests == ([] if generation == 0 else ["wind_down"])


def test_other_signals_wait_for_no_answer(client: RecordedClient) -> None:
    signals = asked(signal.SIGTERM)
    pass_on(signals, client, "task 0")
    assert signals.asked_by is None
    assert client.requests == ["wind_down"]
