"""What a peer keeps of a rank, and refuses of it."""

from __future__ import annotations

import pytest

from moevement_core.device import CpuDevice
from moevement_core.policy.window import WindowKind
from moevement_core.replication.replica_store import ReplicaStore
from moevement_core.snapshot.snapshot import Snapshot
from tests.unit.recovery.toy import Toy


@pytest.fixture
def store() -> ReplicaStore:
    its = ReplicaStore(0, CpuDevice())
    its.make_room(1 << 20)
    return its


def bring(store: ReplicaStore, iteration: int) -> None:
    made = Toy(2, WindowKind.ALIGNED).snapshot(iteration, iteration, {})
    buffer = store.begin(iteration, made.buffer.nbytes)
    assert buffer is not None
    store.add(Snapshot(made.header, buffer))


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
