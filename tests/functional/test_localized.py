"""Stages that lost their state replay alone; other stages keep their state, feed them, and re-execute nothing."""

from __future__ import annotations

import re
from pathlib import Path
from random import Random
from typing import Any

import pytest

from moevement_core.run.run_record import RunRecord
from moevement_core.util.damage import Damage
from tests.failure_free import failure_free
from tests.functional.bodies import clipped_as_with_transformer_engine, wiped_with_a_damaged_log, with_shapes_exchanged
from tests.functional.wiped import (
    ALWAYS_REORDER,
    BF16,
    DISTRIBUTED,
    DROPOUT,
    EP2,
    EXPERT_BIAS,
    FP16,
    ITERATIONS,
    OVERLAP,
    PP2,
    RECOMPUTE,
    ROLLING,
    TIED,
    TP2,
    VPP2,
    check,
    recover,
)
from tests.harness import run_ranks
from tests.training import SCRIPT, flags

PP4: dict[str, Any] = {"pipeline_model_parallel_size": 4}
Case = tuple[int, dict[str, Any], dict[str, Any], set[int]]
# name: (ranks, flags of the job, flags of sparse checkpointing, stages that replay)
RUNS: dict[str, Case] = {
    "an interleaved stage, whose neighbour feeds it both ways": (
        2, VPP2 | BF16 | OVERLAP, {"moevement_window": 3, "moevement_wipe_at": 7, "moevement_wipe_stages": 1}, {1},
    ),
    "the first of four stages, FP16 with overflows, twice": (
        4, PP4 | FP16, {"moevement_window": 3, "moevement_wipe_at": [6, 9], "moevement_wipe_stages": 0}, {0},
    ),
    "two adjacent stages together": (
        4, PP4 | FP16 | DROPOUT,
        {"moevement_window": 4, "moevement_wipe_at": 8, "moevement_wipe_stages": [1, 2]} | ROLLING, {1, 2},
    ),
    "two stages apart at the same time": (
        4, PP4 | BF16 | RECOMPUTE, {"moevement_window": 2, "moevement_wipe_at": 5, "moevement_wipe_stages": [0, 2]},
        {0, 2},
    ),
    "tied embeddings tie the ends": (
        4, PP4 | BF16 | TIED, {"moevement_window": 3, "moevement_wipe_at": [2, 8], "moevement_wipe_stages": 0}, {0, 3},
    ),
    "a stage of two expert-parallel ranks, expert bias, overlap": (
        4, PP2 | EP2 | BF16 | OVERLAP | EXPERT_BIAS,
        {"moevement_window": 3, "moevement_wipe_at": [1, 8], "moevement_wipe_stages": 1} | ALWAYS_REORDER, {1},
    ),
    "a stage of two tensor-parallel ranks": (
        4, PP2 | TP2 | BF16 | DISTRIBUTED,
        {"moevement_window": 3, "moevement_wipe_at": 7, "moevement_wipe_stages": 0}, {0},
    ),
}  # fmt: skip


def check_scope(recovered: RunRecord, recoveries: list[dict[str, Any]], stages: set[int], case: str = "") -> None:
    """Check by the record of the run, as an operator reads it, that exactly ``stages`` replayed."""
    events = [event for event in recovered.events() if event["event"] == "recovery"]
    assert [event["until"] for event in events] == [recovery["until"] for recovery in recoveries], case
    for event in events:
        assert {int(stage) for stage, count in event["replayed_by_stage"].items() if count} == stages, case
        assert (event["fed_bytes"] > 0) == (stages != {int(stage) for stage in event["replayed_by_stage"]}), case
        # Snapshots record what was sent in the iteration before them. So only the last iteration has no such record.
        assert event["sends"] > 0 or event["until"] < 3, case


@pytest.mark.full
def test_a_stage_replays_alone_where_shapes_are_sent_along(tmp_path: Path) -> None:
    job: dict[str, Any] = PP4 | BF16 | {"train_iters": ITERATIONS}
    sparse: dict[str, Any] = {
        "moevement_sparse_ckpt": True, "moevement_ranks_per_node": 1, "moevement_replicas": 1, "moevement_window": 3,
        "moevement_wipe_at": 7, "moevement_wipe_stages": 2,
    }  # fmt: skip
    wanted = failure_free(4, **job)
    argv = [str(SCRIPT), *flags(**job, **sparse), "--run-dir", str(tmp_path / "recovered")]
    run_ranks(with_shapes_exchanged, 4, argv, init_process_group=False)
    recovered = RunRecord(tmp_path / "recovered")
    check_scope(recovered, check(wanted, recovered, sparse), {2})


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if number == 0 else [pytest.mark.full]) for number, name in enumerate(RUNS)],
)
def test_the_stages_that_lost_their_state_replay_alone(name: str, tmp_path: Path) -> None:
    ranks, job, sparse, stages = RUNS[name]
    wanted, recovered = recover(ranks, job, sparse, tmp_path)
    check_scope(recovered, check(wanted, recovered, sparse), stages)
    assert all(line["log_bytes"] > 0 for line in recovered.metrics())


@pytest.mark.full
@pytest.mark.parametrize("seed", range(20))
def test_any_stages_of_any_pipeline_at_any_iteration(seed: int, tmp_path: Path) -> None:
    random = Random(seed)
    ranks, stages, layout = random.choice([(2, 2, PP2), (2, 2, VPP2), (4, 4, PP4), (4, 2, PP2 | EP2), (4, 2, PP2)])
    job = dict(layout)
    for options in ([BF16, FP16, {}], [{}, DISTRIBUTED, OVERLAP], [{}, DROPOUT], [{}, EXPERT_BIAS], [{}, RECOMPUTE]):
        job |= random.choice(options)
    lost = sorted(random.sample(range(stages), random.randint(1, stages - 1)))
    sparse = {
        "moevement_window": random.randint(1, 6), "moevement_window_kind": random.choice(["aligned", "rolling"]),
        "moevement_wipe_at": sorted(random.sample(range(1, ITERATIONS), 2)), "moevement_wipe_stages": lost,
        **random.choice([{}, ALWAYS_REORDER]),
    }  # fmt: skip
    case = f"seed {seed}: {ranks} ranks, {job}, {sparse}"
    print(case)
    wanted, recovered = recover(ranks, job, sparse, tmp_path)
    check_scope(recovered, check(wanted, recovered, sparse, case), set(lost), case)


def test_a_damaged_log_is_found_before_it_is_fed_and_all_stages_roll_back(tmp_path: Path) -> None:
    job: dict[str, Any] = PP2 | BF16 | {"train_iters": 9}
    sparse: dict[str, Any] = {
        "moevement_sparse_ckpt": True, "moevement_ranks_per_node": 1, "moevement_replicas": 1, "moevement_window": 2,
        "moevement_wipe_at": 6, "moevement_wipe_stages": 1,
    }  # fmt: skip
    wanted = failure_free(2, **job)
    argv = [str(SCRIPT), *flags(**job, **sparse), "--run-dir", str(tmp_path / "recovered")]
    outcomes = run_ranks(wiped_with_a_damaged_log, 2, argv, 0, init_process_group=False)
    warnings = re.findall(r"^moevement: WARNING rank 0: (.*)$", outcomes[0].output, re.MULTILINE)
    (damage,) = filter(None, map(Damage.parse, warnings))
    assert "boundary log" in damage.check
    assert re.findall(r"\d+", damage.data) == ["6"]
    recovered = RunRecord(tmp_path / "recovered")
    check_scope(recovered, check(wanted, recovered, sparse), {0, 1})


@pytest.mark.full
def test_without_the_log_all_stages_roll_back_and_the_reason_is_reported(tmp_path: Path) -> None:
    sparse = {"moevement_window": 3, "moevement_wipe_at": 7, "moevement_wipe_stages": 1}
    wanted, recovered = recover(2, PP2 | BF16, sparse | {"moevement_log_memory_gb": 1e-5}, tmp_path)
    check_scope(recovered, check(wanted, recovered, sparse), {0, 1})


@pytest.mark.full
def test_a_stage_alone_clips_by_a_norm_that_was_a_tensor(tmp_path: Path) -> None:
    job: dict[str, Any] = PP2 | BF16 | {"train_iters": ITERATIONS, "clip_grad": 0.1}
    sparse: dict[str, Any] = {
        "moevement_sparse_ckpt": True, "moevement_ranks_per_node": 1, "moevement_replicas": 1, "moevement_window": 2,
        "moevement_verify": "iteration", "moevement_wipe_at": [5, 9], "moevement_wipe_stages": 1,
    }  # fmt: skip
    for name, flags_ in (("failure_free", job), ("recovered", job | sparse)):
        argv = [str(SCRIPT), *flags(**flags_), "--run-dir", str(tmp_path / name)]
        run_ranks(clipped_as_with_transformer_engine, 2, argv, init_process_group=False)
    recovered = RunRecord(tmp_path / "recovered")
    check_scope(recovered, check(RunRecord(tmp_path / "failure_free"), recovered, sparse), {1})


@pytest.mark.full
def test_an_embedding_that_predicts_ahead_ties_the_stages_that_have_a_copy(tmp_path: Path) -> None:
    job = PP2 | BF16 | {"mtp_num_layers": 1}
    sparse: dict[str, Any] = {"moevement_window": 3, "moevement_wipe_at": [2, 8], "moevement_wipe_stages": 1}
    wanted, recovered = recover(2, job, sparse, tmp_path)
    check_scope(recovered, check(wanted, recovered, sparse), {0, 1})
