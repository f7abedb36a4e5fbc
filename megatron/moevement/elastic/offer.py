"""What a rank that has survived brings into a job of another size: its state, without the model that it was in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from megatron.moevement.elastic.pieces import Stand
from megatron.moevement.elastic.slots import Loads
from moevement_core.elastic.exchange import Piece
from moevement_core.session.commit import Mark


@dataclass(frozen=True, eq=False)
class Offer:
    """The state of a rank after an iteration."""

    lineage: str
    """The start of the job that this state has come from, in an unbroken row of iterations."""
    mark: Mark
    """The iteration, and what stands beside the optimizer's state after it."""
    pieces: Sequence[Piece]
    """On the host."""
    stand: Stand
    """Of the rank that it was the state of."""
    books: float
    """Floating-point operations so far."""
    experts: Mapping[int, Sequence[int]] = field(default_factory=dict)
    """By layer, those in its slots; nothing without slots."""
    loads: Loads = field(default_factory=dict)
    """What experts of its layers had of tokens lately."""
