"""Every recipe passes the four gates: six recipes in each test session, all in the full matrix."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from scripts import recipes_table
from tests.determinism import gates
from tests.determinism.gates import RecipeRuns
from tests.determinism.recipes import PHASES, RECIPES, TrainingRecipe
from tests.failure_free import FOLDER_ENV

QUICK = [recipe for recipe in RECIPES if recipe.is_quick]
FULL = pytest.mark.full


def each(gate: str) -> pytest.MarkDecorator:
    """Return the parameters of a test of a gate; recipes that are not quick are in the full matrix only."""
    parameters = []
    for recipe in RECIPES:
        marks = [] if recipe.is_quick else [FULL]
        if gate in recipe.fails:
            marks.append(pytest.mark.xfail(strict=True, raises=AssertionError, reason=recipe.fails[gate]))
        parameters.append(pytest.param(recipe, id=recipe.name, marks=marks))
    return pytest.mark.parametrize("recipe", parameters)


def runs_of(recipe: TrainingRecipe, *phases: str) -> RecipeRuns:
    return RecipeRuns(recipe, Path(os.environ[FOLDER_ENV]) / "determinism", gates.length_of(phases))


@each("fixed_environment")
@pytest.mark.slow("two runs, if another worker has not trained one of them")
def test_a_repeated_run_in_a_fixed_environment(recipe: TrainingRecipe) -> None:
    assert gates.fixed_environment(runs_of(recipe)) is None


@each("baseline")
@pytest.mark.slow("two runs, if another worker has not trained one of them")
def test_saving_leaves_the_bits_of_the_baseline(recipe: TrainingRecipe) -> None:
    assert gates.baseline(runs_of(recipe)) is None


@each("restart_replay")
@pytest.mark.slow("three runs, if another worker has not trained two of them")
def test_a_restart_replays_the_run(recipe: TrainingRecipe) -> None:
    assert gates.restart_replay(runs_of(recipe)) is None


@FULL
@each("restart_from_windows")
@pytest.mark.slow("three runs")
def test_a_restart_from_windows_replays_the_run(recipe: TrainingRecipe) -> None:
    assert gates.restart_from_windows(runs_of(recipe)) is None


@pytest.mark.parametrize("recipe", [pytest.param(recipe, id=recipe.name) for recipe in QUICK])
@pytest.mark.slow("two kills")
def test_a_job_that_loses_ranks_replays_the_run(recipe: TrainingRecipe) -> None:
    assert gates.kill_replay(runs_of(recipe, *recipe.kills), recipe.kills) is None


@FULL
@each("kill_replay")
@pytest.mark.slow("eight kills")
def test_a_job_that_loses_a_rank_in_each_phase_replays_the_run(recipe: TrainingRecipe) -> None:
    phases = gates.all_phases(recipe)
    assert gates.kill_replay(runs_of(recipe, *phases), phases) is None


def test_the_quick_recipes_meet_all_phases() -> None:
    assert len(QUICK) == 6
    assert {phase for recipe in QUICK for phase in recipe.kills} == set(PHASES)
    assert len({recipe.name for recipe in RECIPES}) == len(RECIPES) >= 30


def test_the_page_lists_the_recipes() -> None:
    page = recipes_table.OUTPUT.read_text(encoding="utf-8")
    assert page == recipes_table.page(), "run: python scripts/recipes_table.py"
