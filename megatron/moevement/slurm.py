"""Rank of this process as a task of Slurm, as Megatron determines it."""

from __future__ import annotations


def read_variables() -> tuple[int | None, int | None, int | None]:
    """Return rank, world size and local rank; each is None if Slurm does not define it."""
    from megatron.moevement import platform

    platform.install()  # This comes before any import of Megatron, because processes may be forked from this one.
    from megatron.core import _slurm_utils as slurm

    return slurm.resolve_slurm_rank(), slurm.resolve_slurm_world_size(), slurm.resolve_slurm_local_rank()
