"""State that a rank has after an elastic job changed its size, kept until training continues from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron.moevement.elastic.iteration_outcome import IterationOutcome
from moevement_core.elastic.exchange import Exchanged


@dataclass(frozen=True, eq=False)
class Resized:
    """State from which this rank continues training after an elastic job changed its size."""

    iteration: int
    """Iteration from which all ranks continue."""
    boundary: Mapping[str, Any] | None
    """Boundary record after ``iteration``; None if a recovery from snapshots has to restore the state first."""
    is_between: bool
    """True if an evaluation or a dense save that is due after ``iteration`` may not have happened."""
    world_before: int
    exchanged: Exchanged
    newest_outcome: IterationOutcome | None = None
    """Outcome of ``iteration``, which ``metrics.jsonl`` may lack; None if the outcome is not known."""
    usable_at: float = 0.0
    """Time at which process groups became usable, in seconds since the epoch."""
    brought_at: float = 0.0
    """Time at which the transfer of state to this rank ended, in seconds since the epoch."""
