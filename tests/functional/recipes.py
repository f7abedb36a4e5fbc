"""Recipes in the form of Megatron's functional tests: a ``model_config.yaml``, and golden values beside it.

    TEST_TYPE       what a test does with the recipe
    regular         trains it
    ckpt-resume     trains it with a dense checkpoint half way, and again from there to the same bits
    frozen-resume   resumes it from snapshots of an older version, on disk in ``frozen/`` beside the recipe
    kill-resume     kills ranks, as its flags say; spares take over, and the bits are those of a failure-free run

``LAUNCHER`` is ``moevement launch`` with its options; ``METRICS`` are names of TensorBoard's scalars, as Megatron
writes them. The training data are Megatron's mock data.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron.moevement import worker
from moevement_core.launching import config_file
from moevement_core.run.run_record import RunRecord
from tests.harness import run_ranks
from tests.launching import finished, launch, logs
from tests.training import SCRIPT

FOLDER = Path(__file__).with_name("test_cases")
GOLDEN = "golden_values_dev_cpu.json"
FROZEN = "frozen"
DRILLS = ("--moevement-inject", "--moevement-wipe-at")
Series = dict[str, dict[str, Any]]
"""Values of each metric: ``start_step``, ``end_step``, ``step_interval`` and ``values``, by step, to five decimals."""


@dataclass(frozen=True)
class Recipe:
    """Recipe that a ``model_config.yaml`` describes."""

    path: Path

    @property
    def name(self) -> str:
        """Name of the recipe's folder, which is the id of its test."""
        return self.path.parent.name

    @property
    def golden(self) -> Path:
        """Path of the recipe's golden values."""
        return self.path.with_name(GOLDEN)

    @property
    def _content(self) -> dict[str, Any]:
        return dict(yaml.safe_load(self.path.read_text(encoding="utf-8")))

    @property
    def kind(self) -> str:
        """Value of ``TEST_TYPE``, which selects what a test does."""
        return str(self._content["TEST_TYPE"])

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of the TensorBoard scalars that have golden values."""
        return tuple(self._content["METRICS"])

    @property
    def launcher(self) -> list[str]:
        """Options of ``moevement launch`` for this recipe."""
        return str(self._content["LAUNCHER"]).removeprefix("moevement launch").split()

    @property
    def nproc(self) -> int:
        """Number of ranks that the launcher starts."""
        return int(self.launcher[self.launcher.index("--nproc") + 1])

    @property
    def iterations(self) -> int:
        """Length of the run in iterations (``--train-iters``)."""
        return int(self._content["MODEL_ARGS"]["--train-iters"])

    def flags(self, *, with_drills: bool) -> list[str]:
        """Return the trainer's flags, with or without those that kill ranks or wipe their memory."""
        words = config_file.expand(["--config", str(self.path)])
        return words if with_drills else list(_without(words, DRILLS))


def recipes() -> list[Recipe]:
    """Return the recipes in all folders of ``test_cases``."""
    return [Recipe(path) for path in sorted(FOLDER.glob("*/*/model_config.yaml"))]


@dataclass(frozen=True)
class Run:
    """Run of a recipe that has ended, with its results."""

    recipe: Recipe
    folder: Path

    @property
    def record(self) -> RunRecord:
        """Record that the run left in its run directory."""
        return RunRecord(self.folder / "run")

    @property
    def digest(self) -> str:
        """Digest of the final state of all ranks."""
        return str(self.record.summary()["state_digest"]["all"])

    def series(self) -> Series:
        """Return the metrics of the run in the form of golden values."""
        scalars = _scalars(self.folder / "tensorboard")
        return {
            metric: {
                "start_step": min(scalars[metric]),
                "end_step": max(scalars[metric]),
                "step_interval": 1,
                "values": {str(step): round(value, 5) for step, value in sorted(scalars[metric].items())},
            }
            for metric in self.recipe.metrics
        }


def train(recipe: Recipe, folder: Path, *more: str) -> Run:
    """Train a recipe without failures, on forks of this session's fork server."""
    run_ranks(
        worker.run_rank,
        recipe.nproc,
        [str(SCRIPT), *recipe.flags(with_drills=False), *_folders(folder), *more],
        init_process_group=False,
        environment=config_file.environment_of(["--config", str(recipe.path)]),
    )
    return Run(recipe, folder)


def kill(recipe: Recipe, folder: Path) -> Run:
    """Train a recipe with its launcher and with the failures of its flags."""
    words = [*recipe.launcher, str(SCRIPT), *recipe.flags(with_drills=True), *_folders(folder)]
    code, out, err = finished(launch(*words))
    assert code == 0, f"{out}\n{err}\n{logs(folder / 'run')}"
    return Run(recipe, folder)


def resume_dense(recipe: Recipe, folder: Path) -> tuple[Run, Run]:
    """Train a recipe with a dense checkpoint half way, and train it again from there; return both runs."""
    half, saved = recipe.iterations // 2, str(folder / "dense")
    whole = train(recipe, folder / "whole", "--save", saved, "--save-interval", str(half))
    again = train(recipe, folder / "again", "--load", saved, "--ckpt-step", str(half))
    return whole, again


def resume_frozen(recipe: Recipe, folder: Path) -> Run:
    """Resume a recipe from a copy of an older version's windows, as the originals must not change."""
    windows = folder / "windows"
    shutil.copytree(recipe.path.with_name(FROZEN), windows)
    return train(recipe, folder, "--moevement-load", str(windows))


def freeze(recipe: Recipe, folder: Path) -> None:
    """Write the recipe's ``frozen/`` with this version by training the first half of it."""
    windows = recipe.path.with_name(FROZEN)
    shutil.rmtree(windows, ignore_errors=True)
    train(recipe, folder, "--moevement-persist-dir", str(windows), "--exit-interval", str(recipe.iterations // 2))


def _folders(folder: Path) -> list[str]:
    return [
        "--run-dir", str(folder / "run"), "--data-cache-path", str(folder / "cache"), "--tensorboard-dir",
        str(folder / "tensorboard"),
    ]  # fmt: skip


def _without(words: list[str], flags: tuple[str, ...]) -> Iterator[str]:
    """Yield ``words`` without ``flags`` and their values."""
    leaving_out = False
    for word in words:
        if word.startswith("--"):
            leaving_out = word in flags
        if not leaving_out:
            yield word


def _scalars(folder: Path) -> dict[str, dict[int, float]]:
    """Return scalars by name and step; those of a replacement supersede those of the process that died."""
    scalars: dict[str, dict[int, float]] = {}
    for path in sorted(folder.rglob("events.out.*"), key=lambda path: path.stat().st_mtime):
        events = EventAccumulator(str(path))
        events.Reload()
        for name in events.Tags()["scalars"]:
            scalars.setdefault(name, {}).update({event.step: event.value for event in events.Scalars(name)})
    return scalars
