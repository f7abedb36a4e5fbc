"""State that a resize brought to a rank, kept until training continues from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron.moevement.elastic.iteration_outcome import IterationOutcome
from moevement_core.elastic.exchange import Exchanged


@dataclass(frozen=True, eq=False)
class Resized:
    """State that a resize brought to one rank, with what training needs to continue from it."""

    iteration: int
    """Iteration from which all ranks continue."""
    boundary: Mapping[str, Any] | None
    """Boundary state of that iteration; None if a recovery from snapshots restores it first."""
    is_between: bool
    """True if an evaluation or a dense save that is due after that iteration may not have happened."""
    world_before: int
    exchanged: Exchanged
    newest_outcome: IterationOutcome | None = None
    """Outcome of that iteration; a failure may have prevented its metrics line."""
    usable_at: float = 0.0
    """Time at which process groups became usable, in seconds since the epoch."""
    brought_at: float = 0.0
    """Time at which the transfer of state to this rank ended, in seconds since the epoch."""
