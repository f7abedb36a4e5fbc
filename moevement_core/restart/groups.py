"""Process groups between two generations."""

from __future__ import annotations

from contextlib import suppress

import torch.distributed as dist


def forget_groups() -> None:
    """Destroy what process groups the abort has left, and count the next ones from the beginning.

    Torch names groups by a number and destroys nothing while there is no default group. A rank that was interrupted
    while it made that one would look for its peers under other names than a process that has just started.
    """
    c10d = dist.distributed_c10d
    if not dist.is_initialized() and c10d._world.pg_map:
        c10d._update_default_pg(next(iter(c10d._world.pg_map)))
    if dist.is_initialized():
        with suppress(Exception):
            dist.destroy_process_group()
    c10d._world.pg_coalesce_state.clear()  # of a block that was interrupted, which a new group would inherit
    c10d._world.group_count = 0
