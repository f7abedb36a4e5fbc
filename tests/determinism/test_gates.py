"""Recipes that break a gate on purpose fail at this gate."""

from __future__ import annotations

import json
import re
import subprocess
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, override

import pytest

from moevement_cli.main import main
from moevement_core.run.environment import environment_complaint
from moevement_core.run.run_record import RunRecord
from tests.determinism import gates
from tests.determinism.gates import RecipeRuns
from tests.determinism.recipes import TrainingRecipe
from tests.training import ROOT

SMALL = TrainingRecipe("small", "two layers", 1, "one rank", {"num_layers": 2, "hidden_dropout": 0.1})


@dataclass(frozen=True)
class SeededByClock(TrainingRecipe):
    """Recipe of which no two runs are equal."""

    @property
    @override
    def training(self) -> dict[str, Any]:
        """Flags of the job without checkpoints, with another seed each time."""
        return super().training | {"seed": time.time_ns() % 100_000 + 1}


@dataclass(frozen=True)
class SavesOtherwise(TrainingRecipe):
    """Recipe of which the job with sparse checkpoints computes with another learning rate."""

    @property
    @override
    def saving(self) -> dict[str, Any]:
        """Flags of the job with sparse checkpoints."""
        return super().saving | {"lr": 6e-3}


def like(kind: type[TrainingRecipe], name: str) -> TrainingRecipe:
    return kind(name, SMALL.subject, SMALL.nproc, SMALL.layout, SMALL.flags)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> RecipeRuns:
    return RecipeRuns(SMALL, tmp_path_factory.mktemp("small"))


@pytest.mark.slow("two jobs")
def test_a_seed_from_the_clock_fails_the_first_gate(tmp_path: Path) -> None:
    complaint = gates.fixed_environment(RecipeRuns(like(SeededByClock, "clock"), tmp_path))
    assert complaint is not None
    assert complaint.startswith("iteration 1:")


def test_a_job_that_is_not_deterministic_fails_the_first_gate(tmp_path: Path) -> None:
    recipe = replace(SMALL, name="loose", flags=SMALL.flags | {"deterministic_mode": False})
    complaint = gates.fixed_environment(RecipeRuns(recipe, tmp_path))
    assert complaint is not None
    assert "--deterministic-mode" in complaint


def test_the_command_compares_environments(
    small: RecipeRuns, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, repeated = small.baseline(), small.repeated()
    assert main(["verify", str(whole.folder), str(repeated.folder), "--fixed-environment"]) == 0
    changed = copied(repeated, tmp_path / "changed", NCCL_ALGO="Ring,^NVLS")
    assert main(["verify", str(whole.folder), str(changed.folder)]) == 0
    assert main(["verify", str(whole.folder), str(changed.folder), "--fixed-environment"]) == 1
    assert "NCCL_ALGO" in capsys.readouterr().out


@pytest.mark.parametrize(
    "name", ["NCCL_ALGO", "NVTE_ALLOW_NONDETERMINISTIC_ALGO", "CUBLAS_WORKSPACE_CONFIG", "deterministic"]
)
def test_a_variable_that_is_not_set_fails_the_first_gate(name: str, small: RecipeRuns, tmp_path: Path) -> None:
    without = copied(small.repeated(), tmp_path / "run", **{name: None})
    complaint = environment_complaint(without, without)
    assert complaint is not None
    assert "--deterministic-mode" in complaint
    assert environment_complaint(small.baseline(), small.repeated()) is None


def copied(run: RunRecord, folder: Path, **changes: str | None) -> RunRecord:
    """Return a copy of a run in which each rank had other environment variables; None unsets one."""
    summary = run.summary()
    summary["environment"] = [
        {name: value for name, value in (environment | changes).items() if value is not None}
        for environment in summary["environment"]
    ]
    folder.mkdir()
    (folder / "metrics.jsonl").write_bytes(run.metrics_path.read_bytes())
    (folder / "summary.json").write_text(json.dumps(summary))
    return RunRecord(folder)


def test_saving_that_changes_the_learning_rate_fails_the_second_gate(tmp_path: Path) -> None:
    complaint = gates.baseline(RecipeRuns(like(SavesOtherwise, "otherwise"), tmp_path))
    assert complaint is not None
    assert complaint.startswith("iteration 1:")


def test_a_restart_without_random_states_fails_the_third_gate(tmp_path: Path) -> None:
    recipe = replace(SMALL, name="forgetful", resume={"no_load_rng": True})
    complaint = gates.restart_replay(RecipeRuns(recipe, tmp_path))
    assert complaint is not None
    assert complaint.startswith("iteration 7:")


@pytest.mark.full
def test_a_restart_from_the_beginning_fails_the_third_gate(tmp_path: Path) -> None:
    recipe = replace(SMALL, name="anew", resume={"load": None, "ckpt_step": None})
    assert gates.restart_replay(RecipeRuns(recipe, tmp_path)) is not None


LOSSY = replace(
    SMALL, name="lossy", nproc=2, layout="PP2",
    flags={
        "pipeline_model_parallel_size": 2, "num_layers": 2, "moevement_strategy": "moc", "moevement_window": False,
        "moevement_dense_interval": 2, "moevement_snapshot_experts": 1, "moevement_plt_limit": 1.0,
    },
)  # fmt: skip


@pytest.mark.slow("two jobs of two ranks, and a kill in one")
def test_a_strategy_that_loses_updates_fails_the_fourth_gate(tmp_path: Path) -> None:
    complaint = gates.kill_replay(RecipeRuns(LOSSY, tmp_path), ("backward",))
    assert complaint is not None
    assert complaint.startswith(("iteration", "final state"))


@pytest.mark.full
def test_a_kill_that_never_happens_fails_the_fourth_gate(tmp_path: Path) -> None:
    assert gates.kill_replay(RecipeRuns(LOSSY, tmp_path), ("eval",)) is not None


@pytest.mark.full
@pytest.mark.slow("six jobs of four ranks, and their fresh interpreters")
def test_the_gates_as_a_user_runs_them(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "determinism.md").read_text(encoding="utf-8")
    blocks = [
        block for block in re.findall(r"^```\n(.*?)^```", page, re.DOTALL | re.MULTILINE) if "pytest" not in block
    ]
    assert len(blocks) == 5
    script = "set -e\n" + "".join(blocks).replace("runs/", f"{tmp_path}/")
    subprocess.run(["bash", "-c", script], cwd=ROOT, check=True)
    assert main(["verify", str(tmp_path / "a"), str(tmp_path / "killed")]) == 0
