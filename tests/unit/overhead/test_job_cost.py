"""Cost of saving in the whole job: ranks agree on it, and after a failure also for windows not measured yet."""

from __future__ import annotations

import pytest

from moevement_core.overhead.cap import Evidence
from moevement_core.overhead.job_cost import JobCost

NOTHING = Evidence(share=0.0, error=0.0, comparisons=0)


def summed(costs: list[JobCost], own: list[Evidence], saved_bytes: float) -> list[float]:
    reports = [cost.report(evidence, saved_bytes) for cost, evidence in zip(costs, own, strict=True)]
    return [sum(values) for values in zip(*reports, strict=True)]


def test_the_cost_is_the_mean_of_the_ranks_that_have_measured_it() -> None:
    costs = [JobCost() for _ in range(3)]
    sums = summed(costs, [Evidence(0.02, 0.004, 6), NOTHING, Evidence(0.04, 0.008, 10)], 100.0)
    assert {cost.learn(sums, has_failed=False) for cost in costs} == {Evidence(0.03, 0.006, 8)}


def test_the_cost_of_a_byte_stands_in_when_a_rank_has_failed() -> None:
    costs = [JobCost() for _ in range(2)]
    for cost in costs:
        cost.learn(summed(costs, [Evidence(0.04, 0.004, 6)] * 2, 100.0), has_failed=False)
    replaced = [costs[0], JobCost()]  # the second rank has failed, and its replacement knows nothing
    sums = summed(replaced, [NOTHING] * 2, 25.0)
    assert [cost.learn(sums, has_failed=False) for cost in replaced] == [None, None]
    expected = [cost.learn(sums, has_failed=True) for cost in replaced]
    assert expected[0] == expected[1]
    assert expected[0] is not None
    assert expected[0].share == pytest.approx(0.01), "a quarter of the bytes cost a quarter"


def test_nothing_is_known_at_first() -> None:
    cost = JobCost()
    assert cost.learn(summed([cost], [NOTHING], 5.0), has_failed=True) is None
