"""Source of state for failed ranks: a live replica holds the same state, so no iteration and no update is repeated.

Without sharding, every data-parallel replica holds the whole state and saves a part of it. When a recovery opens a
snapshot of a failed rank, a live replica makes this snapshot from live tensors. The snapshot holds the part that the
failed rank saved. The recovery uses it like any other dense snapshot.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import torch

from moevement_core.comms import plain
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
from moevement_core.trainer.binding import Binding
from moevement_core.trainer.commit import Mark

LIVE = "live"
"""Marker in place of a schedule's id: the snapshot was made from live state, and belongs to no window."""


class LiveReplicas(SnapshotSource):
    """Source of snapshots that this rank makes from live state, for failed ranks that held the same state.

    Args:
        binding: binding of the trainer.
        topology: topology of this generation.
        mark: newest iteration that this rank has committed, with the boundary state after it; None if this rank has no
            state.
    """

    def __init__(self, binding: Binding, topology: Topology, mark: Mark | None) -> None:
        self._binding, self._topology, self._mark = binding, topology, mark

    def stands_for(self, until: int, lost: Collection[int]) -> Mapping[int, int]:
        """Return the ranks in ``lost`` whose ``state@until`` is live on this rank.

        Each rank is mapped to the number of operators of its stage.
        """
        if self._mark is None or self._mark.iteration != until or self._topology.rank in lost:
            return {}
        return {rank: len(self._topology.table) for rank in self._binding.live_replicas() if rank in lost}

    def holdings(self) -> Sequence[Holding]:
        """Return no holdings, because this rank makes a snapshot only when the recovery opens it."""
        return ()

    def open(self, source: Source, owner: int, iteration: int) -> Snapshot | None:
        """Return a snapshot of live state as ``owner`` would have made it; None if another iteration is live."""
        mark = self._mark
        if mark is None or mark.iteration != iteration:
            return None
        states, table = self._binding.states_of_replica(owner), self._topology.table
        # Snapshots are captured when the next iteration begins, after any evaluation or save scheduled before it.
        boundary = mark.boundary if mark.resumed is None else mark.resumed
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
