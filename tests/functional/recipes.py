"""Recipes in the form of Megatron's functional tests: a ``model_config.yaml``, and golden values beside it.

    TEST_TYPE       what is done with it
    regular         it is trained
    ckpt-resume     likewise, with a dense checkpoint half way; from there it is trained again, to the same bits
    frozen-resume   it goes on from snapshots on disk that an older version wrote, in ``frozen/`` beside the recipe
    kill-resume     ranks are killed, as its flags say; spares take over, and it comes to the bits of a failure-free run

``LAUNCHER`` is ``moevement launch`` with its options; ``METRICS`` are names of TensorBoard's scalars, as Megatron
writes them. Data is Megatron's mock data.
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
"""Of each metric: ``start_step``, ``end_step``, ``step_interval`` and ``values``, by step, to five decimals."""


@dataclass(frozen=True)
class Recipe:
    """A ``model_config.yaml``."""

    path: Path

    @property
    def name(self) -> str:
        """Of its folder."""
        return self.path.parent.name

    @property
    def golden(self) -> Path:
        """Where its golden values are."""
        return self.path.with_name(GOLDEN)

    @property
    def _content(self) -> dict[str, Any]:
        return dict(yaml.safe_load(self.path.read_text(encoding="utf-8")))

    @property
    def kind(self) -> str:
        """``TEST_TYPE``."""
        return str(self._content["TEST_TYPE"])

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of TensorBoard's scalars."""
        return tuple(self._content["METRICS"])

    @property
    def launcher(self) -> list[str]:
        """Options of ``moevement launch``."""
        return str(self._content["LAUNCHER"]).removeprefix("moevement launch").split()

    @property
    def nproc(self) -> int:
        """Ranks."""
        return int(self.launcher[self.launcher.index("--nproc") + 1])

    @property
    def iterations(self) -> int:
        """``--train-iters``."""
        return int(self._content["MODEL_ARGS"]["--train-iters"])

    def flags(self, *, with_drills: bool) -> list[str]:
        """Of the trainer."""
        words = config_file.expand(["--config", str(self.path)])
        return words if with_drills else list(_without(words, DRILLS))


def recipes() -> list[Recipe]:
    """All of them."""
    return [Recipe(path) for path in sorted(FOLDER.glob("*/*/model_config.yaml"))]


@dataclass(frozen=True)
class Run:
    """A recipe that was trained."""

    recipe: Recipe
    folder: Path

    @property
    def record(self) -> RunRecord:
        """What it left."""
        return RunRecord(self.folder / "run")

    @property
    def digest(self) -> str:
        """Of the state of all ranks at the end."""
        return str(self.record.summary()["state_digest"]["all"])

    def series(self) -> Series:
        """Its metrics, in the form of golden values."""
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
    """Without failures, in this session's processes."""
    run_ranks(
        worker.run_rank,
        recipe.nproc,
        [str(SCRIPT), *recipe.flags(with_drills=False), *_folders(folder), *more],
        init_process_group=False,
        environment=config_file.environment_of(["--config", str(recipe.path)]),
    )
    return Run(recipe, folder)


def kill(recipe: Recipe, folder: Path) -> Run:
    """By its launcher, with the failures of its flags."""
    words = [*recipe.launcher, str(SCRIPT), *recipe.flags(with_drills=True), *_folders(folder)]
    code, out, err = finished(launch(*words))
    assert code == 0, f"{out}\n{err}\n{logs(folder / 'run')}"
    return Run(recipe, folder)


def resume_dense(recipe: Recipe, folder: Path) -> tuple[Run, Run]:
    """With a dense checkpoint half way, and from there."""
    half, saved = recipe.iterations // 2, str(folder / "dense")
    whole = train(recipe, folder / "whole", "--save", saved, "--save-interval", str(half))
    again = train(recipe, folder / "again", "--load", saved, "--ckpt-step", str(half))
    return whole, again


def resume_frozen(recipe: Recipe, folder: Path) -> Run:
    """From a copy of what an older version wrote, which is not to be written to."""
    windows = folder / "windows"
    shutil.copytree(recipe.path.with_name(FROZEN), windows)
    return train(recipe, folder, "--moevement-load", str(windows))


def freeze(recipe: Recipe, folder: Path) -> None:
    """Write its ``frozen/`` with this version: the first half of it."""
    windows = recipe.path.with_name(FROZEN)
    shutil.rmtree(windows, ignore_errors=True)
    train(recipe, folder, "--moevement-persist-dir", str(windows), "--exit-interval", str(recipe.iterations // 2))


def _folders(folder: Path) -> list[str]:
    return [
        "--run-dir", str(folder / "run"), "--data-cache-path", str(folder / "cache"), "--tensorboard-dir",
        str(folder / "tensorboard"),
    ]  # fmt: skip


def _without(words: list[str], flags: tuple[str, ...]) -> Iterator[str]:
    """``words`` without ``flags`` and their values."""
    leaving_out = False
    for word in words:
        if word.startswith("--"):
            leaving_out = word in flags
        if not leaving_out:
            yield word


def _scalars(folder: Path) -> dict[str, dict[int, float]]:
    """By name and step; of what a process wrote that died the next one's stands."""
    found: dict[str, dict[int, float]] = {}
    for path in sorted(folder.rglob("events.out.*"), key=lambda path: path.stat().st_mtime):
        events = EventAccumulator(str(path))
        events.Reload()
        for name in events.Tags()["scalars"]:
            found.setdefault(name, {}).update({event.step: event.value for event in events.Scalars(name)})
    return found
