"""Positions of the ranks of a job before and after it changes its number of ranks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RankLayout:
    """Position of a rank in the layout of a job."""

    rank: int
    world: int
    stage: int
    """Pipeline stage of the rank; 0 without a pipeline."""
    shard: tuple[int, ...] = ()
    """Coordinates of the rank within its stage, without the data-parallel one; the most important coordinate is first.

    The trainer defines them. Ranks of a stage with equal coordinates can continue with the same boundary record.
    """


@dataclass(frozen=True)
class Formation:
    """Formation of a job: the number of a generation, and the layout of all ranks in this generation."""

    generation: int
    """Number of the generation; -1 if the snapshots are from disk.

    The number distinguishes formations of equal size, because a job may return to an earlier size with newer state.
    """
    layouts: tuple[RankLayout, ...]
    """Layouts of all ranks of the formation, in rank order."""
