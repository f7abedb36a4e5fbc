"""The simulator's predictions for measured jobs, calibrated by jobs of other strategies."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moevement_cli.ettr_prediction import SIMULATED, predicted
from moevement_cli.ettr_samples import FREE, NEVER, Sample, rows_of
from moevement_cli.simulate import SCENARIOS
from moevement_core.simulator.scenario import load


def _sample(strategy: str, *kills: tuple[float, list[int]], parts_s: float = 0.5, training_s: float = 60.0) -> Sample:
    parts = {"notice": parts_s, "regroup": 2 * parts_s, "run again": 1.0} if kills else {}
    return Sample(
        strategy, "20 s" if kills else NEVER, 20.0 if kills else None, 1, training_s, 60, list(kills), 3, parts, 0.42,
        3, 100.0, 1.0, 0, 0.0, 2.5, "equal", [(0.0, 1)], [(1, 3.0)],
    )  # fmt: skip


def _predicted(samples: list[Sample]) -> list[float]:
    return [sample.predicted or 0.0 for sample in predicted(load(SCENARIOS / "laptop.yaml"), samples)]


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


def test_the_failure_free_job_is_the_measure_and_is_not_predicted() -> None:
    free = _sample(FREE)
    assert predicted(load(SCENARIOS / "laptop.yaml"), [free]) == [free]
    assert rows_of([free])[0][:2] == [NEVER, FREE]


def test_a_slower_machine_is_the_same_job_in_longer_seconds() -> None:
    def jobs(scale: float) -> list[Sample]:
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
