"""Snapshots that a peer keeps for a rank, and those that it refuses."""

from __future__ import annotations

import pytest

from moevement_core.device import CpuDevice
from moevement_core.policy.window import WindowKind
from moevement_core.replication.replica_store import ReplicaStore
from moevement_core.snapshot import arena as arenas
from moevement_core.snapshot.arena import PAGE
from moevement_core.snapshot.snapshot import Snapshot
from tests.unit.recovery.toy import Toy


@pytest.fixture
def store() -> ReplicaStore:
    replicas = ReplicaStore(0, CpuDevice())
    replicas.memory.grow(1 << 20)
    return replicas


def bring(store: ReplicaStore, iteration: int) -> None:
    original = Toy(2, WindowKind.ALIGNED).snapshot(iteration, iteration, {})
    buffer = store.begin(iteration, original.buffer.nbytes)
    assert buffer is not None
    store.add(Snapshot(original.header, buffer))


def test_what_no_recovery_needs_any_more_is_refused_until_the_source_goes_back_behind_it(store: ReplicaStore) -> None:
    for iteration in range(4, 9):
        bring(store, iteration)
    store.free_before(7)
    assert sorted(store.snapshots()) == [7, 8]
    bring(store, 5)
    assert sorted(store.snapshots()) == [7, 8]
    store.lower_floor(5)
    store.drop(5, 100)
    bring(store, 4)
    bring(store, 5)
    assert sorted(store.snapshots()) == [5]


def test_what_is_given_back_stays_promised_and_comes_again_for_a_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arenas, "SMALLEST_SLAB", PAGE)
    monkeypatch.setattr(arenas, "WATCHED", 3)
    store = ReplicaStore(0, CpuDevice())
    store.memory.need(0, 20 * PAGE)
    store.memory.grow(20 * PAGE)
    assert not store.memory.trim(), "nothing else was asked for"
    store.memory.need(0, 8 * PAGE)
    assert store.memory.trim()
    assert store.memory.arena.nbytes == store.memory.room_bytes == 8 * PAGE
    for _ in range(3):
        buffer = store.begin(0, 3 * PAGE)
        assert buffer is not None
        store.memory.arena.release(buffer)
    assert store.memory.trim()
    assert (store.memory.arena.nbytes, store.memory.room_bytes) == (3 * PAGE, 8 * PAGE)
    assert not store.memory.trim()
    held = store.begin(0, 2 * PAGE)
    assert held is not None
    assert store.begin(1, 6 * PAGE) is None
    store.memory.reallocate(6 * PAGE)
    assert store.memory.arena.nbytes == 8 * PAGE, "no more than that"
    assert store.begin(1, 6 * PAGE) is not None
    store.memory.need(0, 9 * PAGE)
    assert store.memory.room_bytes == 8 * PAGE, "who refuses more keeps what was promised"
    store.memory.need(0, 8 * PAGE)
    assert not store.memory.trim()
