"""The simulator's predictions for measured jobs, calibrated by jobs of other strategies."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moevement_cli.ettr_prediction import SIMULATED, CostOverLinks, OverLinks, fitted, predicted
from moevement_cli.ettr_samples import FREE, NEVER, JobSample, rows_of
from moevement_cli.simulate import SCENARIOS
from moevement_core.simulator.scenario import load


def _sample(
    strategy: str, *kills: tuple[float, list[int]], parts_s: float = 0.5, training_s: float = 60.0
) -> JobSample:
    parts = {"notice": parts_s, "regroup": 2 * parts_s, "run again": 1.0} if kills else {}
    return JobSample(
        strategy, "20 s" if kills else NEVER, 20.0 if kills else None, 1, training_s, 60, list(kills), 3, parts, 0.42,
        3, 100.0, 1.0, 0, 0.0, 2.5, "equal", [(0.0, 1)], [(1, 3.0)],
    )  # fmt: skip


def _predicted(samples: list[JobSample]) -> list[float]:
    (jobs,) = predicted([OverLinks(load(SCENARIOS / "laptop.yaml"), samples)])
    return [sample.predicted or 0.0 for sample in jobs]


def test_more_kills_and_slower_regrouping_mean_less_ettr() -> None:
    kills = [(10.0, [1]), (30.0, [2]), (45.0, [0])]
    for name in SIMULATED:
        calm, single, three = _predicted([_sample(name), _sample(name, kills[0]), _sample(name, *kills)])
        assert 1 >= calm > single > three > 0, name
        _, slow = _predicted([_sample(name), _sample(name, *kills, parts_s=3.0)])
        assert slow < three, name


def test_a_job_is_calibrated_by_those_of_other_strategies() -> None:
    kill = (10.0, [1])

    def ettrs(parts_s: float, overhead: float) -> list[float]:
        other = replace(_sample("moevement", kill, parts_s=parts_s), overhead=overhead)
        own = replace(_sample("gemini", kill, parts_s=99.0), overhead=9.0)
        return _predicted([other, own])

    (_, quick), (_, slow), (_, costly) = ettrs(0.1, 0.0), ettrs(5.0, 0.0), ettrs(0.1, 0.5)
    assert quick > slow > 0.5, "its own notice of 99 s is not used"
    assert quick > costly > 0.3, "nor its own overhead"


def test_windows_of_jobs_that_rest_are_simulated_as_they_are() -> None:
    kill = (30.0, [1])
    often, rarely = (
        _predicted([replace(_sample(name, kill), snapshots=1, interval=interval)])[0]
        for name, interval in (("moevement", 2), ("moevement", 50))
    )
    assert often > rarely
    job = replace(_sample("moevement", kill), snapshots=1, interval=50, killed_at=[23])
    just_before = _predicted([replace(job, windows=[[0, 8, 8], [20, 1, 50]])])[0]
    long_before = _predicted([replace(job, windows=[[0, 1, 50]])])[0]
    assert just_before > long_before
    unchanged = _predicted([replace(job, windows=[[0, 1, 50], [40, 1, 2]])])[0]
    assert unchanged == long_before, "windows after a kill do not matter to it"


def test_the_failure_free_job_is_the_measure_and_is_not_predicted() -> None:
    free = _sample(FREE)
    assert predicted([OverLinks(load(SCENARIOS / "laptop.yaml"), [free])]) == [[free]]
    assert rows_of([free])[0][:2] == [NEVER, FREE]


def test_a_slower_machine_is_the_same_job_in_longer_seconds() -> None:
    def jobs(scale: float) -> list[JobSample]:
        samples = [_sample(FREE), _sample("gemini", (10.0, [1]), (31.0, [2]))]
        return [
            replace(
                sample, iteration_s=sample.iteration_s * scale, training_s=sample.training_s * scale,
                parts={name: seconds * scale for name, seconds in sample.parts.items()},
                kills=[(at_s * scale, ranks) for at_s, ranks in sample.kills],
            )
            for sample in samples
        ]  # fmt: skip

    (_, as_profiled), (_, twice) = (_predicted(jobs(scale)) for scale in (1.0, 2.0))
    assert twice == pytest.approx(as_profiled, abs=0.02)


def _row(of_interference: float, of_contention: float, share: float, unslowed: float = 0.0) -> CostOverLinks:
    return CostOverLinks(
        "dense", share=share, unslowed=unslowed, of_interference=of_interference, of_contention=of_contention
    )


def test_costs_of_copies_to_the_host_and_to_peers_are_told_apart() -> None:
    parts = [(0.01, 0.0), (0.01, 0.2), (0.002, 0.4), (0.005, 0.05)]
    slowing = fitted([_row(copies, sends, 0.1 + 20 * copies + 0.5 * sends, unslowed=0.1) for copies, sends in parts])
    assert (slowing.interference, slowing.contention) == pytest.approx((20.0, 0.5))


@pytest.mark.parametrize(
    ("rows", "factors"),
    [
        ([(0.01, 0.1, 0.02), (0.01, 0.3, 0.0)], (1.0, 0.0)),
        ([(0.01, 0.1, 0.0), (0.03, 0.1, -0.5)], (0.0, 0.0)),
        ([(0.01, 0.0, 0.3)], (30.0, 0.0)),
        ([(0.0, 0.2, 0.1)], (0.0, 0.5)),
        ([(0.0, 0.0, 0.3)], (0.0, 0.0)),
        ([], (0.0, 0.0)),
    ],
)
def test_copies_never_make_training_faster(
    rows: list[tuple[float, float, float]], factors: tuple[float, float]
) -> None:
    slowing = fitted([_row(*row) for row in rows])
    assert (slowing.interference, slowing.contention) == pytest.approx(factors)


def test_jobs_over_other_links_calibrate_too() -> None:
    scenario = load(SCENARIOS / "laptop.yaml")
    slow = replace(scenario, cluster=replace(scenario.cluster, network_bytes_per_s=1e7))

    def ettr(overhead: float) -> float:
        elsewhere = OverLinks(slow, [replace(_sample("moetion"), overhead=overhead)])
        _, (own,) = predicted([elsewhere, OverLinks(scenario, [_sample("gemini")])])
        return own.predicted or 0.0

    assert ettr(0.0) > ettr(0.5) > 0.0


def test_a_sender_takes_more_of_a_link_before_training_waits() -> None:
    scenario = load(SCENARIOS / "laptop.yaml")
    full_s = scenario.cluster.link_s(scenario.costs().full_bytes * scenario.checkpointing.replicas)
    busy = 0.6 * scenario.costs().iteration_s / full_s  # a checkpoint each iteration takes 0.6 of the link

    def ettr(factor: float) -> float:
        rate = scenario.cluster.network_bytes_per_s * factor
        jobs = OverLinks(
            replace(scenario, cluster=replace(scenario.cluster, network_bytes_per_s=rate)),
            [replace(_sample("gemini", (10.0, [1])), interval=1)],
        )
        ((own,),) = predicted([jobs])
        return own.predicted or 0.0

    assert ettr(1 / busy) == pytest.approx(ettr(1.0), abs=0.05), "nothing waits"
    assert ettr(0.3 / busy) < 0.6, "training waits for a link that is too slow"
