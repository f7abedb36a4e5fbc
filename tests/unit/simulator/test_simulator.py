"""Simulations agree with formulas, and have the properties that hold for any numbers."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moevement_cli.simulate import SCENARIOS
from moevement_core.errors import ConfigError
from moevement_core.planning.checkpoint_plan import CheckpointPlan
from moevement_core.policy.window import WindowKind
from moevement_core.simulator.costs import (
    STRATEGIES,
    CheckFreqCost,
    GeminiCost,
    MoCCost,
    MoEtionCost,
    MoEvementCost,
    Techniques,
)
from moevement_core.simulator.failures import Failure, FailureModel, mean_time_between, recorded
from moevement_core.simulator.pipeline import SimulatedPipeline
from moevement_core.simulator.scenario import load
from moevement_core.simulator.training import Spares, train
from tests.unit.simulator.jobs import costs, lost_state

HOURS = 3600.0


@given(stages=st.integers(1, 8), micro_batches=st.integers(1, 20), chunks=st.integers(1, 3))
@settings(max_examples=40, deadline=None)
def test_stages_that_are_alike_take_as_long_as_the_formula_says(stages: int, micro_batches: int, chunks: int) -> None:
    if chunks > 1:
        micro_batches *= stages
    pipeline = SimulatedPipeline((1.0,) * stages, (2.0,) * stages, micro_batches, chunks)
    assert pipeline.simulate() == pytest.approx(pipeline.closed_form(), rel=1e-9)


def test_a_pipeline_by_hand() -> None:
    """Compute two stages with two micro-batches by hand: F 1 and B 2, then F 2 and B 4, with sends of 1.

    Stage 1 gets its first tensor at 2 and works without a gap until 2 + 2 * 6 = 14. The gradient of the second
    micro-batch reaches stage 0 at 15, and its backward pass takes 2 more.
    """
    assert SimulatedPipeline((1.0, 2.0), (2.0, 4.0), 2, send_s=1.0).simulate() == 17.0


@given(
    times=st.lists(st.floats(0.1, 3), min_size=2, max_size=6), micro_batches=st.integers(1, 12), send_s=st.floats(0, 1)
)
@settings(max_examples=40, deadline=None)
def test_unequal_stages_are_between_the_slowest_alone_and_the_formula(
    times: list[float], micro_batches: int, send_s: float
) -> None:
    backward = tuple(2 * seconds for seconds in times)
    pipeline = SimulatedPipeline(tuple(times), backward, micro_batches)
    assert max(pipeline.part([stage]).simulate() for stage in range(len(times))) <= pipeline.simulate() * (1 + 1e-9)
    assert pipeline.simulate() <= pipeline.closed_form() * (1 + 1e-9)
    assert pipeline.simulate() <= SimulatedPipeline(tuple(times), backward, micro_batches, send_s=send_s).simulate() * (
        1 + 1e-9
    )


def test_schedules_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"\b7 micro-batches\b.*\b4\b.*\bstages\b"):
        SimulatedPipeline((1.0,) * 4, (1.0,) * 4, 7, chunks=2)
    with pytest.raises(ConfigError, match=r"\b2 forward\b.*\b1 backward\b"):
        SimulatedPipeline((1.0, 1.0), (1.0,), 2)


@pytest.mark.parametrize("name", list(STRATEGIES))
def test_without_failures_a_strategy_costs_its_overhead(name: str) -> None:
    """Check that formula and simulation agree to an iteration."""
    strategy = STRATEGIES[name](costs(), 1800.0)
    result = train(strategy, [], 100 * HOURS)
    assert result.ettr == pytest.approx(1 / (1 + strategy.overhead_s / 3.0), rel=1e-4)
    assert sum(result.lost_s.values()) + result.iterations * 3.0 == pytest.approx(100 * HOURS)


@pytest.mark.parametrize(
    "name", ["checkfreq", "gemini", "gemini-young-daly", "dense", "moevement", "moevement-all-stages"]
)
def test_formula_and_simulation_agree_for_a_poisson_process(name: str) -> None:
    """Compare within the confidence interval or 0.005, with recoveries much shorter than the time between failures."""
    mtbf_s = 2 * HOURS
    strategy = STRATEGIES[name](costs(), mtbf_s)
    model = FailureModel(mtbf_s, 16)
    ratios = [train(strategy, model.draw(100 * HOURS, seed), 100 * HOURS).ettr for seed in range(20)]
    error = 1.96 * statistics.stdev(ratios) / math.sqrt(len(ratios))
    assert statistics.fmean(ratios) == pytest.approx(strategy.analytic_ettr(mtbf_s), abs=max(error, 0.005))


@given(mtbf_s=st.floats(60, 1e5), seed=st.integers(0, 1000), name=st.sampled_from(list(STRATEGIES)))
@settings(max_examples=60, deadline=None)
def test_every_second_is_accounted_for(mtbf_s: float, seed: int, name: str) -> None:
    model = FailureModel(mtbf_s, 16, shape=0.7, together=0.2)
    result = train(STRATEGIES[name](costs(), mtbf_s), model.draw(4 * HOURS, seed), 4 * HOURS)
    assert 0 <= result.ettr <= 1
    assert result.during_recovery <= result.failures
    # Replayed iterations are counted once, where they were committed first.
    assert sum(result.lost_s.values()) + result.iterations * 3.0 == pytest.approx(4 * HOURS, rel=1e-6)


@given(d2h=st.floats(0.2, 5), more=st.floats(1, 4), mtbf_s=st.floats(600, 7200))
@settings(max_examples=30, deadline=None)
def test_more_bandwidth_never_hurts(d2h: float, more: float, mtbf_s: float) -> None:
    """Fix CheckFreq's interval. With more bandwidth it would choose a shorter one, which may cost more."""
    slow_costs, fast_costs = (costs(d2h=bandwidth, network=16 * bandwidth) for bandwidth in (d2h, d2h * more))
    interval = CheckFreqCost(slow_costs).interval
    fixed = [CheckFreqCost(job, interval).analytic_ettr(mtbf_s) for job in (slow_costs, fast_costs)]
    assert fixed[1] >= fixed[0] - 1e-9
    for name in ("gemini", "moc"):
        slow, fast = (
            STRATEGIES[name](costs(d2h=bandwidth, network=16 * bandwidth), mtbf_s) for bandwidth in (d2h, d2h * more)
        )
        assert fast.analytic_ettr(mtbf_s) >= slow.analytic_ettr(mtbf_s) - 1e-9
    slow, fast = (MoEvementCost(costs(d2h=bandwidth, network=16 * bandwidth)) for bandwidth in (d2h, d2h * more))
    assert fast.costs.plan.size <= slow.costs.plan.size


@pytest.mark.parametrize("kind", list(WindowKind))
def test_rollback_is_that_of_the_policy(kind: WindowKind) -> None:
    job = costs(kind=kind, window=4)
    strategy = MoEvementCost(job)
    lost = [strategy.rollback(committed, step / 50) for committed in range(1000, 1040) for step in range(50)]
    assert max(lost) <= job.plan.most_replayed
    assert statistics.fmean(lost) + 0.5 == pytest.approx(strategy.expected_rollback, abs=0.05)


@pytest.mark.parametrize(("kind", "wanted"), [(WindowKind.ALIGNED, {2, 3, 4, 5}), (WindowKind.ROLLING, {2, 3})])
def test_a_slot_that_arrives_early_shortens_the_rollback(kind: WindowKind, wanted: set[int]) -> None:
    """Check values computed by hand, for W 3 and a slot that arrives after a tenth of an iteration.

    Two replayed iterations make the state dense; aligned windows replay up to two more. A failure in the first tenth of
    an iteration finds one snapshot fewer, which may add one replayed iteration.
    """
    strategy = MoEvementCost(costs(kind=kind, window=3, d2h=50.0, network=400.0))
    assert 0 < strategy.arrival < 0.2
    assert {strategy.rollback(committed, into) for committed in range(90, 99) for into in (0.0, 0.5)} == wanted
    assert {strategy.rollback(committed, 0.5) for committed in range(90, 99)} == wanted - {max(wanted)}


def test_each_technique_makes_recovery_shorter() -> None:
    job = costs()
    whole = MoEvementCost(job)
    for without in (MoEvementCost(job, Techniques(is_local=False)), MoEvementCost(job, Techniques(skips_frozen=False))):
        assert whole.expected_recovery_s() < without.expected_recovery_s()
    assert 0 < whole.frozen_share < 1


def test_what_is_popular_stays_frozen_longest() -> None:
    even, skewed = costs(window=4), costs(window=4, skew=0.5)
    unordered = Techniques(reorders=False)
    assert MoEvementCost(even).frozen_share == pytest.approx(MoEvementCost(even, unordered).frozen_share)
    assert MoEvementCost(skewed).frozen_share > MoEvementCost(even).frozen_share
    assert MoEvementCost(skewed).frozen_share > MoEvementCost(skewed, unordered).frozen_share


def test_neighbouring_stages_replay_together() -> None:
    """Fail nodes 1 and 2, which belong to stages 0 and 1: a node has eight ranks and a stage sixteen.

    Neighbouring stages replay as one pipeline, with a bubble.
    """
    strategy = MoEvementCost(costs())
    single, apart, joint = (strategy.recover(lost_state(1000, nodes)) for nodes in ((1,), (1, 5), (1, 2)))
    assert single.convert_s == pytest.approx(apart.convert_s)
    assert joint.convert_s > single.convert_s
    assert joint.convert_s == pytest.approx(single.convert_s * 33 / 32, rel=1e-6)


def test_state_comes_from_storage_when_all_copies_are_lost() -> None:
    strategy = MoEvementCost(costs(replicas=1))
    assert not strategy.recover(lost_state(1000, (3, 5))).from_storage
    lost = strategy.recover(lost_state(1000, (3, 4)))
    assert lost.from_storage
    assert lost.replayed > strategy.recover(lost_state(1000, (3,))).replayed
    failures = [Failure(500.0, (3,)), Failure(502.0, (4,)), Failure(2000.0, (5,))]
    assert train(strategy, failures, HOURS).from_storage == 1, "the second comes before state is whole again"


def test_stages_with_copies_of_one_embedding_roll_back_together_as_in_a_live_job() -> None:
    """Use stages of two nodes with eight ranks each."""
    free, tied = costs(), costs(tied=True)
    assert free.plan.inputs.job.tied_stages == frozenset()
    assert tied.plan.inputs.job.tied_stages == {0, 7}
    assert free.placement.segments((0,)) == [{0}]
    assert tied.placement.segments((0,)) == [{0, 7}]
    assert tied.placement.segments((4,)) == [{2}]


def test_copies_are_where_a_live_job_would_place_them() -> None:
    even, uneven = costs(replicas=2), costs(replicas=1, ranks=120, stages=8)
    assert all(
        held == {frozenset({(node + 1) % 16, (node + 2) % 16})} for node, held in enumerate(even.placement.copies)
    )
    assert uneven.plan.inputs.nodes == 15
    assert not even.placement.copies_survive((3, 4, 5))
    assert even.placement.copies_survive((3, 4, 6))
    assert costs(replicas=0).placement.copies_survive(())
    assert not costs(replicas=0).placement.copies_survive((1,))


def test_moetion_saves_what_both_budgets_carry() -> None:
    """Check values by hand: 4 layers of 8 experts of 96 MB full state, 577 MB of other state, iterations of 3 s."""
    for d2h, saved in ((0.3, 1), (0.5, 2), (0.6, 3), (1.0, 6), (2.0, 8)):
        strategy = MoEtionCost(costs(d2h=d2h, network=64.0))
        assert strategy.experts_saved == saved, d2h
        assert strategy.overhead_s == pytest.approx(max(0.0, (577e6 + 4 * saved * 96e6) / d2h / 1e9 - 3.0), abs=0.01)
    few, many, every, skewed = (
        MoEtionCost(costs(d2h=bandwidth, network=64.0, skew=skew)).risks.peer_risk
        for bandwidth, skew in ((0.6, 0.0), (1.0, 0.0), (2.0, 0.0), (0.6, 0.5))
    )
    assert few > many > every == 0
    assert skewed < few, "the popular ones are saved first"


def test_slowing_by_copies_is_counted_for_all() -> None:
    for name in ("checkfreq", "gemini", "moc", "moetion", "moevement"):
        job = costs(d2h=4.0, network=256.0)
        hidden = STRATEGIES[name](job, 1800.0)
        slowed = STRATEGIES[name](replace(job, interference=0.2), 1800.0)
        assert slowed.overhead_s > hidden.overhead_s
        assert slowed.analytic_ettr(1800.0) < hidden.analytic_ettr(1800.0)


def test_copies_to_peers_slow_training_in_proportion_to_what_they_take_of_links() -> None:
    hidden = costs(d2h=4.0, network=256.0)
    plan = CheckpointPlan(replace(hidden.plan.inputs, contention=0.5, window=2, period=2))
    contended = replace(hidden, plan=plan)
    for name in ("gemini", "moc", "moevement", "redo"):
        strategy = STRATEGIES[name](contended, 1800.0)
        sent_s = plan.inputs.replicas * strategy.sent_bytes * plan.inputs.cluster.gpus_per_node / 256e9
        slowed_s = strategy.costs.slowed_s(strategy.copied_bytes, strategy.sent_bytes)
        assert slowed_s == pytest.approx(0.5 * sent_s), name
        assert strategy.overhead_s >= slowed_s > 0, name
    assert CheckFreqCost(contended).sent_bytes == 0, "what is written to storage does not go to peers"


@pytest.mark.parametrize("name", ["moevement", "redo"])
def test_windows_that_rest_cost_less_in_an_iteration_and_more_after_a_failure(name: str) -> None:
    hidden = costs(d2h=4.0, network=256.0)
    often, rarely = (
        STRATEGIES[name](
            replace(hidden, plan=CheckpointPlan(replace(hidden.plan.inputs, window=2, period=period))), 1e4
        )
        for period in (2, 12)
    )
    assert rarely.sent_bytes == pytest.approx(often.sent_bytes / 6)
    assert rarely.expected_rollback > often.expected_rollback
    lost = [[strategy.rollback(committed, 0.5) for committed in range(100, 124)] for strategy in (often, rarely)]
    assert max(lost[1]) - min(lost[1]) == 11, "as many iterations as there are from one window to the next"
    assert sum(lost[1]) > sum(lost[0])


def test_twelve_hours_of_a_large_job_are_a_matter_of_milliseconds() -> None:
    """Count instead of timing: the simulation records one entry per failure, not per rank or iteration."""
    scenario = load(SCENARIOS / "deepseek_671b.yaml")
    strategy = STRATEGIES["moevement"](scenario.costs(), 600.0)
    result = train(strategy, scenario.draws()[-1].failures[0], scenario.until_s)
    assert scenario.job.ranks == 16384
    assert result.failures > 40
    assert len(result.goodput) == result.failures + 1


def test_gemini_has_one_cost_whether_its_interval_is_chosen_or_given() -> None:
    slow = costs(network=2.0)
    chosen = GeminiCost(slow, 600.0)
    fixed = GeminiCost(slow, 600.0, interval=chosen.interval)
    assert (chosen.overhead_s, chosen.expected_recovery_s()) == (fixed.overhead_s, fixed.expected_recovery_s())
    assert all(
        GeminiCost(slow, 600.0, interval=interval).analytic_ettr(600.0) <= chosen.analytic_ettr(600.0)
        for interval in range(1, 200)
    )
    stalling = GeminiCost(slow, 600.0, interval=chosen.interval, is_spread=False)
    assert stalling.overhead_s > chosen.overhead_s, "beside one iteration less of it hides"


def test_a_failure_during_a_recovery_begins_it_again() -> None:
    """Check values computed by hand: W 2, almost no lag, a regroup of 10 s, and a second failure after another 5 s."""
    job = costs(window=2, regroup_s=10.0)
    single = train(MoEvementCost(job), [Failure(300.0, (0,))], 600.0)
    double = train(MoEvementCost(job), [Failure(300.0, (0,)), Failure(305.0, (1,))], 600.0)
    assert (double.failures, double.during_recovery) == (2, 1)
    assert double.lost_s["detect"] == pytest.approx(single.lost_s["detect"] + 1.0)
    assert double.lost_s["regroup"] == pytest.approx(single.lost_s["regroup"] + 4.0)
    for part in ("convert", "catch up"):
        assert double.lost_s[part] == pytest.approx(single.lost_s[part])
    assert single.iterations - double.iterations in (1, 2)


def test_spares_run_out_and_come_back() -> None:
    failures = [Failure(at, (0,)) for at in (100.0, 1000.0)]
    with_one = train(MoEvementCost(costs()), failures, 4000.0, Spares(1, repair_s=2000.0))
    assert with_one.lost_s["no spare"] == pytest.approx(1100.0), "the first node is back at 2100"
    assert train(MoEvementCost(costs()), failures, 4000.0, Spares(2)).lost_s["no spare"] == 0
    never = train(MoEvementCost(costs()), failures, 4000.0, Spares(1))
    assert never.lost_s["no spare"] == pytest.approx(2999.0), "from the second failure, once noticed, to the end"


def test_moc_loses_updates_and_saves_more_experts_for_it() -> None:
    strategy = MoCCost(costs())
    result = train(strategy, FailureModel(200.0, 16).draw(12 * HOURS, 1), 12 * HOURS)
    assert result.tokens_lost > 0
    assert result.losses[-1].experts_saved > 1
    assert strategy.experts_saved == 1


def test_no_token_is_lost_twice_in_moc() -> None:
    """Check ages by hand: one of eight experts in each snapshot; the second failure comes two iterations later."""
    strategy = MoCCost(costs()).fresh(10_000)
    assert strategy.ages(100).tolist() == [4, 3, 2, 1, 0, 7, 6, 5]
    assert strategy.recover(lost_state(100)).tokens_lost == pytest.approx(28 / 8)
    assert strategy.ages(102).tolist() == [2, 2, 2, 2, 2, 1, 0, 2]
    assert strategy.recover(lost_state(102)).tokens_lost == pytest.approx(13 / 8)


@pytest.mark.parametrize(
    ("run_iterations", "is_length_known", "saved"), [(1000, True, 1), (200, True, 2), (1000, False, 4), (100, True, 4)]
)
def test_the_policy_of_a_live_job_decides_how_many_experts_moc_saves(
    run_iterations: int, is_length_known: bool, saved: int
) -> None:
    """Check K by hand: 3.5 lost iterations of 1,000, 200 or 100 are 0.35%, 1.75% and 3.5%; steps are of 1.25%."""
    strategy = MoCCost(costs(), is_length_known=is_length_known).fresh(run_iterations)
    recovery = strategy.recover(lost_state(100))
    assert recovery.experts_saved == strategy.experts_saved == saved
    assert saved == strategy.dynamic.after(1, 3.5 / (run_iterations if is_length_known else 100))
    assert MoCCost(costs(), limit=1.0).recover(lost_state(100)).experts_saved == 1


def test_a_training_records_lost_updates_after_each_failure() -> None:
    strategy = MoCCost(costs())
    result = train(strategy, [Failure(300.0, (0,)), Failure(1500.0, (1,))], 6000.0)
    first, second = (committed for _, committed in result.goodput[:2])
    assert [losses.at_s for losses in result.losses] == [300.0, 1500.0]
    lost = [sum((committed - turn) % 8 for turn in range(8)) / 8 for committed in (first, second)]
    assert [losses.lost for losses in result.losses] == pytest.approx([lost[0], sum(lost)])
    assert result.losses[1].of_run == pytest.approx(sum(lost) / (6000 / 3.0))
    assert result.losses[1].so_far == pytest.approx(sum(lost) / second)
    assert [losses.experts_saved for losses in result.losses] == [1, 1]
    assert result.tokens_lost == result.losses[-1].lost
    assert train(MoEvementCost(costs()), [Failure(300.0, (0,))], 6000.0).losses == []


def test_failures_are_drawn_as_asked() -> None:
    for shape in (1.0, 0.6):
        drawn = FailureModel(600.0, 16, shape).draw(2000 * HOURS, 3)
        assert mean_time_between(drawn, 2000 * HOURS) == pytest.approx(600.0, rel=0.05)
    assert FailureModel(600.0, 16).draw(HOURS, 3) == FailureModel(600.0, 16).draw(HOURS, 3)
    together = FailureModel(600.0, 16, together=0.5).draw(500 * HOURS, 4)
    assert statistics.fmean(len(failure.nodes) for failure in together) == pytest.approx(2.0, rel=0.1)
    with pytest.raises(ConfigError, match=r"\bmtbf 0\.0\b.*\b0\b"):
        FailureModel(0.0, 1)


def test_recorded_failures_of_a_moment_are_one(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("0,add,a\n0,add,b\n5000,remove,a\n5000,remove,b\n9000,remove,a\n")
    assert recorded(trace, 4) == [Failure(5.0, (0, 1)), Failure(9.0, (0,))]
