"""State that a survivor of an elastic job keeps in host memory, without a model, and brings into the resized job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from megatron.moevement.elastic.formation import FormationSnapshots
from megatron.moevement.elastic.pieces import RankPosition
from megatron.moevement.elastic.slots import Loads
from moevement_core.elastic.exchange import Piece
from moevement_core.trainer.commit import Mark


@dataclass(frozen=True, eq=False)
class SurvivorState:
    """State that one survivor brings: its optimizer state after an iteration, and the snapshots in its memory."""

    lineage: str
    """Name of the start of the job (:attr:`JobNames.start`) from which this state was trained."""
    mark: Mark | None
    """Newest iteration that the rank has committed, with its boundary record.

    None if a failure interrupted the rank in the middle of an update; the rank then brings only snapshots.
    """
    pieces: Sequence[Piece]
    """Pieces of the optimizer state after the iteration of ``mark``, in host memory."""
    stand: RankPosition
    """Parallel position that the rank had when it reached this state."""
    run_totals: float
    """Floating-point operations that the job has executed so far."""
    experts: Mapping[int, Sequence[int]] = field(default_factory=dict)
    """Experts in the rank's slots, by layer; empty without slots."""
    loads: Loads = field(default_factory=dict)
    """Recent token counts of the experts in the rank's layers."""
    losses: Mapping[str, torch.Tensor] | None = None
    """Losses of the iteration of ``mark``, by name; None if this rank has no losses.

    Each loss is a tensor of two numbers: the sum over this rank's micro-batches, and the number of tokens.
    """
    kept_snapshots: Sequence[FormationSnapshots] = ()
    """Snapshots that this rank captured or keeps for peers: one entry for each set of ranks that the job had.

    Snapshots from before the last change of ranks are included until the job has persisted a window after it.
    """

    def live(self, iteration: int) -> Sequence[Piece]:
        """Return the pieces of the state after ``iteration``; empty if the rank did not commit that iteration."""
        return self.pieces if self.mark is not None and self.mark.iteration == iteration else ()
