"""Monthly costs: compared strategies have the same failures, spares cost GPU hours, and a failure rate breaks even."""

from __future__ import annotations

import contextlib
import io
import json
import math
import re

import pytest

from moevement_cli.main import main
from moevement_core.simulator.costs import GeminiCost, MoEvementCost
from moevement_core.simulator.experiment import Draws, cell_of
from moevement_core.simulator.failure_rate import mean_time_between_failures_s
from moevement_core.simulator.failures import Failure, FailureModel
from moevement_core.simulator.training import Spares, train
from moevement_core.simulator.worth import LEAST_SHARE, MONTH_H, Worth, lost_share, worth
from tests.unit.simulator.jobs import costs

MONTH_S = MONTH_H * 3600
JOB = ["advise", "qwen3_30b_a3b", "--seeds", "1"]


def months(mtbf_s: float, *, every: int | None = None, spares: int | None = None, restart_s: float = 600.0) -> Worth:
    """Return the costs of months of a job on 128 GPUs."""
    job = costs(storage=1.0)
    model = FailureModel(mtbf_s, job.plan.inputs.nodes)
    draws = Draws(mtbf_s, tuple(model.draw(MONTH_S, seed) for seed in range(3)))
    return worth(job, draws, restart_s=restart_s, every=every, spares=spares, repair_s=86_400.0)


def test_a_job_that_seldom_fails_does_not_need_it_and_one_that_often_does_saves() -> None:
    seldom, often = months(2000 * 3600.0), months(2 * 3600.0, restart_s=1800.0)
    assert not seldom.pays
    assert often.pays
    assert often.saved_h > LEAST_SHARE * 128 * MONTH_H > seldom.saved_h
    assert seldom.strategies[0].spares == 0
    for result in (seldom, often):
        assert [option.total_h for option in result.strategies] == sorted(
            option.total_h for option in result.strategies
        )
        assert [option.total_h for option in result.today] == sorted(option.total_h for option in result.today)
        assert result.mtbf_s <= result.break_even_s or not result.pays


def test_every_gpu_hour_is_accounted_for() -> None:
    result = months(6 * 3600.0, every=300, spares=2)
    for option in (*result.today, *result.strategies):
        # The work of a month's last iteration counts as lost, because it was not committed.
        assert option.saving_h + option.failing_h + option.spares_h == pytest.approx(option.total_h, abs=0.1 * 128)
        assert option.spares_h == (2 * 8 * MONTH_H if option in result.strategies else 0)
    assert {option.strategy.interval for option in result.today if option.has_user_interval} == {300}
    best = {option.name: option.total_h for option in result.today if not option.has_user_interval}
    for option in result.today:
        if option.has_user_interval:
            assert best[option.name.partition(",")[0]] <= 1.05 * option.total_h


def test_a_node_that_the_scheduler_gives_is_no_new_spare() -> None:
    """Fail twice without spares: each failure waits for the scheduler, however soon the first node is repaired."""
    strategy = MoEvementCost(costs(window=2))
    failures = [Failure(1000.0, (0,)), Failure(50_000.0, (0,))]
    waited = [
        train(strategy, failures, 100_000.0, spares).lost_s["no spare"]
        for spares in (Spares(0, 20_000.0, 600.0), Spares(1, 20_000.0, 600.0), Spares(1, 80_000.0, 600.0))
    ]
    assert waited == [1200.0, 0.0, 600.0]


@pytest.mark.parametrize("count", [0, 1, 3])
def test_the_formula_for_spares_agrees_with_trainings(count: int) -> None:
    job = costs()
    strategy, mtbf_s, pool = GeminiCost(job, 20_000.0, interval=4), 20_000.0, Spares(count, 40_000.0, 600.0)
    model = FailureModel(mtbf_s, job.plan.inputs.nodes)
    draws = Draws(mtbf_s, tuple(model.draw(10 * MONTH_S, seed) for seed in range(4)))
    simulated = 1 - cell_of(strategy, draws, 10 * MONTH_S, pool).ettr + count * 8 / 128
    assert lost_share(strategy, mtbf_s, pool) == pytest.approx(simulated, rel=0.1)


def test_break_even_is_where_the_saving_is_the_least_that_counts() -> None:
    result = months(6 * 3600.0, restart_s=1800.0)
    assert math.isfinite(result.break_even_s)
    sooner, later = months(result.break_even_s / 4, restart_s=1800.0), months(4 * result.break_even_s, restart_s=1800.0)
    assert (sooner.pays, later.pays) == (True, False)


def test_the_command_states_its_assumptions_and_its_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*JOB, "--save-every", "500", "--json"]) == 0
    out = capsys.readouterr().out
    report = json.loads(out.splitlines()[-1])
    assert report["mtbf_s"] == mean_time_between_failures_s(256) == pytest.approx(198 * 3600, rel=0.01)
    assert report["pays"] is False
    assert "2407.21783" in out
    assert re.search(r"\b500\b", out)
    assert sorted(set(re.findall(r"assumed, (--[a-z]+)", " ".join(out.split())))) == [
        "--contention", "--detect", "--interference", "--regroup", "--repair", "--restart",
    ]  # fmt: skip


CHANGES = (
    "--mtbf 50h", "--save-every 40", "--restart 1h", "--spares 3", "--spares 1 --repair 1h", "--iteration-time 9s",
    "--ranks 512", "--copy-bandwidth 3", "--d2h-bandwidth 1", "--host-memory 30", "--replicas 1", "--keep-own never",
    "--storage-bandwidth 1", "--detect 30s", "--regroup 2m", "--interference 0.5", "--contention 0.5",
    "--cluster moevement-h100",
)  # fmt: skip


@pytest.fixture(scope="module")
def unchanged() -> str:
    """Return the costs of the job, as JSON."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        assert main([*JOB, "--json"]) == 0
    return output.getvalue().splitlines()[-1]


@pytest.mark.parametrize("words", CHANGES)
def test_no_option_changes_nothing(words: str, unchanged: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*JOB, *words.split(), "--json"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] != unchanged


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("--window 3", "--window"), ("--window-kind rolling", "--window-kind"), ("--save-every 0", "--save-every"),
        ("--restart x", "'x'"), ("--protection parity:4+1", "copies:R"), ("--mtbf 1e-3", "mtbf"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_one_line(words: str, named: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([*JOB, *words.split()])
    (line,) = capsys.readouterr().err.splitlines()
    assert named in line
