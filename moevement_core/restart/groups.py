"""Removal of process groups between two generations."""

from __future__ import annotations

from contextlib import suppress

import torch.distributed as dist

from moevement_core.comms.job_group import forget_job_group


def forget_groups() -> None:
    """Destroy the groups that the abort has left, and reset torch's counter of groups.

    Torch names groups by a counter, and destroys nothing while there is no default group. A rank may be interrupted
    while it makes the default group. Without the reset, the names of its next groups would differ from those on a newly
    started process.
    """
    c10d = dist.distributed_c10d
    if not dist.is_initialized() and c10d._world.pg_map:
        c10d._update_default_pg(next(iter(c10d._world.pg_map)))
    if dist.is_initialized():
        with suppress(Exception):
            dist.destroy_process_group()
    c10d._world.pg_coalesce_state.clear()  # Otherwise a new group could inherit the state of an interrupted block.
    c10d._world.group_count = 0
    forget_job_group()
