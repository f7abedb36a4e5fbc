"""What ranks tell each other outside of training."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist


def all_gather_objects(mine: Any) -> list[Any]:
    """Returns what every rank of the job gave, by rank; called by every rank at the same point."""
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, mine)
    return everyones
