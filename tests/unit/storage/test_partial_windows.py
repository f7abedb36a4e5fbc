"""Windows on disk with fewer experts than memory restore every expert, on stages whose ranks own different experts."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from moevement_core.engine.capture import part_of
from moevement_core.engine.layout import OperatorState
from moevement_core.operators import Operator, OperatorKind, OperatorTable, StateBytes, expert_name
from moevement_core.policy.schedule import Saved
from moevement_core.recovery.holdings import Holding, Source
from moevement_core.recovery.plan import Report, plan_recovery
from moevement_core.snapshot.agreement import Writing
from moevement_core.snapshot.buffer import Buffer
from moevement_core.snapshot.snapshot import (
    Entry,
    Header,
    Snapshot,
    SnapshotLease,
    StateTensor,
    contents_text,
    digest_of,
)
from moevement_core.storage.files import read_snapshot
from moevement_core.storage.folder_store import FolderStore
from moevement_core.storage.writer import Folder, WindowWriter
from moevement_core.strategies.moc import PartialSchedule

LAYERS = 2
BYTES = 64


def schedule_of(experts: int, saved: int, persisted: int, ranks: int) -> PartialSchedule:
    rows = [
        [Operator("dense", OperatorKind.NON_EXPERT, StateBytes(2, 4, 8))]
        + [
            Operator(expert_name(layer, expert), OperatorKind.EXPERT, StateBytes(2, 4, 8))
            for layer in range(LAYERS)
            for expert in range(experts)
            if expert * ranks // experts == rank
        ]
        for rank in range(ranks)
    ]
    table = OperatorTable.of_ranks([OperatorTable(row) for row in rows])
    return PartialSchedule(table=table, interval=1, experts=saved, most=experts, persisted=persisted)


class Owner:
    """Rank that owns some experts, writes windows, and reads a window back."""

    def __init__(self, folder: Path, rank: int, schedule: PartialSchedule) -> None:
        folder.mkdir()
        self.folder, self.rank, self._schedule = folder, rank, schedule
        table = schedule.table
        tensor = StateTensor("", Saved.FULL, "0", torch.zeros(BYTES, dtype=torch.uint8))
        self._states = {
            name: OperatorState(compute=(), full=(tensor,))
            for place, name in enumerate(table.names)
            if table.full[rank, place]
        }
        self.writer = WindowWriter(
            Folder(FolderStore(folder), True), "abcd", {}, (), self._lease,
            lambda snapshot: {"iteration": snapshot.iteration}, lambda text: None, leaves_out=True,
        )  # fmt: skip

    def _lease(self, first: int, last: int) -> list[SnapshotLease]:
        return [SnapshotLease(self.snapshot(iteration), lambda: None) for iteration in range(first, last + 1)]

    def snapshot(self, iteration: int) -> Snapshot:
        slot = self._schedule.slot(iteration)
        contents = self._schedule.contents_of_slot(slot)
        assert contents is not None
        captured = [
            name for place, name in enumerate(self._schedule.table.names)
            if contents[place] == Saved.FULL and name in self._states
        ]  # fmt: skip
        data = torch.full((BYTES * max(1, len(captured)),), iteration % 100, dtype=torch.uint8)
        entries = tuple(
            Entry(name, Saved.FULL, "0", "uint8", BYTES * number, BYTES, digest_of(data[:BYTES]))
            for number, name in enumerate(captured)
        )
        wanted = self._schedule.parts_of_slot(slot).on_disk
        on_disk = part_of(self._schedule, slot, wanted, self._states)
        return Snapshot(
            Header(
                rank=self.rank, iteration=iteration, schedule=self._schedule.id, slot=slot,
                contents=contents_text(contents), entries=entries, record=None, state=iteration, whole=None,
                on_disk=on_disk,
            ),
            Buffer(data),
        )  # fmt: skip

    def write(self, first: int, last: int) -> None:
        self.writer.begin(first, last)
        deadline = time.monotonic() + 10
        while self.writer.writing is Writing.BUSY:
            assert time.monotonic() < deadline
            time.sleep(0.0005)
        assert self.writer.writing is Writing.DURABLE
        self.writer.learn(Writing.DURABLE)

    def files(self, window: str) -> list[Snapshot]:
        return [read_snapshot(path) for path in sorted((self.folder / window).glob("rank_*"))]


@pytest.mark.parametrize("step", [0, 1])
@pytest.mark.parametrize(
    ("experts", "saved", "persisted", "ranks"), [(4, 2, 1, 2), (8, 4, 1, 2), (8, 4, 2, 4), (8, 8, 1, 2), (6, 3, 1, 1)]
)
def test_every_window_alone_restores_every_expert(
    experts: int, saved: int, persisted: int, ranks: int, step: int, tmp_path: Path
) -> None:
    """Plan from the files of one window at a time. Windows follow each other, or overlap in all but one snapshot."""
    schedule = schedule_of(experts, saved, persisted, ranks)
    owners = [Owner(tmp_path / str(rank), rank, schedule) for rank in range(ranks)]
    step = step or schedule.snapshots
    for number in range(3 * experts):
        first, last = number * step, number * step + schedule.snapshots - 1
        for owner in owners:
            owner.write(first, last)
        window = f"window_{last:07d}_abcd"
        files = {owner.rank: owner.files(window) for owner in owners}
        reports = [
            Report(
                rank, 0,
                tuple(
                    Holding(rank, file.iteration, file.iteration, schedule.id, file.header.contents, Source.FILE)
                    for file in of_rank
                ),
            )
            for rank, of_rank in files.items()
        ]  # fmt: skip
        plan = plan_recovery(reports, last)
        assert plan.runs[0].last == last, "the recovery reaches the end of the window"
        for owner in owners:
            held = {file.iteration: {entry.operator for entry in file.header.entries} for file in files[owner.rank]}
            for name, version in zip(schedule.table.names, plan.runs[0].version_at.tolist(), strict=True):
                assert name not in owner._states or name in held[version], (owner.rank, name, version)
    for owner in owners:
        owner.writer.close(lambda writing: writing, 5)
