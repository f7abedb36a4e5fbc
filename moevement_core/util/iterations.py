"""Comparison of iterations of which some may not exist. ``None`` stands for no iteration."""

from __future__ import annotations

from collections.abc import Iterable


def newest_of(iterations: Iterable[int | None]) -> int | None:
    """Return the largest of ``iterations``; None if there is none."""
    return max((iteration for iteration in iterations if iteration is not None), default=None)


def reached_by_all(iterations: Iterable[int | None]) -> int | None:
    """Return the smallest of ``iterations``; None if one of them is None, or if there is none."""
    known = list(iterations)
    if None in known:
        return None
    return min((iteration for iteration in known if iteration is not None), default=None)


def is_newer(iteration: int | None, other: int | None) -> bool:
    """Return True if ``iteration`` exists, and ``other`` is smaller or does not exist."""
    return iteration is not None and (other is None or iteration > other)
