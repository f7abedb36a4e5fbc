"""Jobs resume and reshard Megatron's dense checkpoints, and report those that are torn or failed."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from moevement_core.run.run_record import RunRecord
from moevement_core.run.verify import compare
from tests.failure_free import digest_of
from tests.functional.layouts import EP2, INTERLEAVED, OVERLAP, PP2, TP2, ULPS
from tests.harness import Outcome
from tests.launching import survive
from tests.training import losses, outcomes, train

DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
ASYNC = {"async_save": True, "use_persistent_ckpt_worker": True}
SIGMOID = {
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_load_balancing_type": "none",
    "moe_aux_loss_coeff": 0.0,
}

# Megatron keeps the run's length in the scheduler, and asserts that it did not change unless this flag is set.
OTHER_END = {"override_opt_param_scheduler": True}

FP8 = {"bf16": True, "use_distributed_optimizer": True, "fp8_format": "hybrid", "fp8_param_gather": True}
RESUMED: dict[str, tuple[int, dict[str, Any]]] = {
    "bf16-distributed-optimizer": (4, PP2 | EP2 | OVERLAP | DROPOUT | {"bf16": True}),
    "fp16-interleaved-expert-bias": (2, INTERLEAVED | SIGMOID | DROPOUT | {"fp16": True, "initial_loss_scale": 2**20}),
    "fp32-tensor": (2, TP2 | EP2 | DROPOUT),
    "async-nvrx": (2, PP2 | DROPOUT | ASYNC | {"bf16": True, "async_strategy": "nvrx"}),
    "async-mcore": (2, EP2 | DROPOUT | ASYNC | {"async_strategy": "mcore"}),
    "fp8-delayed": (2, PP2 | {**FP8, "fp8_recipe": "delayed", "fp8_amax_history_len": 3}),
    "fp8-blockwise": (2, EP2 | {**FP8, "fp8_recipe": "blockwise"}),
    "fp8-mxfp8": (2, EP2 | {**FP8, "fp8_recipe": "mxfp8", "reuse_grad_buf_for_mxfp8_param_ag": True}),
    "narrow-state": (
        2,
        EP2 | {**FP8, "fp8_recipe": "delayed", "use_precision_aware_optimizer": True, "main_params_dtype": "fp16",
               "exp_avg_dtype": "fp8", "exp_avg_sq_dtype": "fp16"},
    ),
    "remainders": (2, EP2 | {"bf16": True, "use_distributed_optimizer": True, "use_precision_aware_optimizer": True,
                             "exp_avg_dtype": "bf16"}),
}  # fmt: skip


ONLY_IN_FULL = (
    "bf16-distributed-optimizer", "async-mcore", "async-nvrx", "fp32-tensor",
    "fp8-delayed", "fp8-blockwise", "fp8-mxfp8", "narrow-state",
    "remainders",
)  # fmt: skip


SPARSE: dict[str, Any] = {
    "moevement_sparse_ckpt": True, "moevement_window": 2, "moevement_replicas": 1,
    "moevement_replicas_on_same_node": True,
}  # fmt: skip


@pytest.mark.parametrize("is_elastic", [False, pytest.param(True, marks=pytest.mark.full)], ids=["spares", "elastic"])
@pytest.mark.slow("three jobs")
def test_a_rank_is_replaced_in_a_job_that_began_from_a_dense_checkpoint(is_elastic: bool, tmp_path: Path) -> None:
    layout: dict[str, Any] = {"bf16": True, "use_distributed_optimizer": True} | ({} if is_elastic else PP2)
    sparse = SPARSE | ({"moevement_elastic": True} if is_elastic else {})
    train(2, None, **layout, save=str(tmp_path / "checkpoints"), save_interval=2, train_iters=2, **OTHER_END)
    resumed = {**layout, **sparse, "load": str(tmp_path / "checkpoints"), "train_iters": 10, **OTHER_END}
    wanted = survive(2, 0, tmp_path / "wanted", **resumed).record
    faults = ["rank=1,iteration=7,phase=forward"]
    if not is_elastic:  # an elastic job would go on with the other rank alone instead of waiting for the next spare
        faults += ["rank=0,iteration=9,phase=backward"]
    survived = survive(2, 1, tmp_path / "run", inject=tuple(faults), **resumed)
    assert len(survived.events("resized") if is_elastic else survived.failures()) == len(faults)
    assert compare(wanted, survived.record, common_iterations=True).first_difference is None
    assert survived.digest == digest_of(wanted)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] if name in ONLY_IN_FULL else []) for name in RESUMED]
)
@pytest.mark.slow("two jobs of four ranks with dense saves")
def test_a_resumed_run_equals_one_that_was_never_stopped(name: str, tmp_path: Path) -> None:
    nproc, layout = RESUMED[name]
    save: dict[str, Any] = {"save": str(tmp_path / "checkpoints"), "save_interval": 2}
    whole = train(nproc, tmp_path / "whole", **layout, **save, train_iters=6)
    assert sorted(path.name for path in (tmp_path / "checkpoints").glob("iter_*")) == [
        "iter_0000002", "iter_0000004", "iter_0000006",
    ]  # fmt: skip
    # The record has lines of iterations after the checkpoint, as if the job had stopped later than that.
    shutil.copytree(tmp_path / "whole", tmp_path / "resumed")
    resumed = train(nproc, tmp_path / "resumed", **layout, load=save["save"], ckpt_step=4, train_iters=6)
    assert [line["iteration"] for line in resumed.metrics()] == [1, 2, 3, 4, 5, 6]
    verdict = compare(whole, resumed)
    assert verdict.equal, verdict.first_difference
    assert resumed.events()[-2]["iteration"] == 4


@pytest.mark.parametrize(
    ("nproc", "layout"),
    [
        pytest.param(1, {}, marks=pytest.mark.full),
        pytest.param(2, TP2, marks=pytest.mark.full),
        pytest.param(4, {"pipeline_model_parallel_size": 4}, marks=pytest.mark.full),
        pytest.param(4, {"expert_model_parallel_size": 4}, marks=pytest.mark.full),
        pytest.param(2, INTERLEAVED, marks=pytest.mark.full),
    ],
    ids=["one-rank", "tensor", "pipeline-4", "expert-4", "interleaved"],
)
@pytest.mark.slow("its first case makes the checkpoint of four ranks")
def test_a_checkpoint_loads_under_another_layout(
    nproc: int, layout: dict[str, Any], saved_by_pp2_ep2: dict[str, Any], tmp_path: Path
) -> None:
    """Reshard weights, moments and counters: the losses are those of the layout that saved them."""
    resharded = train(
        nproc, tmp_path, use_distributed_optimizer=True, dist_ckpt_optim_fully_reshardable=True, train_iters=5,
        load=saved_by_pp2_ep2["save"], ckpt_step=2, no_load_rng=True, **layout,
    )  # fmt: skip
    expected = losses(saved_by_pp2_ep2["record"])
    assert losses(resharded) == pytest.approx({i: expected[i] for i in (3, 4, 5)}, abs=2 * ULPS, rel=0)


@pytest.fixture(scope="module")
def saved_by_pp2_ep2(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("reshard")
    record = train(
        4, folder / "run", **PP2, **EP2, use_distributed_optimizer=True, dist_ckpt_optim_fully_reshardable=True,
        save=str(folder / "checkpoints"), save_interval=2, train_iters=5,
    )  # fmt: skip
    return {"record": record, "save": str(folder / "checkpoints")}


def _refused(tmp_path: Path, **flags: Any) -> str:
    ranks = outcomes(2, tmp_path / "refused", check=False, **PP2, **flags)
    assert [rank.exit_code for rank in ranks] == [2, 2]
    return _one_line(ranks)


def _one_line(ranks: list[Outcome]) -> str:
    lines = [line for rank in ranks for line in rank.output.splitlines() if line.startswith("moevement: ")]
    errors = [line for line in lines if not line.startswith("moevement: INFO ")]
    assert len(errors) == 1, lines
    return errors[0]


@pytest.mark.slow("several jobs")
def test_a_torn_checkpoint_is_not_loaded(tmp_path: Path) -> None:
    save = tmp_path / "checkpoints"
    train(2, None, **PP2, save=str(save), save_interval=2)
    torn = save / "iter_0000004"
    shard = next(torn.glob("*.distcp"))
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-100])
    line = _refused(tmp_path, load=str(save))
    assert re.search(rf"\b{re.escape(shard.name)}\b.*\b{len(whole) - 100}\b.*\b{len(whole)}\b", line), line
    assert "--ckpt-step 2" in line
    shard.unlink()
    line = _refused(tmp_path, load=str(save))
    assert re.search(rf"\biteration 4\b.*\b{re.escape(shard.name)}\b", line), line
    assert str(len(whole)) not in line, "not a file that is too short"
    # A save that died before its end has no metadata, and the tracker still names the checkpoint before it.
    (torn / ".metadata").unlink()
    (save / "latest_checkpointed_iteration.txt").write_text("2")
    resumed = train(2, tmp_path / "resumed", **PP2, load=str(save), train_iters=3, **OTHER_END)
    assert [line["iteration"] for line in resumed.metrics()] == [3]
    assert re.search(r"\biteration 4\b.*\.metadata\b", _refused(tmp_path, load=str(save), ckpt_step=4))
    line = _refused(_with_tracker(save, "tw0").parent, load=str(save))
    assert re.search(r"\blatest_checkpointed_iteration\.txt\b.*\btw0\b", line), line


def _with_tracker(save: Path, text: str) -> Path:
    (save / "latest_checkpointed_iteration.txt").write_text(text)
    return save


@pytest.mark.full
def test_a_save_over_a_torn_checkpoint_replaces_it(tmp_path: Path) -> None:
    save = tmp_path / "checkpoints"
    torn = save / "iter_0000002"
    torn.mkdir(parents=True)
    (torn / "__0_0.distcp").write_bytes(b"half a shard")
    train(2, None, **PP2, save=str(save), save_interval=2)
    resumed = train(2, tmp_path / "resumed", **PP2, load=str(save), ckpt_step=2, train_iters=3, **OTHER_END)
    assert [line["iteration"] for line in resumed.metrics()] == [3]


@pytest.mark.parametrize("flags", [pytest.param({}, marks=pytest.mark.full), ASYNC], ids=["sync", "async"])
def test_a_failed_save_is_reported_and_training_goes_on(flags: dict[str, Any], tmp_path: Path) -> None:
    """Keep rank 1 from writing its part of iteration 2: folders stand where its files should go."""
    save = tmp_path / "checkpoints"
    for name in ("__1_0.distcp", "__1_1.distcp"):
        (save / "iter_0000002" / name).mkdir(parents=True)
    ranks = outcomes(2, tmp_path / "run", **PP2, **flags, save=str(save), save_interval=2)
    record = RunRecord(tmp_path / "run")
    assert [line["iteration"] for line in record.metrics()] == [1, 2, 3, 4]
    (failed,) = [event for event in record.events() if event["event"] == "checkpoint_failed"]
    assert failed["iteration"] == (None if flags else 2), "an asynchronous save fails later"
    # Rank 0 logs the error of rank 1: its class, or its number and the file.
    assert re.search(r"\bWARNING rank 0: .*\brank 1\b.*\b(IsADirectoryError|Errno 21)\b", ranks[0].output)
    # The next save succeeds, and the tracker names it.
    assert (save / "latest_checkpointed_iteration.txt").read_text() == "4"
    resumed = train(2, tmp_path / "resumed", **PP2, load=str(save), train_iters=5, **OTHER_END)
    assert [line["iteration"] for line in resumed.metrics()] == [5]


def test_a_folder_that_cannot_be_written_is_reported_and_training_goes_on(tmp_path: Path) -> None:
    blocked = tmp_path / "save"
    blocked.mkdir()
    for iteration in (2, 4):
        (blocked / f"iter_{iteration:07d}").write_text("in the way")
    record = train(2, tmp_path / "run", **PP2, save=str(blocked), save_interval=2)
    failed = [event for event in record.events() if event["event"] == "checkpoint_failed"]
    assert [event["iteration"] for event in failed] == [2, 4]
    assert str(blocked) in failed[0]["reason"]
    assert record.summary()["iterations"] == 4
