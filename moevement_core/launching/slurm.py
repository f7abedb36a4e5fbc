"""Reader of Slurm's variables, which identify this process among the tasks of a step."""

from __future__ import annotations

import os

from moevement_core.errors import ConfigError


def read_variables() -> tuple[int | None, int | None, int | None]:
    """Return rank, world size and local rank from Slurm's variables; None for each that is not set."""
    rank, world_size, local_rank = (
        int(value) if (value := os.environ.get(name)) else None
        for name in ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")
    )
    return rank, world_size, local_rank


def task_environment(
    rank: int | None, world_size: int | None, local_rank: int | None, *, meets_at_master: bool, devices: int = 0
) -> dict[str, str]:
    """Return torch's variables for this process, which is a task of Slurm.

    Args:
        rank: rank from Slurm's variables; None if ``srun`` did not start this process.
        world_size: number of tasks from Slurm's variables; None if not set.
        local_rank: number of the task on its node, from Slurm's variables; None if not set.
        meets_at_master: True if ranks find each other through MASTER_ADDR and MASTER_PORT; False if they do so through
            the store of a coordinator.
        devices: number of accelerators that this process sees. If it is 1 (``--gpus-per-task=1``,
            ``--gpu-bind=single:1``), LOCAL_RANK is 0, because each task counts its accelerators from 0.

    Raises:
        ConfigError: ``srun`` did not start this process, or MASTER_ADDR or MASTER_PORT is needed and not set.
    """
    if rank is None or world_size is None or local_rank is None:
        raise ConfigError("no --nproc, and srun did not start this process; give --nproc N, the ranks of this host")
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if meets_at_master and world_size > 1 and not os.environ.get(name):
            raise ConfigError(f"{name} is not set; export it in the job script (examples/pretrain_moe/slurm)")
    return {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(0 if devices == 1 else local_rank)}
