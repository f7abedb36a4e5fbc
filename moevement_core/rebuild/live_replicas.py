"""Sources of the newest state of ranks that failed or left, so that no iteration and no update is repeated.

Without sharding, every data-parallel replica holds the whole state and saves a part of it. When a recovery opens a
snapshot of a failed rank, a live replica makes this snapshot from live tensors. The snapshot holds the part that the
failed rank saved. The recovery uses it like any other dense snapshot.

A rank that was asked to leave (``moevement drain``) makes the same snapshot of its own state, and hands it to a peer.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from moevement_core.comms import plain
from moevement_core.engine.layout import OperatorState
from moevement_core.operators import OperatorTable
from moevement_core.policy.schedule import Saved
from moevement_core.recovery.holdings import Holding, Source
from moevement_core.recovery.sources import SnapshotSource
from moevement_core.snapshot.buffer import Buffer
from moevement_core.snapshot.snapshot import (
    BOUNDARY,
    Header,
    Snapshot,
    StateTensor,
    aligned_bytes,
    as_bytes,
    contents_text,
    entries_of,
    offsets,
)
from moevement_core.snapshot.whole import begin_whole
from moevement_core.topology.topology import Topology
from moevement_core.trainer.capabilities import SupportsLiveReplicas
from moevement_core.trainer.commit import Mark
from moevement_core.trainer.interface import BindingInterface

LIVE = "live"
"""Marker in place of a schedule's id: the snapshot was made from live state, and belongs to no window."""


class LiveReplicas(SnapshotSource):
    """Source of the newest state of lost ranks: this rank holds the same state live, or they handed theirs to it.

    Args:
        binding: binding of the trainer.
        topology: topology of this generation.
        mark: newest iteration that this rank has committed, with the boundary state after it; None if this rank has no
            state.
        handed_over: states that ranks which left have handed to this rank, by rank.
    """

    def __init__(
        self,
        binding: BindingInterface,
        topology: Topology,
        mark: Mark | None,
        handed_over: Mapping[int, Snapshot] | None = None,
    ) -> None:
        self._binding, self._topology, self._mark = binding, topology, mark
        self._handed_over = handed_over or {}

    def stands_for(self, until: int, lost: Collection[int]) -> Mapping[int, int]:
        """Return the ranks in ``lost`` whose ``state@until`` this rank can send.

        Each rank is mapped to the number of operators of its stage.
        """
        if self._topology.rank in lost:
            return {}
        handed_over = {
            rank: len(snapshot.contents) for rank, snapshot in self._handed_over.items()
            if rank in lost and snapshot.iteration == until
        }  # fmt: skip
        if self._mark is None or self._mark.iteration != until:
            return handed_over
        replicas = self._binding.live_replicas() if isinstance(self._binding, SupportsLiveReplicas) else ()
        return handed_over | {rank: len(self._topology.table) for rank in replicas if rank in lost}

    def holdings(self) -> Sequence[Holding]:
        """Return no holdings, because this rank makes a snapshot only when the recovery opens it."""
        return ()

    def open(self, source: Source, owner: int, iteration: int) -> Snapshot | None:
        """Return a dense snapshot of ``owner``: its own, or one of live state; None without ``state@iteration``."""
        handed = self._handed_over.get(owner)
        if handed is not None and handed.iteration == iteration:
            return handed
        mark = self._mark
        if mark is None or mark.iteration != iteration:
            return None
        assert isinstance(self._binding, SupportsLiveReplicas)
        # Snapshots are captured when the next iteration begins, after any evaluation or save scheduled before it.
        boundary = mark.boundary if mark.resumed is None else mark.resumed
        return snapshot_of_live(
            self._binding.states_of_replica(owner), self._topology.table, owner, iteration=iteration, boundary=boundary
        )


def snapshot_of_live(
    states: Mapping[str, OperatorState],
    table: OperatorTable,
    owner: int,
    *,
    iteration: int,
    boundary: Mapping[str, Any],
) -> Snapshot:
    """Return a dense snapshot of live state.

    Args:
        states: state of the operators that ``owner`` saves, by name.
        table: operators of the owner's stage.
        owner: rank whose snapshot it is.
        iteration: newest committed iteration, whose state is live.
        boundary: boundary record at the beginning of the next iteration.
    """
    marked, kept = plain.flatten({"boundary": boundary, "iteration": {}})
    tensors = [tensor for name in table.names if name in states for tensor in states[name].full if tensor.nbytes]
    tensors += [
        StateTensor(BOUNDARY, Saved.FULL, str(number), tensor.contiguous()) for number, tensor in enumerate(kept)
    ]
    placed, data = list(offsets(tensors)), torch.zeros(aligned_bytes(tensors), dtype=torch.uint8)
    for tensor, at in placed:
        data[at : at + tensor.nbytes] = as_bytes(tensor.tensor)
    contents = contents_text(np.full(len(table), Saved.FULL, dtype=np.int8))
    whole = begin_whole({n: [t.tensor for t in (*s.compute, *s.full)] for n, s in states.items()})()
    entries = entries_of(placed, data, table.index_of)
    return Snapshot(
        Header(
            rank=owner,
            iteration=iteration,
            schedule=LIVE,
            slot=0,
            contents=contents,
            entries=entries,
            record=marked,
            state=iteration,
            whole=whole,
        ),
        Buffer(data),
    )
