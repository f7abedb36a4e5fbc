"""Rank of this process as a task of Slurm, determined by Megatron's own functions."""

from __future__ import annotations


def read_variables() -> tuple[int | None, int | None, int | None]:
    """Return rank, world size and local rank; each is None if Slurm does not define it."""
    from megatron.moevement import platform

    platform.install()  # Must precede any import of Megatron, also in ranks that are forked later.
    from megatron.core import _slurm_utils as slurm

    return slurm.resolve_slurm_rank(), slurm.resolve_slurm_world_size(), slurm.resolve_slurm_local_rank()
