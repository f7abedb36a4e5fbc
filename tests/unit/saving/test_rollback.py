"""Iteration to which a job rolls back after a loss spike, and what it leaves out from then on."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moevement_core.saving.rollback import RollbackDecision


@pytest.mark.parametrize(
    ("by", "restorable", "restores"),
    [
        (2, (20, 38, 39, 40, 41), 38),
        (2, (20, 30), 30),
        (10, (20, 30, 31, 38), 30),
        (10, (35, 37), 35),  # no window is far enough back
        (10, (39, 45), None),  # the loss of iteration 40 is that of state 39
        (2, (), None),
    ],
)
def test_the_newest_window_that_is_far_enough_back_is_restored(
    by: int, restorable: tuple[int, ...], restores: int | None
) -> None:
    assert RollbackDecision(spiked=40, by=by, start="abc", reason="spiked").choose(restorable) == restores


def test_windows_of_the_iterations_that_a_job_leaves_do_not_count() -> None:
    decision = RollbackDecision(spiked=40, by=2, start="abc.1", reason="spiked")
    assert not decision.left_out
    assert not decision.is_undone("abc.1", 41)
    decision = replace(decision, restores=32)
    assert list(decision.left_out) == list(range(33, 41))
    assert decision.is_undone("abc", 35)
    assert decision.is_undone("abc.1", 41)
    assert not decision.is_undone("abc.1", 32)
    assert not decision.is_undone("abc.2", 41)
