"""Quiet iterations follow from the age of the job alone, and become rarer."""

from __future__ import annotations

from itertools import pairwise

import pytest

from moevement_core.overhead.quiet import WARM_UP, is_quiet, spacing


def test_no_iteration_of_the_warm_up_is_quiet() -> None:
    assert not any(is_quiet(iteration, 0) for iteration in range(WARM_UP))
    assert is_quiet(WARM_UP, 0)


@pytest.mark.parametrize("began_at", [0, 1, 100, 12345])
def test_quiet_iterations_depend_on_the_age_of_the_job_alone(began_at: int) -> None:
    fresh = [age for age in range(600) if is_quiet(age, 0)]
    assert [age for age in range(600) if is_quiet(began_at + age, began_at)] == fresh


def test_quiet_iterations_become_rarer_and_never_follow_each_other() -> None:
    quiet = [iteration for iteration in range(1000) if is_quiet(iteration, 0)]
    gaps = [after - before for before, after in pairwise(quiet)]
    assert min(gaps) >= 4
    assert gaps[-1] == 16
    for iteration in quiet[30:-1]:
        assert iteration + spacing(iteration, 0) in quiet
