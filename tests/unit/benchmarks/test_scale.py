"""Costs and planners of jobs with thousands of ranks: no cost grows faster than its class, and pages are up to date."""

from __future__ import annotations

import pytest

from benchmarks import scale, scale_costs, scale_vote
from benchmarks.scale_costs import COSTS, Cost, Growth
from benchmarks.scale_planners import PLANNERS
from tests.unit.growth import assert_linear

MOST = {Growth.CONSTANT: 1.0, Growth.LOG: 1.5, Growth.STAGE: 4.2, Growth.LINEAR: 4.4}
"""Largest accepted ratio of a cost with 4 N ranks and with N ranks. Numbers of ranks get longer, so ratios exceed 4."""


@pytest.mark.parametrize("cost", COSTS, ids=lambda cost: f"{cost.when}: {cost.text}")
def test_no_cost_grows_faster_than_its_class(cost: Cost) -> None:
    assert cost.of(16_384) / cost.of(4096) <= MOST[cost.growth]


@pytest.mark.parametrize("name", PLANNERS)
def test_planners_take_time_linear_in_the_ranks(name: str) -> None:
    assert_linear(PLANNERS[name], 2048)


def test_the_page_of_costs_is_what_its_script_writes() -> None:
    assert scale_costs.OUTPUT.read_text(encoding="utf-8") == scale_costs.report()


@pytest.mark.builds
def test_real_members_start_lose_their_connections_and_recover(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scale, "STEADY_S", 0.5)
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "ERROR")
    figures = scale.measure(16, lease_s=2.0)
    assert figures.ranks == 16
    assert min(figures.start_s, figures.herd_s, figures.recovery_s, figures.takeover_s) > 0
    vote = scale_vote.measure_vote(3)
    assert min(vote.seconds, vote.cpu_s) > 0
    assert "| 16 |" in scale.report([figures], [vote], {"plan": [0.1, 0.2, 0.3]})
