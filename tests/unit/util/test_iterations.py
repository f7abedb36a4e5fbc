"""Comparison of iterations of which some do not exist."""

from __future__ import annotations

import pytest

from moevement_core.util.iterations import is_newer, newest_of, reached_by_all


@pytest.mark.parametrize(
    ("iterations", "newest", "reached"),
    [([], None, None), ([None], None, None), ([3, None, -7], 3, None), ([3, 0, -7], 3, -7)],
)
def test_the_newest_is_of_any_and_what_all_have_reached_is_of_all(
    iterations: list[int | None], newest: int | None, reached: int | None
) -> None:
    assert (newest_of(iterations), reached_by_all(iterations)) == (newest, reached)


def test_any_iteration_is_newer_than_none() -> None:
    pairs: list[tuple[int | None, int | None]] = [(-7, None), (1, 0), (1, 1), (0, 1), (None, 0), (None, None)]
    assert [is_newer(*pair) for pair in pairs] == [True, True, False, False, False, False]
