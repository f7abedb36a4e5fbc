"""Which task of Slurm this process is, as Megatron finds it."""

from __future__ import annotations


def read_variables() -> tuple[int | None, int | None, int | None]:
    """Rank, world size and local rank; None what Slurm does not say."""
    from megatron.moevement import platform

    platform.install()  # before anything of Megatron is imported: processes may be forked from this one
    from megatron.core import _slurm_utils as slurm

    return slurm.resolve_slurm_rank(), slurm.resolve_slurm_world_size(), slurm.resolve_slurm_local_rank()
