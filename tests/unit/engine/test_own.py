"""Own snapshots that are freed, recaptured or lost while threads use them."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import numpy as np

from moevement_core.device import CpuDevice
from moevement_core.engine.own import HeldBuffer, OwnSnapshots
from moevement_core.snapshot.arena import Arena

NOTHING = np.zeros(1, dtype=np.int8)


def begun(own: OwnSnapshots, iteration: int) -> HeldBuffer:
    """Begin to capture a snapshot of 64 bytes."""
    buffer = own.arena.acquire(64)
    assert buffer is not None
    return own.add(HeldBuffer(iteration, buffer, NOTHING, NOTHING))


def own_snapshots() -> OwnSnapshots:
    arena = Arena(CpuDevice())
    arena.grow(1 << 20)
    return OwnSnapshots(arena)


def captured(own: OwnSnapshots, held: HeldBuffer) -> Any:
    snapshot = Mock(iteration=held.iteration, acknowledged=set())
    own.captured(held, snapshot, ())
    own.end_use(held)
    return snapshot


def test_a_copy_that_fails_after_its_snapshot_was_freed_harms_no_other() -> None:
    own = own_snapshots()
    first = begun(own, 7)
    own.free([7])
    second = begun(own, 7)
    own.end_use(first, has_failed=True)
    assert 7 in own
    own.end_use(second, has_failed=True)
    assert 7 not in own


def test_a_loss_of_a_freed_snapshot_does_not_count_for_its_recapture() -> None:
    own = own_snapshots()
    before = captured(own, begun(own, 7))
    own.free([7])
    held = begun(own, 7)
    again = captured(own, held)
    own.undelivered(before)
    assert not held.undeliverable
    own.undelivered(again)
    assert held.undeliverable
