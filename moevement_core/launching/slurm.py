"""Which task of Slurm this process is."""

from __future__ import annotations

import os

from moevement_core.errors import ConfigError


def read_variables() -> tuple[int | None, int | None, int | None]:
    """Rank, world size and local rank as Slurm says them; None what it does not."""
    rank, world_size, local_rank = (
        int(value) if (value := os.environ.get(name)) else None
        for name in ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")
    )
    return rank, world_size, local_rank


def task_environment(
    rank: int | None, world_size: int | None, local_rank: int | None, *, meets_at_master: bool, devices: int = 0
) -> dict[str, str]:
    """Torch's variables for the task of Slurm that this process is.

    Args:
        rank: as Slurm says it; ``world_size`` and ``local_rank`` likewise.
        meets_at_master: whether ranks meet at MASTER_ADDR and MASTER_PORT, and not in a store that is named.
        devices: how many accelerators this process sees. One that is its own (``--gpus-per-task=1``,
            ``--gpu-bind=single:1``) has the number 0 in every task.

    Raises:
        ConfigError: not inside a task that ``srun`` started.
    """
    if rank is None or world_size is None or local_rank is None:
        raise ConfigError("no --nproc and not started by srun; say how many ranks this host runs with --nproc N")
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if meets_at_master and world_size > 1 and not os.environ.get(name):
            raise ConfigError(f"{name} is not set; the job script sets it for all tasks (examples/pretrain_moe/slurm)")
    return {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(0 if devices == 1 else local_rank)}
