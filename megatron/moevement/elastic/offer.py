"""State that a survivor brings into a job of another size, without the model that it was in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from megatron.moevement.elastic.held import Held
from megatron.moevement.elastic.pieces import Stand
from megatron.moevement.elastic.slots import Loads
from moevement_core.elastic.exchange import Piece
from moevement_core.session.commit import Mark


@dataclass(frozen=True, eq=False)
class Offer:
    """The state of a rank after an iteration, live and in snapshots."""

    lineage: str
    """The start of the job that this state has come from, in an unbroken row of iterations."""
    mark: Mark | None
    """The newest iteration that it has committed, and what stands beside the optimizer's state after it; None: it has
    no state of any iteration but in snapshots."""
    pieces: Sequence[Piece]
    """Pieces of that iteration, on the host."""
    stand: Stand
    """Position of the rank whose state it was."""
    books: float
    """Floating-point operations so far."""
    experts: Mapping[int, Sequence[int]] = field(default_factory=dict)
    """Experts in its slots, by layer; empty without slots."""
    loads: Loads = field(default_factory=dict)
    """Recent token counts of the experts of its layers."""
    losses: Mapping[str, torch.Tensor] | None = None
    """Losses of that iteration, as sums over this rank's micro-batches and numbers of tokens; None where this rank has
    none.
    """
    helds: Sequence[Held] = ()
    """Own snapshots and those kept for others, of that job, and of jobs before it as long as it has
    no persisted window.
    """

    def live(self, iteration: int) -> Sequence[Piece]:
        """Return this rank's part of the state after ``iteration``, without snapshots."""
        return self.pieces if self.mark is not None and self.mark.iteration == iteration else ()
