"""Bubbles of pipelines, and checkpoints that are copied in them: computed by hand, and for any schedule."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moevement_core.simulator.bubbles import Bubbles, Split, bubbles_of, gaps, idle
from moevement_core.simulator.iteration import IterationTime
from moevement_core.simulator.pipeline import SimulatedPipeline

EVEN = SimulatedPipeline((1.0, 1.0), (2.0, 2.0), micro_batches=2)
"""Stage 0 executes F at 0 and 1, and B at 4 and 7. Stage 1 executes F at 1, B at 2, F at 4 and B at 5."""
BUBBLES = Bubbles(((2.0, 4.0), (6.0, 7.0)), iteration_s=10.0)


def test_bubbles_by_hand() -> None:
    assert idle(EVEN, 0, 9.0) == ((2.0, 4.0), (6.0, 7.0))
    assert idle(EVEN, 1, 9.0) == ((0.0, 1.0), (7.0, 9.0))


def test_a_stage_that_sends_or_receives_is_not_idle() -> None:
    """Check one micro-batch: F 0 to 1, send to 2, F to 3, B to 5, send to 6, B to 8."""
    pipeline = SimulatedPipeline((1.0, 1.0), (2.0, 2.0), micro_batches=1, send_s=1.0)
    assert idle(pipeline, 0, 8.0) == ((2.0, 5.0),)
    assert idle(pipeline, 1, 8.0) == ((0.0, 1.0), (6.0, 8.0))


@given(stages=st.integers(1, 6), micro_batches=st.integers(1, 12), chunks=st.integers(1, 3))
@settings(max_examples=30, deadline=None)
def test_even_stages_are_idle_for_the_bubble_of_the_formula(stages: int, micro_batches: int, chunks: int) -> None:
    """Check ``(S - 1) / v`` passes of each direction, for 1F1B and for interleaved schedules."""
    if chunks > 1:
        micro_batches *= stages
    time = IterationTime((SimulatedPipeline((1.0,) * stages, (2.0,) * stages, micro_batches, chunks),))
    for stage in range(stages):
        assert bubbles_of(time, stage).seconds == pytest.approx(3.0 * (stages - 1) / chunks, abs=1e-6)


def test_synchronisation_and_update_are_no_bubbles() -> None:
    bubbles = bubbles_of(IterationTime((EVEN,), sync_s=1.0, update_s=2.0), 1)
    assert bubbles == Bubbles(((0.0, 1.0), (7.0, 9.0)), iteration_s=12.0)


def test_the_replica_with_the_least_idle_time_counts_and_a_fast_one_waits_for_a_slow_one() -> None:
    slow = SimulatedPipeline((2.0, 2.0), (4.0, 4.0), micro_batches=2)
    fast_alone, both = bubbles_of(IterationTime((EVEN,)), 0), bubbles_of(IterationTime((EVEN, slow)), 0)
    assert (fast_alone.seconds, both.seconds) == (3.0, 6.0), "the fast one has 3 s, and waits 9 s for the slow one"
    assert both.spans == ((4.0, 8.0), (12.0, 14.0))


def test_gaps_between_spans_that_overlap() -> None:
    assert gaps([(1.0, 3.0), (2.0, 2.5), (4.0, 5.0)], 6.0) == ((0.0, 1.0), (3.0, 4.0), (5.0, 6.0))
    assert gaps([], 6.0) == ((0.0, 6.0),)


@pytest.mark.parametrize(
    ("nbytes", "iterations", "split"), [(20, 1, (20, 0)), (30, 1, (30, 0)), (100, 1, (30, 70)), (100, 2, (60, 40))]
)
def test_a_checkpoint_is_split_by_what_bubbles_carry(nbytes: int, iterations: int, split: tuple[int, int]) -> None:
    """Check bubbles of 3 seconds in an iteration, at 10 bytes per second."""
    assert BUBBLES.split(nbytes, 10.0, iterations) == split


def test_without_bubbles_everything_is_copied_beside_training() -> None:
    assert Bubbles((), 10.0).split(100, 10.0) == (0, 100)
    assert Bubbles((), 10.0).ends_s(Split(0, 100), 10.0, 5.0) == 20.0
    assert Bubbles((), 10.0).split(0, 10.0) == (0, 0)


@pytest.mark.parametrize(
    ("split", "ends_s"),
    [
        ((30, 0), 7.0),
        ((10, 0), 3.0),
        ((0, 10), 2.0),
        ((0, 15), 5.0),
        ((0, 35), 10.0),
        ((0, 36), 10.2),
        ((0, 70), 17.0),
        ((30, 15), 7.0),
        ((0, 0), 0.0),
    ],
)
def test_each_part_is_copied_in_its_own_times(split: tuple[int, int], ends_s: float) -> None:
    """Check bubbles at 2 to 4 and 6 to 7, with 10 bytes per second in bubbles and 5 outside of them."""
    assert BUBBLES.ends_s(Split(*split), 10.0, 5.0) == pytest.approx(ends_s)


def test_a_checkpoint_of_two_iterations_uses_the_bubbles_of_both() -> None:
    """Check the bubbles at 12 to 14 and 16 to 17 too. 75 bytes beside them take the other 14 seconds, and 1 more."""
    assert BUBBLES.ends_s(Split(60, 0), 10.0, 5.0, iterations=2) == 17.0
    assert BUBBLES.ends_s(Split(0, 70), 10.0, 5.0, iterations=2) == 20.0
    assert BUBBLES.ends_s(Split(0, 75), 10.0, 5.0, iterations=2) == 21.0


def test_an_iteration_carries_more_where_links_are_free() -> None:
    assert BUBBLES.carried(10.0, 5.0) == 10.0 * 3 + 5.0 * 7
