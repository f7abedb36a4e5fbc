"""Costs and losses of the jobs of ``moevement bench ettr``, and the page of ``benchmarks.ettr``."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.ettr import RATES, STRATEGIES, Measuring, kills, write
from benchmarks.ettr_page import CAP, Halved, Jobs, page
from benchmarks.ettr_results import Planned, Results
from moevement_cli.ettr_samples import (
    FREE,
    HEADER,
    NEVER,
    JobSample,
    SavingCost,
    _killed_at,
    _lost_s,
    _mean_cost,
    ettr_of,
    rows_of,
    saving_costs,
)
from moevement_cli.killed_job import KilledJob
from moevement_core.run.run_record import RunRecord
from moevement_core.simulator.experiment import half_interval
from moevement_core.simulator.failures import Failure

MTBF_S = 25.0


def sample(strategy: str, *lost_s: float, overhead: float | None = 0.02) -> JobSample:
    """Return the sample of a job of 60 iterations of 0.5 s, with a failure for each time in ``lost_s``."""
    parts = {"notice": 0.1, "regroup": 0.6, "run again": 0.9} if lost_s else {}
    return JobSample(
        strategy, f"{MTBF_S:g} s" if lost_s else NEVER, MTBF_S if lost_s else None, 1, 30.0 + sum(lost_s), 60,
        [(10.0, [1])] * len(lost_s), 3 * len(lost_s), parts, 0.5, 26, 100.0, 8.0, 0,
        0.0, 2.5, "equal", [(0.0, 1)], [(1, 3.0)],
        snapshots=3, overhead=overhead, overhead_low=0.01, overhead_high=0.03, lost_s=list(lost_s),
    )  # fmt: skip


def commits(*pairs: tuple[int, float]) -> list[dict[str, Any]]:
    return [{"iteration": iteration, "time": time} for iteration, time in pairs]


def test_a_failure_takes_from_the_commit_before_it_to_the_next_new_one() -> None:
    lines = commits((1, 1.0), (2, 2.0), (3, 7.0), (4, 8.0))
    assert _lost_s(lines, [2.5], 1.0) == [4.0]
    assert _lost_s(lines, [], 1.0) == []


def test_iterations_that_are_committed_again_are_lost_too() -> None:
    lines = commits((1, 1.0), (2, 2.0), (1, 4.0), (2, 5.0), (3, 6.0))
    assert _lost_s(lines, [2.5], 1.0) == [3.0]


def test_failures_that_meet_are_one_loss_and_one_after_the_end_is_none() -> None:
    lines = commits((1, 1.0), (2, 2.0), (3, 9.0), (4, 10.0))
    assert _lost_s(lines, [2.5, 5.0, 11.0], 1.0) == [6.0]


def test_kills_have_the_iteration_before_them(tmp_path: Path) -> None:
    job = KilledJob(RunRecord(tmp_path), began_at=100.0, kills=[Failure(at_s, (1,)) for at_s in (0.5, 2.5, 9.0)])
    lines = [{"time": 100.0 + second, "iteration": 2 * second} for second in (1, 2, 3, 4)]
    assert _killed_at(job, lines) == [0, 4, 8]
    assert _killed_at(replace(job, kills=[]), lines) == []


def test_what_saving_costs_is_measured_where_nobody_is_disturbed() -> None:
    samples = [sample(FREE, overhead=None), sample("dense"), sample("dense", 5.0, overhead=0.4), sample("moc", 5.0)]
    shares = {name: cost.share for name, cost in saving_costs(samples).items()}
    assert shares == {FREE: 0.0, "dense": 0.02, "moc": 0.02}
    assert saving_costs([sample("dense", overhead=-0.01)])["dense"].share == 0.0
    assert saving_costs([sample("dense", overhead=None)]) == {}


def test_ettr_is_what_failures_leave_over_what_saving_costs() -> None:
    samples = [sample("dense", 5.0, 5.0), sample("dense", 10.0)]
    known = SavingCost(0.25, 0.0)
    ettr = ettr_of(samples, known)
    assert ettr.mean == pytest.approx(30 / 40 / 1.25)
    assert ettr.half == pytest.approx(half_interval([5.0, 5.0, 10.0]) * 3 / 80 / 1.25)
    assert math.isnan(ettr_of(samples[1:], known).half), "one failure says nothing of others"
    assert ettr_of(samples, SavingCost(0.25, 0.1)).half > ettr.half
    assert ettr_of([sample("dense")], SavingCost(0.0, 0.01)).half == pytest.approx(0.01)


def test_a_row_has_every_column() -> None:
    (row,) = rows_of([sample("moevement", 5.0, 6.0)])
    shown = dict(zip(HEADER, row, strict=True))
    assert (shown["interval"], shown["kills"], shown["overhead"]) == ("3 of 26", "2", "2.0% (1.0% to 3.0%)")


@pytest.fixture
def jobs() -> Jobs:
    free = sample(FREE, overhead=None)
    samples = [
        free, sample("moevement"), sample("moevement-redo"), sample("dense"),
        sample("moevement", 2.0, 2.1), sample("moevement-redo", 1.0, 1.1), sample("dense", 9.0, 9.1),
    ]  # fmt: skip
    halved = Halved("moevement", 26, 0.02, 0.01, 0.03, 52, 0.021, None, None)
    return Jobs(60, MTBF_S, 2, {0.0: samples, 400.0: samples}, {400.0: [halved]}, [])


def test_the_page_says_who_is_ahead_and_whether_that_is_sure(jobs: Jobs) -> None:
    text = page(jobs, "measured then")
    assert text.count("| moevement-redo | 0.9") == 2, "MoEvement's best, over each link"
    assert "| 400 Mbit/s, then 200 Mbit/s | moevement | 26 |" in text
    assert "| yes |" in text


def test_the_page_names_what_costs_more_than_the_cap(jobs: Jobs) -> None:
    dear = replace(jobs.samples[400.0][1], overhead=2 * CAP)
    before = page(jobs, "measured then")
    jobs.samples[400.0] = [dear, *jobs.samples[400.0][2:]]
    after = page(jobs, "measured then")
    assert "moevement at 400 Mbit/s (6.0%)" in after
    assert "moevement at 400 Mbit/s (" not in before


def test_the_page_names_the_jobs_that_have_not_been_run(jobs: Jobs) -> None:
    missing = "dense at 400 Mbit/s, kills 2"
    assert missing not in page(jobs, "measured then")
    jobs.missing = [missing]
    assert missing in page(jobs, "measured then")


def test_a_job_with_kills_pays_for_the_windows_that_it_had_itself() -> None:
    rare, often = SavingCost(0.02, 0.0), replace(sample("moevement", 5.0), saving=0.1)
    assert ettr_of([often], rare).mean == pytest.approx(often.available / 1.1)
    unknown = replace(often, saving=None)
    assert ettr_of([unknown], rare).mean == pytest.approx(often.available / 1.02)


def test_the_mean_cost_is_of_the_iterations_that_know_it() -> None:
    known = [{"iteration": number, "overhead": share} for number, share in ((5, 0.1), (6, 0.3))]
    unknown = [{"iteration": number} for number in range(5)]
    assert _mean_cost([*unknown, *known]) == pytest.approx(0.2)
    assert _mean_cost([*unknown, *unknown, *known]) is None


def test_results_are_read_back_as_they_were_kept(tmp_path: Path) -> None:
    results = Results.read(tmp_path / "ettr.jsonl")
    limited = Planned(400.0, "dense", 1, False, 80, MTBF_S)
    plotted, halved = replace(limited, rate=0.0), replace(limited, schedule=0, is_halved=True)
    results.add(limited, sample("dense", 5.0), "then")
    results.add(plotted, sample("dense", 5.0), "then")
    results.add(halved, Halved("dense", 26, 0.02, 0.01, 0.03, 52, 0.021, None, None), "later")
    again = Results.read(results.path)
    assert (again.by_job, again.measured) == (results.by_job, results.measured)
    assert [entry.losses for entry in again.samples([limited, halved, plotted])] == [[], [[1, 3.0]]]
    assert [entry.strategy for entry in again.halved([limited, halved])] == ["dense"]


def test_the_page_is_written_from_what_there_is(tmp_path: Path) -> None:
    measuring = Measuring(80, MTBF_S, 2, RATES, STRATEGIES)
    first, second, *_ = measuring.planned()
    results = Results.read(tmp_path / "ettr.jsonl")
    results.add(first, sample(FREE, overhead=None), "then")
    results.add(second, sample("moevement"), "later")
    write(measuring, results, tmp_path / "ettr.md", tmp_path / "ettr.png")
    text = (tmp_path / "ettr.md").read_text(encoding="utf-8")
    assert f"{len(measuring.planned()) - 2} jobs" in text
    assert "then; later" in text
    assert (tmp_path / "ettr.png").exists()


def test_jobs_without_which_others_say_least_come_first() -> None:
    planned = Measuring(80, MTBF_S, 2, RATES, STRATEGIES).planned()
    assert len(planned) == len(set(planned)) == 4 * 9 + 4 * 8 * 2 + 3 * 3
    assert [job.schedule for job in planned[: 4 * 9 + 3 * 3]] == [0] * (4 * 9 + 3 * 3)
    assert {job.schedule for job in planned[-32:]} == {2}


def test_each_span_of_time_has_one_kill() -> None:
    drawn = kills(MTBF_S, until_s=500.0, seed=3)
    assert [int(kill.at_s // MTBF_S) for kill in drawn] == list(range(20))
    assert {rank for kill in drawn for rank in kill.nodes} == {0, 1, 2, 3}
    assert kills(MTBF_S, until_s=500.0, seed=3) == drawn != kills(MTBF_S, until_s=500.0, seed=4)
