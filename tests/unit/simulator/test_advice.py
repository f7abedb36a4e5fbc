"""Advice and its table use one model: the same failures, spares and copies, and every strategy is tuned alike."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as drawn

from moevement_core.planning.checkpoint_plan import CheckpointPlan
from moevement_core.policy.window import WindowKind
from moevement_core.simulator.advice import Advice, Fixed, Variants, advise, fits, is_candidate
from moevement_core.simulator.costs import STRATEGIES, Costs
from moevement_core.simulator.experiment import Cell, Draws, run
from moevement_core.simulator.failures import FailureModel
from moevement_core.simulator.training import Spares
from tests.unit.simulator.jobs import costs

SEEDS = 3
EXACT = [name for name in STRATEGIES if name not in ("none", "moc", "moetion")]


def draws_of(job: Costs, mtbf_s: float, until_s: float, together: float = 0.0) -> Draws:
    """Return the failures of a few training runs."""
    model = FailureModel(mtbf_s, job.plan.inputs.nodes, together=together)
    return Draws(mtbf_s, tuple(model.draw(until_s, seed) for seed in range(SEEDS)), together)


def asked(
    job: Costs, mtbf_s: float, spares: Spares, *, hours: float = 6.0, together: float = 0.0, fixed: Fixed | None = None
) -> tuple[list[Cell], Advice]:
    """Return a table with every strategy, and the advice beside it."""
    draws = draws_of(job, mtbf_s, hours * 3600, together)
    cells = run(job, EXACT, [draws], hours * 3600, spares)
    return cells, advise(Variants(job), draws, hours * 3600, spares, cells, fixed)


def with_memory(job: Costs, nbytes: float | None) -> Costs:
    """Return the job on nodes with ``nbytes`` of host memory."""
    plan_input = job.plan.inputs
    cluster = replace(plan_input.cluster, host_memory_bytes=nbytes)
    return replace(job, plan=CheckpointPlan(replace(plan_input, cluster=cluster)))


@settings(max_examples=4, deadline=None, derandomize=True)
@given(
    ranks=drawn.sampled_from([32, 64, 256]),
    stages=drawn.sampled_from([1, 2, 8]),
    replicas=drawn.integers(0, 3),
    kind=drawn.sampled_from(WindowKind),
    d2h=drawn.sampled_from([0.5, 5.0, 50.0]),
    network=drawn.sampled_from([0.5, 8.0, 400.0]),
    storage=drawn.sampled_from([0.01, 1.0]),
    iteration_s=drawn.sampled_from([0.3, 3.0, 30.0]),
    mtbf_s=drawn.sampled_from([200.0, 1800.0, 30_000.0]),
    together=drawn.sampled_from([0.0, 0.4]),
    spares=drawn.sampled_from([Spares(), Spares(0), Spares(1, 3600.0)]),
    memory=drawn.sampled_from([None, 1e9, 60e9]),
)
def test_advice_is_no_worse_than_a_row_of_the_table_beside_it(
    ranks: int, stages: int, replicas: int, kind: WindowKind, d2h: float, network: float, storage: float,
    iteration_s: float, mtbf_s: float, together: float, spares: Spares, memory: float | None,
) -> None:  # fmt: skip
    job = with_memory(
        costs(
            ranks=ranks, stages=stages, replicas=replicas, kind=kind, d2h=d2h, network=network, storage=storage,
            iteration_s=iteration_s,
        ),
        memory,
    )  # fmt: skip
    cells, advice = asked(job, mtbf_s, spares, together=together)
    rows = [cell for cell in cells if is_candidate(cell.strategy)]
    best = advice.best
    assert best.ettr >= max((row.ettr for row in rows if fits(row.strategy) or not best.fits), default=0.0)
    assert [choice.ettr for choice in advice.choices if choice.fits] == sorted(
        (choice.ettr for choice in advice.choices if choice.fits), reverse=True
    )
    for choice in advice.choices:
        assert [outcome.failures for outcome in choice.cell.outcomes] == [
            outcome.failures for outcome in cells[0].outcomes
        ]
        assert choice.copies == (replicas if choice.strategy.in_memory else 0)
        assert math.isfinite(choice.lost_a_month)
    if advice.next_best is not None and advice.next_best.fits == best.fits:
        assert advice.gain[0] >= 0


def test_a_table_row_of_every_family_is_tuned_in_the_advice() -> None:
    cells, advice = asked(costs(network=4.0), 1800.0, Spares())
    listed = {cell.strategy.name: cell.ettr for cell in cells}
    tuned = {choice.strategy.name.split("-")[0]: choice.ettr for choice in advice.choices}
    assert set(tuned) == {"moevement", "redo", "gemini", "checkfreq", "dense"}
    for name, ettr in tuned.items():
        assert ettr >= listed[name]


def test_spares_that_run_out_are_lost_in_the_advice_too() -> None:
    plenty, scarce = (asked(costs(), 3600.0, spares, hours=24)[1].best.ettr for spares in (Spares(), Spares(1)))
    assert scarce < 0.5 < plenty


def test_more_copies_are_lost_less_often_and_are_shown_beside_the_proposal() -> None:
    _, alone = asked(costs(), 600.0, Spares())
    _, together = asked(costs(), 600.0, Spares(), together=0.4)
    assert alone.best.copies == together.best.copies == 2
    for advice in (alone, together):
        assert [choice.copies for choice in advice.by_copies] == [1, 2, 3]
        losses = [choice.lost_a_month for choice in advice.by_copies]
        assert losses == sorted(losses, reverse=True)
    assert together.best.lost_a_month > 100 * alone.best.lost_a_month


def test_with_much_bandwidth_the_window_is_short() -> None:
    windows = []
    for job in (costs(d2h=50.0, network=800.0), costs(d2h=0.5, network=16.0)):
        _, advice = asked(job, 1800.0, Spares())
        (sparse,) = (choice for choice in advice.choices if choice.strategy.name.startswith("moevement"))
        windows.append(sparse.strategy.costs.plan.size)
    assert windows[0] == 1 < windows[1]


@pytest.mark.parametrize("kind", list(WindowKind))
def test_what_is_fixed_is_not_chosen(kind: WindowKind) -> None:
    _, advice = asked(costs(kind=kind, window=5), 1800.0, Spares(), fixed=Fixed(kind, 5))
    (sparse,) = (choice for choice in advice.choices if choice.strategy.name.startswith("moevement"))
    assert (sparse.strategy.costs.plan.size, sparse.strategy.costs.plan.inputs.kind) == (5, kind)
    assert f"--moevement-window 5 --moevement-window-kind {kind}" in sparse.flags


def test_what_does_not_fit_into_host_memory_is_not_proposed() -> None:
    tight = with_memory(costs(), 1e9)
    cells, advice = asked(tight, 1800.0, Spares())
    assert not any(fits(cell.strategy) for cell in cells if cell.strategy.name == "moevement")
    assert advice.best.fits == any(choice.fits for choice in advice.choices)
    assert not advice.best.fits or not advice.best.is_sparse
