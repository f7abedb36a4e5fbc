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
    """That all ranks go on from."""
    boundary: Mapping[str, Any] | None
    """What stands beside the optimizer's state there; None: the recovery that comes first puts it."""
    is_between: bool
    """Whether what is due after it (evaluation, dense save) may not have been done."""
    world_before: int
    exchanged: Exchanged
    line: Line | None = None
    """What came of that iteration, for a line of metrics that may not have been written."""
    usable_at: float = 0.0
    """When process groups were usable, seconds since the epoch."""
    brought_at: float = 0.0
    """When the state was here."""
