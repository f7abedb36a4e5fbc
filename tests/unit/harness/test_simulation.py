"""Simulated jobs survive failures, a seed always gives the same run, and the simulation finds planted bugs."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.simulation import mutants
from tests.simulation.__main__ import main
from tests.simulation.scenario import Scenario, draw, with_moves
from tests.simulation.simulate import simulate, stand_ins

QUICK_SEEDS, SEEDS = 12, 60
"""Numbers of simulated jobs in a quick test run and in an exhaustive one."""
ENOUGH = 400
"""Number of seeds within which the simulation finds a planted bug."""
QUICK = [
    mutants.agrees_on_the_most, mutants.one_rank_for_two, mutants.two_ranks_for_one,
    mutants.copies_at_home, mutants.spares_by_arrival,
]  # fmt: skip
"""Planted bugs that the simulation finds within the first seeds."""


@pytest.fixture(scope="module", autouse=True)
def _simulated() -> Iterator[None]:
    with stand_ins():
        yield


@pytest.mark.parametrize(
    "seeds", [range(QUICK_SEEDS), pytest.param(range(QUICK_SEEDS, SEEDS), marks=pytest.mark.full)], ids=len
)
def test_jobs_come_to_their_end_with_the_state_of_no_failure(seeds: range) -> None:
    outcomes = [simulate(seed) for seed in seeds]
    assert [(outcome.seed, outcome.violation) for outcome in outcomes if outcome.violation] == []
    assert sum(outcome.generations > 1 for outcome in outcomes) > len(seeds) / 4  # failures, and recoveries from them


def test_planned_moves_alone_repeat_nothing() -> None:
    """Drain nodes and ranks of jobs without faults: wherever a spare is free, the job goes on with the same state."""
    outcomes = [simulate(seed, scenario=with_moves(draw(seed), seed, alone=True)) for seed in range(QUICK_SEEDS)]
    assert [(outcome.seed, outcome.violation, outcome.reason) for outcome in outcomes if outcome.violation] == []
    assert {outcome.repeated for outcome in outcomes if not has_parity(outcome.scenario)} == {0}
    assert sum(outcome.generations > 1 for outcome in outcomes) > len(outcomes) / 4


def has_parity(scenario: Scenario) -> bool:
    return any(flag.startswith("parity") for flag in scenario.flags)


@pytest.mark.parametrize(
    "seeds", [range(QUICK_SEEDS), pytest.param(range(QUICK_SEEDS, SEEDS), marks=pytest.mark.full)], ids=len
)
def test_moves_between_faults_change_no_state(seeds: range) -> None:
    outcomes = [simulate(seed, scenario=with_moves(draw(seed), seed)) for seed in seeds]
    assert [(outcome.seed, outcome.violation) for outcome in outcomes if outcome.violation] == []


@pytest.mark.parametrize("seed", [16, 197, 2180, 30197, 30297])
def test_what_was_found_once(seed: int) -> None:
    assert simulate(seed).violation is None


def test_without_faults_nothing_fails() -> None:
    for seed in range(4):
        outcome = simulate(seed, scenario=replace(draw(seed), faults=()))
        assert (outcome.violation, outcome.reason, outcome.generations) == (None, "", 1)


TRACES = """
import hashlib
from tests.simulation.simulate import simulate, stand_ins
with stand_ins():
    traces = [line for seed in range(4) for line in simulate(seed, full_trace=True).trace]
print(hashlib.sha256("\\n".join(traces).encode()).hexdigest())
"""


def test_the_same_seed_is_the_same_run_in_any_process() -> None:
    traces = [line for seed in range(4) for line in simulate(seed, full_trace=True).trace]
    here = hashlib.sha256("\n".join(traces).encode()).hexdigest()
    done = subprocess.run(
        [sys.executable, "-c", TRACES], env={**os.environ, "PYTHONHASHSEED": "7"}, capture_output=True, text=True,
        timeout=120, check=True,
    )  # fmt: skip
    assert done.stdout.strip() == here


def is_found(mutant: mutants.Mutant) -> bool:
    with mutants.planted(mutant):
        return any(simulate(seed).violation is not None for seed in range(ENOUGH))


@pytest.mark.parametrize("mutant", QUICK, ids=lambda mutant: mutant.__name__)
def test_a_planted_bug_is_found(mutant: mutants.Mutant) -> None:
    assert is_found(mutant)


@pytest.mark.full
@pytest.mark.parametrize("mutant", [bug for bug in mutants.MUTANTS if bug not in QUICK], ids=lambda bug: bug.__name__)
def test_a_planted_bug_that_few_seeds_meet_is_found(mutant: mutants.Mutant) -> None:
    assert is_found(mutant)


def test_the_command_refuses_numbers_that_cannot_be(capsys: pytest.CaptureFixture[str]) -> None:
    for wrong in (["--seeds", "0"], ["--jobs", "0"], ["--first-seed", "-1"], ["--trace"]):
        with pytest.raises(SystemExit) as ended:
            main(wrong)
        assert ended.value.code == 2
    capsys.readouterr()
