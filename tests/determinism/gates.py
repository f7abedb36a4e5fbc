"""The four gates of the contract, for one recipe. Each returns why a recipe fails, or None.

The contract is that of Megatron-LM (issue 5785), which has the first three gates. The gates of a recipe share its runs,
and so do the worker processes of a test session.
"""

from __future__ import annotations

import fcntl
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moevement_core.run.environment import environment_complaint
from moevement_core.run.run_record import RunRecord
from moevement_core.run.verify import compare
from tests.determinism.recipes import ITERATIONS, PHASES, TrainingRecipe
from tests.launching import survive
from tests.training import train

FIRST_KILL, BETWEEN_KILLS, AFTER_KILLS = 5, 3, 3
"""Iterations: that of the first kill, the number from one kill to the next, and the number after the last kill."""


class RecipeRuns:
    """Runs of one recipe, each of which is trained at its first use.

    Args:
        recipe: the recipe.
        folder: folder for the runs; several processes may share it.
        iterations: length of each run.
    """

    def __init__(self, recipe: TrainingRecipe, folder: Path, iterations: int = ITERATIONS) -> None:
        self.recipe, self._iterations = recipe, iterations
        self._folder = folder / f"{recipe.name}_{iterations}"
        self._folder.mkdir(parents=True, exist_ok=True)

    def baseline(self) -> RunRecord:
        """Return a run of Megatron alone, without checkpoints."""
        return self._once("baseline", **self.recipe.training)

    def repeated(self) -> RunRecord:
        """Return a second run with the flags of :meth:`baseline`."""
        return self._once("repeated", **self.recipe.training)

    def saving(self) -> RunRecord:
        """Return a run with sparse checkpoints that also writes a dense checkpoint half way."""
        return self._once(
            "saving", **self.recipe.saving, save=str(self._folder / "dense"), save_interval=self._iterations // 2
        )

    def stopped(self) -> RunRecord:
        """Return a run that writes its windows to disk, and stops half way."""
        return self._once(
            "stopped", **self.recipe.saving, moevement_persist_dir=str(self._folder / "windows"),
            exit_interval=self._iterations // 2,
        )  # fmt: skip

    def resumed_dense(self) -> RunRecord:
        """Return a run that continues from the dense checkpoint of :meth:`saving`."""
        self.saving()
        dense = {"load": str(self._folder / "dense"), "ckpt_step": self._iterations // 2}
        return self._once("resumed_dense", **self.recipe.training | dense | self.recipe.resume)

    def resumed_windows(self) -> RunRecord:
        """Return a run that continues from the windows of :meth:`stopped`."""
        self.stopped()
        windows = {"moevement_load": str(self._folder / "windows")}
        return self._once("resumed_windows", **self.recipe.saving | windows)

    def killed(self, phases: Sequence[str]) -> tuple[RunRecord, int]:
        """Return a run that loses a rank in each of ``phases``, and the number of its failures.

        The run is trained in each call.
        """
        faults = [
            f"rank={number % self.recipe.nproc},iteration={FIRST_KILL + BETWEEN_KILLS * number},phase={phase}"
            for number, phase in enumerate(phases)
        ]
        folder = self._folder / f"killed_{'_'.join(phases)}"
        survived = survive(
            self.recipe.nproc, 2, folder, inject=tuple(faults), **self.recipe.saving, train_iters=self._iterations
        )
        return survived.record, len(survived.failures())

    def _once(self, name: str, **flags: Any) -> RunRecord:
        """Return the run of this name; one process trains it, and all others wait for the result."""
        record = RunRecord(self._folder / name)
        with open(self._folder / f"{name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not record.summary_path.exists():
                train(self.recipe.nproc, record.folder, **flags, train_iters=self._iterations)
        return record


def fixed_environment(runs: RecipeRuns) -> str | None:
    """Return why two runs with the same flags differ, in their environments or in their bits; None if equal."""
    a, b = runs.baseline(), runs.repeated()
    return environment_complaint(a, b) or compare(a, b).first_difference


def baseline(runs: RecipeRuns) -> str | None:
    """Return how a run with sparse checkpoints differs from Megatron alone; None if equal."""
    return compare(runs.baseline(), runs.saving()).first_difference


def restart_replay(runs: RecipeRuns) -> str | None:
    """Return how a run from Megatron's dense checkpoint differs from the uninterrupted run; None if equal."""
    return _continued(runs.baseline(), runs.resumed_dense())


def restart_from_windows(runs: RecipeRuns) -> str | None:
    """Return how a run from windows on disk differs from the uninterrupted run; None if equal."""
    return _continued(runs.baseline(), runs.resumed_windows())


def kill_replay(runs: RecipeRuns, phases: Sequence[str]) -> str | None:
    """Return how a run that lost a rank in each of ``phases`` differs from Megatron alone; None if equal."""
    killed, failures = runs.killed(phases)
    if failures != len(phases):
        return f"{failures} of {len(phases)} kills happened"
    return compare(runs.baseline(), killed).first_difference


def length_of(phases: Sequence[str]) -> int:
    """Return the number of iterations of a job that loses a rank in each of ``phases``."""
    return max(ITERATIONS, FIRST_KILL + BETWEEN_KILLS * (len(phases) - 1) + AFTER_KILLS)


def all_phases(recipe: TrainingRecipe) -> tuple[str, ...]:
    """Return all phases, in an order that begins elsewhere for each recipe, so that all ranks die in all phases."""
    first = sum(map(ord, recipe.name)) % len(PHASES)
    return PHASES[first:] + PHASES[:first]


def _continued(whole: RunRecord, resumed: RunRecord) -> str | None:
    iterations = [line["iteration"] for line in resumed.metrics()]
    if not iterations or iterations[0] == 1:
        return f"the run began at iteration {iterations[0] if iterations else None}, not at a checkpoint"
    return compare(whole, resumed, common_iterations=True).first_difference
