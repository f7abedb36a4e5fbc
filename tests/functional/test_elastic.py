"""Elastic jobs go on with fewer ranks when some are killed for good, and grow again when processes come back.

Each resized job is compared with a fresh job of its new size. The fresh job starts from a dense checkpoint that the
elastic job saved at the iteration from which it went on.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from moevement_core.storage.manifest import manifests
from tests.functional.elastic import ELASTIC, GONE, assert_same, fresh, resized
from tests.launching import survive
from tests.training import SCRIPT, start_from, train


def first_names(cases: Iterable[str], *quick: str) -> list[Any]:
    """Return all cases as parameters; cases that are not in ``quick`` are for the exhaustive matrix."""
    return [case if case in quick else pytest.param(case, marks=pytest.mark.full) for case in cases]


LAYOUTS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "DP4": (4, 3, {}),
    "DP3xdropout": (3, 2, {"hidden_dropout": 0.1, "attention_dropout": 0.1, "bf16": True}),
    "EP2xDP2": (4, 2, {"expert_model_parallel_size": 2, "bf16": True}),
    "PP2xDP2": (4, 2, {"pipeline_model_parallel_size": 2, "fp16": True, "initial_loss_scale": 2**10}),
    "TP2xDP2": (4, 2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
}


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("rank", "phase"),
    [
        pytest.param(0, "forward", marks=pytest.mark.full, id="first-forward"),
        pytest.param(-1, "step", marks=pytest.mark.full, id="last-step"),
    ],
)
@pytest.mark.slow("a dense save in every iteration, and a fresh job")
def test_a_job_goes_on_with_fewer_ranks_as_a_fresh_one_would(
    layout: str, rank: int, phase: str, tmp_path: Path
) -> None:
    nproc, left, overrides = LAYOUTS[layout]
    saved = tmp_path / "saved"
    survived = survive(
        nproc, 0, tmp_path / "elastic", options=GONE,
        inject=(f"rank={rank % nproc},iteration=6,phase={phase}",),
        **ELASTIC | overrides | {"save": str(saved), "save_interval": 1},
    )  # fmt: skip
    (event,) = resized(survived)
    assert (event["world_before"], event["world_size"]) == (nproc, left)
    assert event["digests_equal"]
    assert event["iteration"] == (6 if phase == "step" else 5)
    assert_same(survived, fresh(left, tmp_path / "fresh", saved, event["iteration"], **overrides), event["iteration"])


SLOTS = ELASTIC | {"moevement_expert_slots": 2, "moevement_rebalance_interval": 1000}


def fresh_with_slots(nproc: int, folder: Path, saved: Path, survived: Any, iteration: int, **overrides: Any) -> Any:
    """Train an elastic job without failures, from a dense checkpoint and with experts placed as in ``survived``."""
    placement = survived.record.folder / "placements" / f"iteration_{iteration}.json"
    start = {"load": str(saved), "ckpt_step": iteration, "moevement_expert_placement": str(placement)}
    return survive(nproc, 0, folder, **SLOTS | overrides | start).record


@pytest.mark.parametrize("slots", [pytest.param(slots, marks=pytest.mark.full) for slots in (2, 3)])
@pytest.mark.slow("three jobs")
def test_experts_in_slots_compute_what_megatrons_experts_compute(slots: int, tmp_path: Path) -> None:
    """Compare losses and gradient norms from one checkpoint. Only the rounding of sums in another order may differ."""
    start = start_from(tmp_path / "start")
    plain = train(2, tmp_path / "plain", **{"global_batch_size": 24, "train_iters": 6} | start)
    job = SLOTS | {"moevement_expert_slots": slots, "train_iters": 6} | start
    elastic = survive(4 if slots == 2 else 3, 0, tmp_path / "elastic", **job).record
    for line, other in zip(elastic.metrics(), plain.metrics(), strict=True):
        assert line["loss"] == pytest.approx(other["loss"], rel=2e-5)
        assert line["grad_norm"] == pytest.approx(other["grad_norm"], rel=2e-4)


SLOT_LAYOUTS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "DP4": (4, 3, {}),
    "PP2xDP3": (6, 4, {"pipeline_model_parallel_size": 2, "moevement_expert_slots": 3}),
    "DP3xBF16": (3, 2, {"bf16": True, "moevement_expert_slots": 3, "hidden_dropout": 0.1, "global_batch_size": 12}),
    "DP3xsharded": (
        3, 2, {
            "moevement_expert_slots": 3, "use_distributed_optimizer": True, "moevement_recovery": "redo",
            "dist_ckpt_optim_fully_reshardable": True,
        },
    ),
    "DP3xonereplica": (
        3, 2, {"moevement_expert_slots": 2, "moevement_min_replicas": 1, "moevement_recovery": "redo"},
    ),
}  # fmt: skip
"""Ranks before and after a loss, and flags, by layout.

In the last two, state dies with its rank: shards of the dense part, or the only replica of an expert.
"""


@pytest.mark.parametrize("layout", first_names(SLOT_LAYOUTS, "DP3xBF16"))
@pytest.mark.slow("dense saves, and a fresh job")
def test_elastic_experts_go_on_with_fewer_ranks_as_a_fresh_job_would(layout: str, tmp_path: Path) -> None:
    nproc, left, overrides = SLOT_LAYOUTS[layout]
    saved = tmp_path / "saved"
    may_go_back = "moevement_recovery" in overrides
    survived = survive(
        nproc, 0, tmp_path / "elastic", options=GONE, inject=("rank=0,iteration=6,phase=backward",),
        **SLOTS | overrides | {"save": str(saved), "save_interval": 1 if may_go_back else 5},
    )  # fmt: skip
    (event,) = resized(survived)
    assert (event["world_before"], event["world_size"]) == (nproc, left)
    at = event["iteration"]
    assert at == 5 or (at == 4 and may_go_back)
    other = fresh_with_slots(left, tmp_path / "fresh", saved, survived, at, **overrides)
    assert_same(survived, other, at)


SHARDED = {"use_distributed_optimizer": True, "moevement_window": 2}
LOST: dict[str, tuple[int, int, dict[str, Any]]] = {
    "DP3xredo": (3, 2, {"moevement_recovery": "redo"}),
    "DP3xBF16xredo": (3, 2, {"moevement_recovery": "redo", "bf16": True, "hidden_dropout": 0.1}),
    "PP2xDP2xredo": (4, 2, {"moevement_recovery": "redo", "pipeline_model_parallel_size": 2}),
    "EP2xDP2xredo": (4, 2, {"moevement_recovery": "redo", "expert_model_parallel_size": 2, "bf16": True}),
}


@pytest.mark.parametrize("layout", first_names(LOST))
@pytest.mark.slow("a dense save in every iteration, and a fresh job")
def test_lost_shards_come_from_copies_on_peers(layout: str, tmp_path: Path) -> None:
    """Kill a rank that alone holds its shard of the distributed optimizer.

    The job restores the newest state that it can compute from gradients on peers. The restored state has the bits that
    the lost state had, although its layout is new.
    """
    nproc, left, overrides = LOST[layout]
    overrides = SHARDED | overrides
    saved = tmp_path / "saved"
    survived = survive(
        nproc, 0, tmp_path / "elastic", options=GONE, inject=("rank=1,iteration=7,phase=backward",),
        **ELASTIC | overrides | {"save": str(saved), "save_interval": 1},
    )  # fmt: skip
    (event,) = resized(survived)
    assert (event["world_before"], event["world_size"]) == (nproc, left)
    assert event["iteration"] in (5, 6)
    survived.check_metrics(9)
    assert_same(survived, fresh(left, tmp_path / "fresh", saved, event["iteration"], **overrides), event["iteration"])


WINDOWS: dict[str, tuple[int, dict[str, Any]]] = {
    "DP3": (3, {"window": 2, "global_batch_size": 12}),
    "DP3xslots": (
        3, {"window": 3, "moevement_expert_slots": 3, "dist_ckpt_optim_fully_reshardable": True, "train_iters": 16},
    ),
    "PP2xDP2xBF16": (4, {"window": 3, "pipeline_model_parallel_size": 2, "bf16": True}),
}  # fmt: skip


@pytest.mark.parametrize("layout", first_names(WINDOWS, "DP3"))
def test_lost_shards_come_from_a_sparse_window_that_is_run_again(layout: str, tmp_path: Path) -> None:
    """Kill a rank whose gradients no peer has.

    The remaining ranks replay. Their sums have another order, so losses are compared up to rounding.
    """
    nproc, job = WINDOWS[layout]
    job = job | {"use_distributed_optimizer": True, "moevement_window": job["window"]}
    del job["window"]
    job = ELASTIC | job
    plain = survive(nproc, 0, tmp_path / "plain", options=GONE, **job).record
    at = job["train_iters"] - 1
    survived = survive(
        nproc, 0, tmp_path / "elastic", options=GONE, inject=(f"rank=0,iteration={at},phase=forward",), **job
    )
    (event,) = resized(survived)
    assert event["iteration"] >= at - 1 - 2 * job["moevement_window"]
    survived.check_metrics(job["train_iters"])
    loss, norm = (1e-2, 0.2) if "bf16" in job else (1e-4, 1e-2)
    for line, other in zip(survived.record.metrics(), plain.metrics(), strict=True):
        assert line["loss"] == pytest.approx(other["loss"], rel=loss)
        assert line["grad_norm"] == pytest.approx(other["grad_norm"], rel=norm)


GROWING = {"train_iters": 60, "save_interval": 1, "moevement_join_wait": 0.5}
"""Flags of a job that runs for some seconds after the loss, because a new process needs seconds to join."""
BACK = ("--respawn-after", "0.5")
"""Launcher options with which a killed process starts again while the job runs with fewer ranks."""


@pytest.mark.parametrize("layout", first_names(("DP3", "PP2xDP2xsharded", "slots")))
@pytest.mark.slow("a process joins while the job saves every iteration")
def test_a_job_grows_again_as_a_fresh_one_of_that_size(layout: str, tmp_path: Path) -> None:
    """Check that the job loses no committed iteration when it grows, and then computes what a fresh job computes."""
    layouts: dict[str, dict[str, Any]] = {
        "DP3": {},
        "PP2xDP2xsharded": SHARDED | {"pipeline_model_parallel_size": 2, "moevement_recovery": "redo"},
        "slots": {"moevement_expert_slots": 3, "hidden_dropout": 0.1},
    }
    overrides = layouts[layout]
    nproc = 4 if layout.startswith("PP2") else 3
    saved = tmp_path / "saved"
    survived = survive(
        nproc, 0, tmp_path / "elastic", options=BACK, inject=("rank=1,iteration=6,phase=backward",),
        **ELASTIC | overrides | GROWING | {"save": str(saved)},
    )  # fmt: skip
    smaller, larger = resized(survived)
    assert [smaller["world_size"], larger["world_before"], larger["world_size"]] == [2, 2, nproc]
    assert larger["digests_equal"]
    survived.check_metrics(60)
    if layout == "slots":
        other = fresh_with_slots(
            nproc, tmp_path / "fresh", saved, survived, larger["iteration"], **overrides, train_iters=60
        )
    else:
        other = fresh(nproc, tmp_path / "fresh", saved, larger["iteration"], **overrides, train_iters=60)
    # The generator of expert weights may differ on the rank that joined: that rank has its own, and the fresh job loads
    # the generator of a saved rank. No iteration uses this generator. Dropout uses the others, so equal losses show
    # that those are equal.
    assert_same(survived, other, larger["iteration"], (nproc - 1,) if layout == "slots" else ())


@pytest.mark.full
@pytest.mark.slow("a dense save in every iteration, and a fresh job")
def test_experts_move_where_loads_ask_for_it(tmp_path: Path) -> None:
    """Rebalance experts. The job then computes the results of a new job that starts with the moved replicas."""
    saved = tmp_path / "saved"
    flags = {"moevement_expert_slots": 3, "moevement_rebalance_interval": 4, "save": str(saved), "save_interval": 1}
    survived = survive(3, 0, tmp_path / "elastic", options=GONE, **SLOTS | flags)
    events = resized(survived)
    assert events
    for event in events:
        assert (event["world_before"], event["world_size"], event["lost"]) == (3, 3, "")
        assert event["iteration"] % 4 == 0
        assert event["digests_equal"]
    survived.check_metrics(9)
    last = events[-1]["iteration"]
    other = fresh_with_slots(
        3, tmp_path / "fresh", saved, survived, last, **flags | {"moevement_rebalance_interval": 1000, "save": False}
    )
    assert_same(survived, other, last)


@pytest.mark.parametrize("kind", first_names(("sharded", "slots")))
def test_windows_on_disk_are_loaded_by_another_number_of_ranks(kind: str, tmp_path: Path) -> None:
    kinds: dict[str, dict[str, Any]] = {
        "sharded": SHARDED | {"pipeline_model_parallel_size": 2},
        "slots": {"moevement_expert_slots": 2, "bf16": True},
    }
    overrides = kinds[kind] | {"moevement_recovery": "redo"}
    saved, windows = tmp_path / "saved", tmp_path / "windows"
    overrides |= {"save": str(saved), "save_interval": 1, "train_iters": 12}
    written = {"moevement_persist_dir": str(windows), "exit_interval": 9}
    first = survive(4, 0, tmp_path / "first", options=GONE, **ELASTIC | overrides | written)
    newest = manifests(windows)[0]
    nproc = 2 if kind == "sharded" else 3
    loaded = survive(
        nproc, 0, tmp_path / "loaded", options=GONE,
        **ELASTIC | overrides | {"moevement_load": str(windows), "save": False},
    )  # fmt: skip
    metrics = [line["iteration"] for line in loaded.record.metrics()]
    assert metrics == list(range(newest.reaches + 1, 13))
    overrides |= {"save": False}
    if kind == "sharded":
        other = fresh(nproc, tmp_path / "fresh", saved, newest.reaches, **overrides)
    else:
        placement = loaded.record.folder / "placements" / f"iteration_{newest.reaches}.json"
        assert placement.exists(), list(placement.parent.iterdir())
        other = fresh_with_slots(nproc, tmp_path / "fresh", saved, loaded, newest.reaches, **overrides)
    assert first.record.summary()["iterations"] == 9
    assert_same(loaded, other, newest.reaches)


@pytest.mark.full
def test_a_second_failure_finds_what_the_first_one_has_left(tmp_path: Path) -> None:
    """Kill a rank in the update of iteration 6, and a second rank in the evaluation after it.

    The second kill hits a resized job that has all of its state. After two resizes no former model is in memory.
    """
    script = tmp_path / "counting.py"
    script.write_text(COUNTING.format(script=str(SCRIPT), folder=str(tmp_path)))
    survived = survive(
        3, 0, tmp_path / "elastic", options=GONE, script=script,
        inject=("rank=2,iteration=6,phase=step", "rank=1,iteration=6,phase=eval"),
        **ELASTIC | {"eval_iters": 1, "eval_interval": 3},
    )  # fmt: skip
    assert survived.events("restart") == []
    assert resized(survived)[-1]["world_size"] == 1
    survived.check_metrics(9)
    lines = {line["iteration"]: line for line in survived.record.metrics()}
    assert lines[6]["grad_norm"] is not None
    assert (tmp_path / "models").read_text() == "1"
    assert set((tmp_path / "alive").read_text().split()) == {"0"}


@pytest.mark.full
def test_a_spare_that_has_just_got_its_state_keeps_it_through_a_second_failure(tmp_path: Path) -> None:
    """Kill a rank, and the only other rank in the evaluation that the job repeats after the spare has joined."""
    survived = survive(
        2, 1, tmp_path / "elastic", options=GONE,
        inject=("rank=1,iteration=6,phase=step", "rank=0,iteration=6,phase=eval"),
        **ELASTIC | {"eval_iters": 1, "eval_interval": 3},
    )  # fmt: skip
    assert survived.events("restart") == []
    assert [(event["world_size"], event["iteration"]) for event in resized(survived)][-1] == (1, 6)
    survived.check_metrics(9)


@pytest.mark.full
def test_a_loss_right_after_a_resize_goes_back_to_before_it(tmp_path: Path) -> None:
    """Kill a second rank, and with it its shard, before peers have a window of the new size."""
    survived = survive(
        3, 0, tmp_path / "elastic", options=GONE,
        inject=("rank=2,iteration=6,phase=backward", "rank=1,iteration=7,phase=forward"),
        **ELASTIC | SHARDED | {"moevement_recovery": "redo"},
    )  # fmt: skip
    assert survived.events("restart") == []
    assert [event["world_size"] for event in resized(survived)] == [2, 1]
    assert resized(survived)[-1]["iteration"] >= 3
    survived.check_metrics(9)


COUNTING = """
import gc
import sys
from pathlib import Path

from megatron.core.distributed import DistributedDataParallel

build = DistributedDataParallel.__init__


def alive():
    return sum(type(one) is DistributedDataParallel for one in gc.get_objects())


def counted(self, *args, **kwargs):
    with open(Path({folder!r}, "alive"), "a") as file:
        file.write(f"{{alive() - 1}}\\n")  # the new model is not finished, and among the objects
    build(self, *args, **kwargs)


DistributedDataParallel.__init__ = counted
sys.argv[0] = {script!r}
exec(compile(Path({script!r}).read_text(), {script!r}, "exec"), globals())
gc.unfreeze()
gc.collect()
Path({folder!r}, "models").write_text(str(alive()))
"""
