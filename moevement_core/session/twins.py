"""A rank that was lost takes its state from one that has the same, live: no iteration and no update is made again.

Without sharding every data-parallel replica has all of the state, and each saves a part of it. Of the part that a lost
rank saved, a live replica makes a snapshot when it is asked, as the lost one would have made it. With that a recovery
goes on as with any other dense snapshot.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from moevement_core.policy.schedule import Saved
from moevement_core.recovery.places import Holding, Source
from moevement_core.session.binding import Binding
from moevement_core.session.commit import Mark
from moevement_core.session.sources import SnapshotSource
from moevement_core.session.topology import Topology
from moevement_core.snapshot import plain
from moevement_core.snapshot.buffer import Buffer
from moevement_core.snapshot.snapshot import (
    BOUNDARY,
    Entry,
    Header,
    Snapshot,
    StateTensor,
    aligned_bytes,
    as_bytes,
    contents_text,
    digest_of,
    offsets,
)
from moevement_core.snapshot.whole import begin_whole

LIVE = "live"
"""In the place of a schedule's id: the snapshot was made of live state, and belongs to no window."""


class Twins(SnapshotSource):
    """What this rank can give to those that have the same state.

    Args:
        binding: the trainer.
        topology: of this generation.
        mark: of the iteration whose state is live here; None: that of none is.
    """

    def __init__(self, binding: Binding, topology: Topology, mark: Mark | None) -> None:
        self._binding, self._topology, self._mark = binding, topology, mark

    def stands_for(self, until: int, lost: Collection[int]) -> Mapping[int, int]:
        """The lost ranks whose state is live here; the operators of their stage, by rank."""
        if self._mark is None or self._mark.iteration != until or self._topology.rank in lost:
            return {}
        return {rank: len(self._topology.table) for rank in self._binding.twins() if rank in lost}

    def holdings(self) -> Sequence[Holding]:
        """None: it is made where it is wanted."""
        return ()

    def open(self, source: Source, owner: int, iteration: int) -> Snapshot | None:
        """As ``owner`` would have made it of its live state; nothing if this rank has another iteration's."""
        mark = self._mark
        if mark is None or mark.iteration != iteration:
            return None
        states = self._binding.states_of_twin(owner)
        marked, tensors = plain.flatten({"boundary": mark.boundary, "iteration": {}})
        boundary = [
            StateTensor(BOUNDARY, Saved.FULL, str(number), one.contiguous()) for number, one in enumerate(tensors)
        ]
        wanted = [
            one for name in self._topology.table.names if name in states for one in states[name].full if one.nbytes
        ]
        everything = [*wanted, *boundary]
        data = torch.zeros(aligned_bytes(everything), dtype=torch.uint8)
        entries = []
        for one, at in offsets(everything):
            piece = data[at : at + one.nbytes]
            piece.copy_(as_bytes(one.tensor))
            dtype = str(one.tensor.dtype).removeprefix("torch.")
            place = self._topology.table.index_of.get(one.operator, -1)
            entries.append(Entry(one.operator, one.saved, one.key, dtype, at, one.nbytes, digest_of(piece), place))
        contents = contents_text(np.full(len(self._topology.table), Saved.FULL, dtype=np.int8))
        whole = begin_whole({n: [t.tensor for t in (*s.compute, *s.full)] for n, s in states.items()})()
        header = Header(owner, iteration, LIVE, 0, contents, tuple(entries), marked, iteration, _known(whole))
        return Snapshot(header, Buffer(data))


def _known(whole: Mapping[str, Any]) -> dict[str, str] | None:
    return {name: str(digest) for name, digest in whole.items()} or None
