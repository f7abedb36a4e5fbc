"""State that was brought to a rank of a job of another size, until training takes it up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron.moevement.elastic.line import Line
from moevement_core.elastic.exchange import Exchanged


@dataclass(frozen=True, eq=False)
class Resized:
    """The state that a resize has brought to one rank, and what training needs to resume from it."""

    iteration: int
    """Iteration from which all ranks continue."""
    boundary: Mapping[str, Any] | None
    """Boundary state of that iteration; None: the recovery that comes first restores it."""
    is_between: bool
    """True if an evaluation or dense save after it may not have happened."""
    world_before: int
    exchanged: Exchanged
    line: Line | None = None
    """Outcome of that iteration, for a line of metrics that may not have been written."""
    usable_at: float = 0.0
    """Time at which process groups were usable, in seconds since the epoch."""
    brought_at: float = 0.0
    """Time at which the state was here, in seconds since the epoch."""
