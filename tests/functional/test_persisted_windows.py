"""A new job resumes windows on disk with the bits of a job that never stopped, though files are lost or damaged."""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from moevement_core.run.run_record import RunRecord
from moevement_core.run.verify import compare
from moevement_core.storage.manifest import manifests
from moevement_core.util.lock import acquire
from tests.failure_free import failure_free
from tests.launching import command, logs
from tests.training import SCRIPT, flags, outcomes, train

JOB: dict[str, Any] = {"expert_model_parallel_size": 2, "use_distributed_optimizer": True, "bf16": True,
                       "overlap_grad_reduce": True, "overlap_param_gather": True, "hidden_dropout": 0.1}  # fmt: skip
SPARSE: dict[str, Any] = {
    "moevement_sparse_ckpt": True, "moevement_window": 2, "moevement_ranks_per_node": 1, "moevement_replicas": 1,
}  # fmt: skip


@dataclass(frozen=True)
class Persisted:
    """Windows that a run of nine iterations left on two nodes, and a run of twelve that never stopped."""

    failure_free: RunRecord
    nodes: Path

    def copied_to(self, folder: Path) -> str:
        shutil.copytree(self.nodes, folder / "nodes")
        return str(folder / "nodes" / "{node}")


@pytest.fixture(scope="module")
def persisted(tmp_path_factory: pytest.TempPathFactory) -> Persisted:
    folder = tmp_path_factory.mktemp("persisted")
    wanted = failure_free(2, train_iters=12, **JOB)
    template = str(folder / "nodes" / "{node}")
    first = train(2, folder / "first", train_iters=9, **JOB, **SPARSE, moevement_persist_dir=template)
    newest = manifests(folder / "nodes" / "0")
    assert [manifest.reaches for manifest in newest] == sorted((manifest.reaches for manifest in newest), reverse=True)
    assert newest == manifests(folder / "nodes" / "1"), "the same manifests on every node"
    assert first.summary()["checkpointing"]["on_disk"] == newest[0].reaches
    assert len(newest) == 2
    return Persisted(wanted, folder / "nodes")


def newest_files(persisted: Persisted, node: int, rank: int) -> list[str]:
    name = manifests(persisted.nodes / str(node))[0].name
    files = sorted(path.name for path in (persisted.nodes / str(node) / name).glob(f"rank_{rank:05d}_*"))
    assert files
    return [f"{node}/{name}/{file}" for file in files]


def go_on(folder: Path, template: str, **changes: Any) -> RunRecord:
    return train(2, folder / "run", train_iters=12, **JOB, **SPARSE | changes, moevement_load=template)


def check(persisted: Persisted, run: RunRecord, reaches: int) -> None:
    assert compare(persisted.failure_free, run, common_iterations=True).first_difference is None
    (recovery,) = run.summary()["checkpointing"]["recoveries"]
    assert (recovery["until"], recovery["verified_until"]) == (reaches, reaches)
    assert recovery["sources"]["file"] > 0
    assert [line["iteration"] for line in run.metrics()] == list(range(reaches + 1, 13))


def test_the_job_goes_on_though_a_node_is_lost_and_writes_to_the_same_folders(
    persisted: Persisted, tmp_path: Path
) -> None:
    template = persisted.copied_to(tmp_path)
    newest = manifests(tmp_path / "nodes" / "0")[0]
    shutil.rmtree(tmp_path / "nodes" / "1")
    run = go_on(tmp_path, template, moevement_persist_dir=template)
    check(persisted, run, newest.reaches)
    written = manifests(tmp_path / "nodes" / "1")
    assert written
    assert all(manifest.job != newest.job for manifest in written), "windows of the run before are gone"
    assert run.summary()["checkpointing"]["on_disk"] == written[0].reaches > newest.reaches


@pytest.mark.full
def test_damaged_and_missing_files_are_replaced_by_copies(persisted: Persisted, tmp_path: Path) -> None:
    template = persisted.copied_to(tmp_path)
    damaged = tmp_path / "nodes" / newest_files(persisted, node=0, rank=0)[0]
    data = bytearray(damaged.read_bytes())
    data[-5] ^= 1
    damaged.write_bytes(data)
    (tmp_path / "nodes" / newest_files(persisted, node=1, rank=1)[1]).unlink()
    check(persisted, go_on(tmp_path, template), manifests(tmp_path / "nodes" / "0")[0].reaches)


@pytest.mark.full
def test_a_window_that_is_not_whole_anywhere_gives_way_to_the_one_before(persisted: Persisted, tmp_path: Path) -> None:
    template = persisted.copied_to(tmp_path)
    for node in (0, 1):
        (tmp_path / "nodes" / newest_files(persisted, node, rank=0)[0]).write_bytes(b"torn")
    check(persisted, go_on(tmp_path, template), manifests(tmp_path / "nodes" / "0")[1].reaches)


def test_an_edited_manifest_and_a_pipe_among_the_files_are_said_and_done_without(
    persisted: Persisted, tmp_path: Path
) -> None:
    template = persisted.copied_to(tmp_path)
    newest, older = manifests(tmp_path / "nodes" / "0")
    for node in (0, 1):
        path = tmp_path / "nodes" / str(node) / f"{newest.name}.json"
        manifest = json.loads(path.read_text())
        manifest["progress"]["consumed_train_samples"] = 0  # it would train on other data
        path.write_text(json.dumps(manifest))
    pipe = next((tmp_path / "nodes" / "0" / older.name).glob("rank_00000_*"))
    pipe.unlink()
    os.mkfifo(pipe)
    ended = outcomes(2, tmp_path / "run", train_iters=12, **JOB, **SPARSE, moevement_load=template)
    check(persisted, RunRecord(tmp_path / "run"), older.reaches)
    warnings = [
        line for outcome in ended for line in outcome.output.splitlines() if line.startswith("moevement: WARNING")
    ]
    assert any(f"{newest.name}.json" in line for line in warnings), warnings
    assert any(pipe.name in line for line in warnings), warnings


@pytest.mark.builds
def test_the_job_goes_on_with_another_arithmetic_says_so_and_recovers_from_what_it_came_to(
    persisted: Persisted, tmp_path: Path
) -> None:
    template = persisted.copied_to(tmp_path)
    (newest, *_) = manifests(tmp_path / "nodes" / "0")
    job = {"train_iters": 12, **JOB, **SPARSE, "moevement_load": template, "run_dir": tmp_path / "run"}
    kill = f"rank=0,iteration={newest.reaches + 3},phase=backward"
    other = {**os.environ, "ATEN_CPU_CAPABILITY": "default"}
    launcher = command(
        "--nproc", "2", "--spares", "1", str(SCRIPT), *flags(**job), "--moevement-inject", kill, env=other
    )
    _, err = launcher.communicate(timeout=300)
    assert launcher.returncode == 0, err + logs(tmp_path / "run")
    log = (tmp_path / "run" / "logs" / "rank_0.out").read_text()
    loaded, recovered = RunRecord(tmp_path / "run").summary()["checkpointing"]["recoveries"]
    assert loaded["until"] == newest.reaches
    if loaded["verified_until"] != newest.reaches:  # on some processors the replay may compute the same bits
        wrote, *_ = newest.arithmetic
        assert re.search(rf"WARNING rank 0: .*\b{newest.name}\b.*{re.escape(wrote)}", log), log
    assert recovered["until"] >= recovered["verified_until"] > newest.reaches


def refusals(folder: Path, **changes: Any) -> list[str]:
    """Return the lines that name flags, from a job that ends with exit code 2 before it trains."""
    job = {"train_iters": 12, **JOB, **SPARSE, **changes}
    ended = outcomes(2, None, check=False, **job)
    assert {outcome.exit_code for outcome in ended} == {2}
    return [line for outcome in ended for line in outcome.output.splitlines() if line.startswith("moevement: --")]


def test_windows_of_another_job_are_neither_loaded_nor_overwritten(persisted: Persisted, tmp_path: Path) -> None:
    template = persisted.copied_to(tmp_path)
    (line,) = refusals(tmp_path, moevement_load=template, weight_decay=0.2)
    assert re.search(r"--moevement-load\b.*--weight-decay 0\.2\b.*\b0\.1\b", line), line
    (line,) = refusals(tmp_path, moevement_persist_dir=template)
    newest = manifests(tmp_path / "nodes" / "0")[0].name
    assert re.search(rf"--moevement-persist-dir\b.*\b{newest}\b.*--moevement-load\b", line), line
    assert len(manifests(tmp_path / "nodes" / "0")) == 2


@pytest.mark.parametrize("flag", ["--run-dir", "--moevement-persist-dir"])
def test_a_folder_that_another_job_writes_to_is_refused_before_anything_is_overwritten(
    flag: str, tmp_path: Path
) -> None:
    run_dir, windows = tmp_path / "run", tmp_path / "windows"
    held = run_dir if flag == "--run-dir" else windows
    held.mkdir()
    (run_dir / "metrics.jsonl").parent.mkdir(exist_ok=True)
    (run_dir / "metrics.jsonl").write_text('{"iteration": 1}\n')
    with acquire(held, "beef", flag):
        ended = outcomes(2, run_dir, check=False, **JOB, **SPARSE, moevement_persist_dir=str(windows))
        assert {outcome.exit_code for outcome in ended} == {2}
        output = [line for outcome in ended for line in outcome.output.splitlines()]
        (line,) = [line for line in output if line.startswith(f"moevement: {flag} {held}")]
        assert re.search(rf"\bbeef\b.*\bpid {os.getpid()}\b", line), line
        assert [path.name for path in held.iterdir() if path.name.startswith((".", "w"))] == [".moevement-lock"]
        if flag == "--run-dir":
            assert (run_dir / "metrics.jsonl").read_text() == '{"iteration": 1}\n'


@pytest.mark.full
def test_a_newer_dense_checkpoint_wins_and_an_empty_folder_is_a_fresh_start(
    persisted: Persisted, tmp_path: Path
) -> None:
    dense: dict[str, Any] = {"save": str(tmp_path / "dense"), "save_interval": 10}
    train(2, None, train_iters=12, exit_interval=10, **JOB, **dense)
    template = persisted.copied_to(tmp_path)
    (tmp_path / "empty").mkdir()
    assert manifests(tmp_path / "nodes" / "0")[0].reaches < 10
    for folder, load, first in ((template, str(tmp_path / "dense"), 11), (str(tmp_path / "empty"), None, 1)):
        run = train(
            2, tmp_path / f"run{first}", train_iters=12, **JOB, **SPARSE, moevement_load=folder,
            moevement_persist_dir=folder, load=load,
        )  # fmt: skip
        assert run.metrics()[0]["iteration"] == first
        assert not run.summary()["checkpointing"]["recoveries"]
        assert compare(persisted.failure_free, run, common_iterations=True).first_difference is None


@pytest.mark.full
def test_a_window_of_the_last_iteration_is_the_final_state(persisted: Persisted, tmp_path: Path) -> None:
    reaches = manifests(persisted.nodes / "0")[0].reaches
    whole = failure_free(2, train_iters=reaches, **JOB)
    run = train(2, tmp_path / "run", train_iters=reaches, **JOB, **SPARSE, moevement_load=persisted.copied_to(tmp_path))
    assert run.summary()["state_digest"]["all"] == whole.summary()["state_digest"]["all"]


@pytest.mark.full
@pytest.mark.parametrize("size", [7, 8, 10])
def test_a_window_of_more_iterations_than_operators(size: int, tmp_path: Path) -> None:
    """Check that a window has at most as many iterations as operators.

    A job must resume the iteration that the manifest names.
    """
    job: dict[str, Any] = {"bf16": True, "num_layers": 1, "num_experts": 2}
    sparse = SPARSE | {"moevement_replicas": 0, "moevement_window": size}
    folder = str(tmp_path / "windows")
    wanted = failure_free(1, train_iters=24, **job)
    first = train(1, tmp_path / "first", train_iters=20, **job, **sparse, moevement_persist_dir=folder)
    again = train(1, tmp_path / "again", train_iters=24, **job, **sparse, moevement_load=folder)
    (recovery,) = again.summary()["checkpointing"]["recoveries"]
    assert first.summary()["checkpointing"]["window"] == 6, "operators of the only stage"
    assert recovery["until"] == first.summary()["checkpointing"]["on_disk"] == again.metrics()[0]["iteration"] - 1
    assert compare(wanted, again, common_iterations=True).first_difference is None


@pytest.mark.full
@pytest.mark.parametrize("kind", ["aligned", "rolling"])
def test_one_shared_folder_without_the_distributed_optimizer(kind: str, tmp_path: Path) -> None:
    job: dict[str, Any] = {"pipeline_model_parallel_size": 2, "fp16": True, "initial_loss_scale": 2**17,
           "loss_scale_window": 2, "hysteresis": 1, "untie_embeddings_and_output_weights": False}  # fmt: skip
    sparse = SPARSE | {"moevement_window_kind": kind, "moevement_window": 3}
    wanted = failure_free(4, train_iters=16, **job)
    folder = str(tmp_path / "windows")
    train(4, tmp_path / "first", train_iters=11, **job, **sparse, moevement_persist_dir=folder)
    ranks = {path.name[:10] for path in Path(folder).glob("*/rank_*")}
    assert len(ranks) == 4, "no copies where everybody sees every file"
    again = train(4, tmp_path / "again", train_iters=16, **job, **sparse, moevement_load=folder)
    assert compare(wanted, again, common_iterations=True).first_difference is None
