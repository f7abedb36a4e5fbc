"""Snapshots that tests lend to writers of windows."""

from __future__ import annotations

import time
from collections.abc import Sequence

from moevement_core.policy.window import WindowKind
from moevement_core.snapshot.agreement import Writing
from moevement_core.snapshot.snapshot import SnapshotLease
from moevement_core.storage.writer import WindowWriter
from tests.unit.recovery.toy import Toy


class Lender:
    """Source of leased snapshots that records which of them were not returned yet."""

    def __init__(self) -> None:
        self.out: list[int] = []
        self.toy = Toy(2, WindowKind.ALIGNED)
        self.missing = False

    def __call__(self, first: int, last: int) -> Sequence[SnapshotLease] | None:
        if self.missing:
            return None
        leased = []
        for iteration in range(first, last + 1):
            self.out.append(iteration)
            snapshot = self.toy.snapshot(iteration, iteration, {})
            leased.append(SnapshotLease(snapshot, lambda iteration=iteration: self.out.remove(iteration)))  # type: ignore[misc]
        return leased


def settled(writer: WindowWriter) -> Writing:
    deadline = time.monotonic() + 5
    while writer.writing is Writing.BUSY:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return writer.writing
