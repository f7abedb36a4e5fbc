"""Simulated cost of kills in a job whose windows changed."""

from __future__ import annotations

import pytest

from moevement_cli.ettr_failures import INTO, Kill, WindowPhase, lost_s
from moevement_cli.simulate import SCENARIOS
from moevement_core.simulator.costs import CheckFreqCost, Costs, DenseCost, MoEvementCost
from moevement_core.simulator.scenario import load


@pytest.fixture(scope="module")
def costs() -> Costs:
    return load(SCENARIOS / "laptop.yaml").costs()


def cost(phases: list[WindowPhase], *kills: tuple[int, float]) -> float:
    return lost_s(phases, [Kill(committed, at_s, (1,)) for committed, at_s in kills])


def replayed(costs: Costs, phases: list[WindowPhase], committed: int) -> float:
    """Return the number of iterations that a job with CheckFreq repeats after a kill."""
    strategy = phases[-1].strategy
    fixed_s = costs.detect_s + costs.regroup_s + strategy.fetch_s + INTO * costs.iteration_s
    return (cost(phases, (committed, 10.0)) - fixed_s) / strategy.replay_iteration_s((1,))


def test_a_kill_repeats_the_iterations_since_the_newest_checkpoint_of_any_phase(costs: Costs) -> None:
    often, rarely = CheckFreqCost(costs, 4), CheckFreqCost(costs, 50)
    assert often.arrival < 4
    assert replayed(costs, [WindowPhase(0, rarely)], 47) == pytest.approx(47)
    assert replayed(costs, [WindowPhase(0, often)], 47) < 8
    assert replayed(costs, [WindowPhase(0, often), WindowPhase(40, rarely)], 47) == pytest.approx(7)
    assert 0 < replayed(costs, [WindowPhase(0, rarely), WindowPhase(42, often)], 47) <= 5


def test_a_checkpoint_counts_from_its_arrival_on_whichever_phase_it_is_of(costs: Costs) -> None:
    slow = DenseCost(costs, 10, stall_s=0.0, arrival=8, fetch_s=1.0)
    phases = [WindowPhase(0, slow), WindowPhase(48, slow)]
    assert [replayed(costs, phases, committed) for committed in (48, 60)] == pytest.approx([8, 12])
    assert replayed(costs, phases, 55) == pytest.approx(15), "the checkpoint of 48 is still on its way"


def test_a_job_without_a_complete_window_goes_back_to_its_start(costs: Costs) -> None:
    windows = MoEvementCost(costs)
    at_start, later = (cost([WindowPhase(0, windows)], (committed, 10.0)) for committed in (0, costs.plan.size - 1))
    assert 0 < at_start < later


def test_a_kill_during_a_recovery_begins_it_anew(costs: Costs) -> None:
    phases = [WindowPhase(0, CheckFreqCost(costs, 4))]
    alone = cost(phases, (20, 10.0))
    assert cost(phases, (20, 10.0), (20, 10.1)) == pytest.approx(alone + 0.1)
    assert cost(phases, (20, 10.0), (20, 10.0 + 2 * alone)) == pytest.approx(2 * alone)
    assert cost(phases) == 0.0
