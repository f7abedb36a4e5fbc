"""Tests of the topology that is derived from process groups."""

from __future__ import annotations

from moevement_core.topology.topology import tied_stages


def test_stages_with_copies_of_one_embedding_are_tied() -> None:
    """Use four stages of two ranks. Each rank lists the ranks of its own pipeline that have the embedding."""
    stages = [0, 0, 1, 1, 2, 2, 3, 3]
    alone: tuple[int, ...] = ()
    assert tied_stages(stages, [alone] * 8) == frozenset()
    first_and_last = [(0, 6), (1, 7), alone, alone, alone, alone, (0, 6), (1, 7)]
    assert tied_stages(stages, first_and_last) == {0, 3}
    predicting = [(0, 4, 6), (1, 5, 7), alone, alone, (0, 4, 6), (1, 5, 7), (0, 4, 6), (1, 5, 7)]
    assert tied_stages(stages, predicting) == {0, 2, 3}
    assert tied_stages([0, 0], [(0, 1), (0, 1)]) == frozenset(), "one stage has no other to be tied to"
