"""What a rank that has survived brings into a job of another size: its state, without the model that it was in."""

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
    """Of that iteration, on the host."""
    stand: Stand
    """Of the rank that it was the state of."""
    books: float
    """Floating-point operations so far."""
    experts: Mapping[int, Sequence[int]] = field(default_factory=dict)
    """By layer, those in its slots; nothing without slots."""
    loads: Loads = field(default_factory=dict)
    """What experts of its layers had of tokens lately."""
    losses: Mapping[str, torch.Tensor] | None = None
    """Of that iteration, sums over this rank's micro-batches and numbers of tokens; where this rank has any."""
    helds: Sequence[Held] = ()
    """Its own snapshots and those that it keeps for others, of the job of then; and of jobs before it, as long as that
    one has no window yet that is persisted.
    """

    def live(self, iteration: int) -> Sequence[Piece]:
        """What this rank has of the state after ``iteration``, snapshots not among it."""
        return self.pieces if self.mark is not None and self.mark.iteration == iteration else ()
