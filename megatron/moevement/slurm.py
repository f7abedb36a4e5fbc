"""Which task of Slurm this process is, as Megatron tells it."""

from __future__ import annotations

import os

from moevement_core.errors import ConfigError


def slurm_environment(*, meets_at_master: bool) -> dict[str, str]:
    """Torch's variables for the task of Slurm that this process is.

    Args:
        meets_at_master: whether ranks meet at MASTER_ADDR and MASTER_PORT, and not in a store that is named.

    Raises:
        ConfigError: not inside a task that ``srun`` started.
    """
    from megatron.moevement import platform

    platform.install()  # before anything of Megatron is imported: processes may be forked from this one
    from megatron.core import _slurm_utils as slurm

    rank, world_size, local_rank = (
        slurm.resolve_slurm_rank(), slurm.resolve_slurm_world_size(), slurm.resolve_slurm_local_rank(),
    )  # fmt: skip
    if rank is None or world_size is None or local_rank is None:
        raise ConfigError("no --nproc and not started by srun; say how many ranks this host runs with --nproc N")
    environment = {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(local_rank)}
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if meets_at_master and world_size > 1 and not os.environ.get(name):
            raise ConfigError(f"{name} is not set; the job script sets it for all tasks (examples/pretrain_moe/slurm)")
    return environment
