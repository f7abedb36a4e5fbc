"""What a rank that has survived brings into a job of another size: its state, without the model that it was in."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron.moevement.elastic.pieces import Stand, snapshot_pieces
from megatron.moevement.elastic.slots import Loads
from moevement_core.elastic.exchange import Piece
from moevement_core.policy.schedule import Saved
from moevement_core.session.commit import Mark
from moevement_core.snapshot.snapshot import Snapshot


@dataclass(frozen=True, eq=False)
class Offer:
    """The state of a rank after an iteration, live and in snapshots."""

    lineage: str
    """The start of the job that this state has come from, in an unbroken row of iterations."""
    mark: Mark | None
    """The newest iteration that it has committed, and what stands beside the optimizer's state after it; None: it has
    no state of any iteration but in snapshots."""
    pieces: Sequence[Piece]
    """Of that iteration, on the host."""
    stand: Stand
    """Of the rank that it was the state of."""
    books: float
    """Floating-point operations so far."""
    experts: Mapping[int, Sequence[int]] = field(default_factory=dict)
    """By layer, those in its slots; nothing without slots."""
    loads: Loads = field(default_factory=dict)
    """What experts of its layers had of tokens lately."""
    snapshots: Sequence[Snapshot] = ()
    """Its own, and those that it keeps for others."""
    stands: Sequence[Stand] = ()
    """Of all ranks then."""

    def states(self) -> set[int]:
        """Iterations of whose state it has any part in snapshots."""
        return {one.header.state for one in self.snapshots if Saved.FULL in one.contents}

    def of_iteration(self, iteration: int, lost: Collection[int]) -> list[Piece]:
        """What this rank has of the state after ``iteration``.

        Args:
            iteration: which.
            lost: ranks of then that are gone: only their snapshots are looked at where the state itself is here.

        Raises:
            SnapshotError: a snapshot is damaged.
        """
        is_live = self.mark is not None and self.mark.iteration == iteration
        pieces = list(self.pieces) if is_live else []
        for snapshot in self.snapshots:
            rank = snapshot.header.rank
            if snapshot.header.state == iteration and (not is_live or rank in lost):
                snapshot.check(f"in the memory of rank {self.stand.rank}")
                pieces += snapshot_pieces(snapshot, self.stands[rank])
        return pieces

    def boundaries_of(self, iteration: int) -> dict[Stand, Mapping[str, Any]]:
        """What stood beside the optimizer's state after ``iteration``, from snapshots, by where a rank stood."""
        return {
            self.stands[one.header.rank]: one.record()["boundary"]
            for one in self.snapshots
            if one.header.state == iteration
        }
