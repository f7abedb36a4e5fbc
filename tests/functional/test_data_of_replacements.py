"""Replacements and resumed jobs read the right data, rebuild caches, and exit at the iteration of a due exit."""

from __future__ import annotations

import re
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from moevement_core.run.run_record import RunRecord
from moevement_core.run.verify import compare
from moevement_core.storage.manifest import manifests
from tests.failure_free import digest_of, failure_free
from tests.functional.jobs import SPARSE
from tests.launching import Survived, finished, launch, logs, survive
from tests.training import SCRIPT, flags, outcomes, train

TWO: dict[str, Any] = {
    **SPARSE, "pipeline_model_parallel_size": 2, "num_layers": 2, "moevement_replicas": 1, "train_iters": 12,
}  # fmt: skip


def test_a_replacement_builds_indices_that_are_not_in_its_cache(tmp_path: Path) -> None:
    """Remove the cache folder before a rank is lost, as if it was cleaned or the replacement's node had its own."""
    cache, run_dir = tmp_path / "cache", tmp_path / "run"
    wanted = failure_free(2, **TWO)
    words = flags(**TWO, data_cache_path=str(cache), moevement_inject="rank=1,iteration=9,phase=forward")
    job = launch("--nproc", "2", "--spares", "1", str(SCRIPT), *words, "--run-dir", str(run_dir))
    record = RunRecord(run_dir)
    while (record.newest_metric() or {"iteration": 0})["iteration"] < 4:
        assert job.poll() is None, finished(job)
        time.sleep(0.01)
    assert list(cache.rglob("*.npy"))
    shutil.rmtree(cache)
    code, out, err = finished(job)
    assert code == 0, f"{out}\n{err}\n{logs(run_dir)}"
    survived = Survived(run_dir, out)
    assert len(survived.failures()) == 1
    assert survived.digest == digest_of(wanted)


@pytest.mark.parametrize("phase", ["save", pytest.param("gather", marks=pytest.mark.full)])
def test_an_exit_that_is_due_is_not_missed_when_a_failure_comes_in_it(phase: str, tmp_path: Path) -> None:
    """Interrupt iteration 6 or its save. An exit is due there: the job must still save and exit."""
    saved = tmp_path / "saved"
    flags_ = TWO | {"exit_interval": 6, "save": str(saved), "save_interval": 100}
    survived = survive(2, 1, tmp_path / "run", inject=(f"rank=0,iteration=6,phase={phase}",), **flags_)
    assert len(survived.failures()) == 1
    assert survived.record.summary()["iterations"] == 6
    survived.check_metrics(6)
    assert (saved / "latest_checkpointed_iteration.txt").read_text() == "6"


def test_the_last_window_of_a_run_that_ends_well_is_on_disk(tmp_path: Path) -> None:
    windows = tmp_path / "windows"
    train(2, tmp_path / "run", **TWO, moevement_persist_dir=str(windows))
    newest, *_ = manifests(windows)
    assert newest.reaches == 11, "snapshots are taken before iterations: that of state 11 before the last one"
    summary = RunRecord(tmp_path / "run").summary()["checkpointing"]
    assert summary["on_disk"] == 11


def test_lines_of_megatrons_log_are_of_one_iteration_after_a_recovery(tmp_path: Path) -> None:
    survived = survive(2, 1, tmp_path / "run", inject=("rank=0,iteration=7,phase=forward",), **TWO)
    losses = {line["iteration"]: line["loss"] for line in survived.record.metrics()}
    text = "".join(path.read_text() for path in (tmp_path / "run" / "logs").glob("*.out"))
    logged = {int(at): float(loss) for at, loss in re.findall(r"iteration +(\d+)/.*?lm loss: (\S+)", text)}
    assert {7, 8, 12} <= logged.keys()
    del logged[2]  # Megatron logs the mean of iterations 1 and 2 there
    for iteration, loss in logged.items():
        assert loss == pytest.approx(losses[iteration], rel=1e-5), iteration


@pytest.fixture(scope="module")
def persisted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Train 9 of 12 iterations; return the flags that load the windows and dense checkpoints of this job."""
    folder = tmp_path_factory.mktemp("persisted")
    saves: dict[str, Any] = {"save": str(folder / "dense"), "save_interval": 3, "exit_interval": 9}
    train(2, folder / "run", **TWO, **saves, moevement_persist_dir=str(folder / "windows"))
    return {"load": str(folder / "dense"), "moevement_load": str(folder / "windows")}


@pytest.mark.builds
def test_a_step_that_is_asked_for_by_name_is_overruled_by_no_window(persisted: dict[str, Any], tmp_path: Path) -> None:
    run = train(2, tmp_path / "run", **TWO, **persisted, ckpt_step=3)
    assert run.metrics()[0]["iteration"] == 4
    assert compare(failure_free(2, **TWO), run, common_iterations=True).first_difference is None


def test_iterations_that_the_window_does_not_replay_may_be_left_out(persisted: dict[str, Any], tmp_path: Path) -> None:
    """Skip an iteration. A job advises this when the same batch kills its rank repeatedly."""
    run = train(2, tmp_path / "run", **TWO, moevement_load=persisted["moevement_load"], iterations_to_skip=[11])
    assert [line["iteration"] for line in run.metrics()] == [9, 10, 12]
    ended = outcomes(2, None, check=False, **TWO, moevement_load=persisted["moevement_load"], iterations_to_skip=[7])
    assert {outcome.exit_code for outcome in ended} == {2}
    assert any("--iterations-to-skip" in outcome.output for outcome in ended)


def test_data_that_are_others_are_named_where_the_replay_comes_to_another_state(
    persisted: dict[str, Any], tmp_path: Path
) -> None:
    ended = outcomes(2, None, check=False, **TWO, moevement_load=persisted["moevement_load"], split="500,400,100")
    assert all(outcome.exit_code for outcome in ended)
    assert any(re.search(r"--split 500,400,100\b.*--save\b", outcome.output) for outcome in ended)
