"""Tests of the stages that roll back together, and of the neighbours that feed them."""

from __future__ import annotations

import pytest

from moevement_core.recovery.scope import Pipeline, neighbours_of, segments

LINE, RING, TIED = Pipeline(6), Pipeline(6, is_ring=True), Pipeline(6, tied=frozenset({0, 5}))
PREDICTING = Pipeline(6, tied=frozenset({0, 4, 5}))
"""Pipeline with tied embeddings, and with multi-token prediction on a stage of its own."""


@pytest.mark.parametrize(
    ("pipeline", "lost", "expected"),
    [
        (LINE, {2}, [{2}]),
        (LINE, {0, 5}, [{0}, {5}]),
        (LINE, {1, 2, 4}, [{1, 2}, {4}]),
        (LINE, {0, 1, 2, 3, 4, 5}, [{0, 1, 2, 3, 4, 5}]),
        (RING, {0, 5}, [{0, 5}]),
        (RING, {1, 3, 5}, [{1}, {3}, {5}]),
        (RING, {5, 0, 1, 3}, [{5, 0, 1}, {3}]),
        (TIED, {0}, [{0, 5}]),
        (TIED, {5, 2}, [{0, 5}, {2}]),
        (TIED, {1, 0}, [{0, 1, 5}]),
        (TIED, {4, 5}, [{0, 4, 5}]),
        (TIED, {3}, [{3}]),
        (PREDICTING, {4}, [{0, 4, 5}]),
        (PREDICTING, {0, 2}, [{0, 4, 5}, {2}]),
        (PREDICTING, {1, 3}, [{1}, {3}]),
        (Pipeline(2, is_ring=True), {1}, [{1}]),
        (Pipeline(1), {0}, [{0}]),
        (LINE, set(), []),
    ],
)
def test_segments(pipeline: Pipeline, lost: set[int], expected: list[set[int]]) -> None:
    assert segments(pipeline, lost) == sorted((frozenset(segment) for segment in expected), key=min)


def test_neighbours_feed() -> None:
    assert neighbours_of(LINE, frozenset({1, 2})) == {0, 3}
    assert neighbours_of(LINE, frozenset({0})) == {1}
    assert neighbours_of(RING, frozenset({0})) == {1, 5}
    assert neighbours_of(Pipeline(2, is_ring=True), frozenset({0})) == {1}
    assert neighbours_of(TIED, frozenset({0, 5})) == {1, 4}
