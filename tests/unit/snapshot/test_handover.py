"""A rank that leaves hands its whole state to a peer, which keeps it beside the copies of the rank's snapshots."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from moevement_core.rebuild.live_replicas import snapshot_of_live
from moevement_core.snapshot.snapshot import Snapshot
from tests.unit.snapshot.job import Job, record_of
from tests.unit.snapshot.loopback import CLOSED

LEAVING, TIMEOUT_S = 0, 20.0


def state_of(training: Job, iteration: int) -> Snapshot:
    rank = training.members[LEAVING]
    return snapshot_of_live(
        rank.states, training.strategy().table, LEAVING, iteration=iteration, boundary=record_of(iteration)
    )


def kept_by_peer(training: Job) -> Snapshot | None:
    (peer,) = training.placement[LEAVING]
    (store,) = (receiver.store for receiver in training.members[peer].receivers if receiver.store.source == LEAVING)
    return store.handed_over


@pytest.fixture
def training() -> Job:
    job = Job()
    job.run(5)
    return job


def test_the_peer_has_every_byte_of_the_state(training: Job) -> None:
    snapshot = state_of(training, training.iteration)
    (sender,) = training.members[LEAVING].senders
    assert kept_by_peer(training) is None
    assert sender.hand_over(snapshot, TIMEOUT_S)
    kept = kept_by_peer(training)
    assert kept is not None
    assert kept.header == snapshot.packed()[0]
    sent, arrived = (
        {entry.name: taken.bytes_of(entry).tolist() for entry in taken.header.entries} for taken in (snapshot, kept)
    )
    assert sent == arrived
    training.close()


def test_a_state_that_is_damaged_on_the_way_is_sent_again(training: Job) -> None:
    damaged: list[int] = []

    def flip_once(source: int, peer: int, data: torch.Tensor) -> torch.Tensor:
        if source == LEAVING and data.numel() > 600 and data[0] != ord("{") and not damaged:
            damaged.append(data.numel())
            data[300] ^= 1
        return data

    training.wire.damage = flip_once
    (sender,) = training.members[LEAVING].senders
    assert sender.hand_over(state_of(training, training.iteration), TIMEOUT_S)
    assert damaged
    kept = kept_by_peer(training)
    assert kept is not None
    assert not kept.damaged()
    training.close()


def test_a_peer_without_memory_refuses_and_keeps_what_it_has() -> None:
    training = Job(allowance_bytes=1)
    (sender,) = training.members[LEAVING].senders
    assert not sender.hand_over(state_of(training, 0), TIMEOUT_S)
    assert kept_by_peer(training) is None
    training.close()


def test_a_peer_that_is_lost_or_silent_is_not_waited_for_longer_than_asked(training: Job) -> None:
    (peer,) = training.placement[LEAVING]
    (sender,) = training.members[LEAVING].senders
    stopped = training.wire.stopped[peer] = threading.Event()
    began = time.monotonic()
    assert not sender.hand_over(state_of(training, training.iteration), 0.3)
    assert time.monotonic() - began < TIMEOUT_S
    training.wire.cut.add(peer)
    stopped.set()
    assert not sender.hand_over(state_of(training, training.iteration), TIMEOUT_S)
    assert sender.gone == CLOSED
    training.close()
