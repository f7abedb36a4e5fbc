"""Iteration to which a job rolls back after a loss spike, and what it leaves out from then on."""

from __future__ import annotations

import pytest

from moevement_core.saving.rollback import RollbackDecision
from moevement_core.storage.config import RollbackConfig


@pytest.mark.parametrize(
    ("by", "restorable", "restores"),
    [
        (None, (20, 39, 40, 41), 39),
        (1, (20, 30), 30),
        (10, (20, 30, 31, 39), 30),
        (10, (35, 37), 35),  # no window is far enough back
        (10, (40, 45), None),
        (1, (), None),
    ],
)
def test_the_newest_window_that_is_far_enough_back_is_restored(
    by: int | None, restorable: tuple[int, ...], restores: int | None
) -> None:
    assert RollbackConfig(on_spike=2.0, by=by).choose(restorable, 40) == restores


def test_windows_of_the_iterations_that_a_job_leaves_do_not_count() -> None:
    rollback = RollbackDecision(spiked=40, restores=32, start="abc.1", reason="spiked")
    assert list(rollback.left_out) == list(range(33, 41))
    assert rollback.is_undone("abc", 35)
    assert rollback.is_undone("abc.1", 41)
    assert not rollback.is_undone("abc.1", 32)
    assert not rollback.is_undone("abc.2", 41)
