"""MoC-System in live jobs: which experts it saves, what a kill costs, and a count of lost tokens that is exact."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moevement_cli.main import main
from moevement_core.operators import expert_name
from moevement_core.policy.schedule import Saved
from moevement_core.storage.files import read_header
from moevement_core.storage.manifest import manifests
from tests.failure_free import failure_free
from tests.functional.bodies import tokens_by_iteration
from tests.functional.jobs import EP2XDP2, LAYOUTS, PHASES, SAMPLES, SPARSE
from tests.harness import run_ranks
from tests.launching import survive
from tests.training import SCRIPT, flags, train

EXPERTS, LAYERS, INTERVAL = 4, 4, 2
SPAN = 8
"""Number of consecutive snapshots that together have every expert at least once.

This is for snapshots that have one of four experts, selected by load.
"""
PARTIAL: dict[str, Any] = {
    "moevement_window": False, "moevement_strategy": "moc", "moevement_dense_interval": INTERVAL,
    "moevement_snapshot_experts": 1, "moevement_plt_limit": 1.0,
}  # fmt: skip


@pytest.mark.parametrize(
    "layout", [LAYOUTS["PP2xEP2"][1], pytest.param(EP2XDP2, marks=pytest.mark.full)], ids=["PP2xEP2", "EP2xDP2"]
)
def test_lost_tokens_are_those_that_a_recount_finds(layout: dict[str, Any], tmp_path: Path) -> None:
    flags_ = SPARSE | layout | {"train_iters": 16}
    survived = survive(4, 1, tmp_path / "run", inject=("rank=1,iteration=13,phase=backward",), **flags_ | PARTIAL)
    survived.check_metrics(16)
    (recovery,) = survived.events("recovery")
    stages = layout.get("pipeline_model_parallel_size", 1)
    # Work out the checkpoint that all ranks go back to, and the iterations in which each expert was saved.
    reached = recovery["until"] - recovery["replayed"]
    assert reached % INTERVAL == 0
    tokens: Counter[tuple[int, int, int]] = Counter()
    argv = [str(SCRIPT), *flags(**SAMPLES | layout, train_iters=13)]
    for outcome in run_ranks(tokens_by_iteration, 4, argv, init_process_group=False):
        tokens.update(outcome.result)
    samples, positions, experts_per_token = 13 * flags_["global_batch_size"], 32, 2
    assert sum(tokens.values()) == LAYERS * samples * positions * experts_per_token
    wanted = {}
    for layer in range(LAYERS):
        on_ranks = [0, 2, 1, 3]  # two experts on each of two ranks, which take turns
        place = layer % (LAYERS // stages)
        for turn, expert in enumerate(on_ranks[place:] + on_ranks[:place]):
            # Experts of the initial state count as saved in turn, by imagined checkpoints before training, the last of
            # them at iteration 0.
            behind = (reached // INTERVAL + EXPERTS - 1 - turn) % EXPERTS * INTERVAL
            lost = sum(tokens[t, layer, expert] for t in range(max(0, reached - behind) + 1, reached + 1))
            if lost:
                wanted[expert_name(layer, expert)] = lost
    assert recovery["lost_tokens"] == wanted
    assert recovery["first"] == reached - (EXPERTS - 1) * INTERVAL
    total = sum(count for (iteration, *_), count in tokens.items() if iteration <= reached)
    assert recovery["proportion_lost_so_far"] == pytest.approx(sum(wanted.values()) / total)
    of_run = 16 * flags_["global_batch_size"] * positions * experts_per_token * LAYERS
    assert recovery["proportion_lost"] == pytest.approx(sum(wanted.values()) / of_run)
    assert re.search(rf"\b{sum(wanted.values()):,} routed tokens\b", survived.out)


@pytest.mark.full
@pytest.mark.parametrize("layout", [EP2XDP2, LAYOUTS["PP2xEP2"][1]], ids=["EP2xDP2", "PP2xEP2"])
def test_lost_tokens_where_experts_are_selected_by_load(layout: dict[str, Any], tmp_path: Path) -> None:
    flags_ = SPARSE | layout | {"train_iters": 24} | PARTIAL | {"moevement_selection": "load"}
    survived = survive(4, 1, tmp_path / "run", inject=("rank=1,iteration=21,phase=backward",), **flags_)
    survived.check_metrics(24)
    (recovery,) = survived.events("recovery")
    reached = recovery["until"] - recovery["replayed"]
    tokens: Counter[tuple[int, int, int]] = Counter()
    argv = [str(SCRIPT), *flags(**SAMPLES | layout, train_iters=21)]
    for outcome in run_ranks(tokens_by_iteration, 4, argv, init_process_group=False):
        tokens.update(outcome.result)
    wanted, of_stage = {}, LAYERS // layout.get("pipeline_model_parallel_size", 1)
    for layer in range(LAYERS):
        place = layer % of_stage
        turns = [0, 2, 1, 3][place:] + [0, 2, 1, 3][:place]
        saved = {expert: 0 for expert in turns}  # iteration of the last save; no token was routed before iteration 1
        full = {expert: turn - 3 for turn, expert in enumerate(turns)}  # number of the last snapshot with full state
        for number in range(1, reached // INTERVAL + 1):
            due = {expert for expert in turns if number - full[expert] >= SPAN}
            at = number * INTERVAL
            risk = {e: sum(tokens[t, layer, e] for t in range(saved[e] + 1, at + 1)) for e in range(EXPERTS)}
            order = sorted(range(EXPERTS), key=lambda e: (e not in due, -risk[e], e))
            for expert in order[: max(1, len(due))]:
                saved[expert], full[expert] = at, number
        for expert, version in saved.items():
            if lost := sum(tokens[t, layer, expert] for t in range(version + 1, reached + 1)):
                wanted[expert_name(layer, expert)] = lost
    assert recovery["lost_tokens"] == wanted


@pytest.mark.full
@pytest.mark.parametrize(
    ("layout", "selection"),
    [(EP2XDP2, "sequential"), (LAYOUTS["PP2xEP2"][1], "sequential"), (EP2XDP2, "load"),
     (LAYOUTS["PP2xEP2"][1], "load")],
    ids=["EP2xDP2", "PP2xEP2", "EP2xDP2-load", "PP2xEP2-load"],
)  # fmt: skip
def test_a_rank_killed_in_every_phase_of_an_iteration(
    layout: dict[str, Any], selection: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags_ = SPARSE | layout | {"train_iters": 22, "moevement_selection": selection} | PARTIAL
    survived = survive(4, 2, tmp_path / "run", inject=PHASES, **flags_)
    survived.check_metrics(22)
    assert len(survived.failures()) == len(PHASES)
    recoveries = survived.events("recovery")
    assert all(sum(recovery["lost_tokens"].values()) > 0 for recovery in recoveries)
    assert [recovery["ranks"] for recovery in recoveries] == [[0, 1, 2, 3]] * len(recoveries)
    assert re.search(r"\b1 of 4 experts\b", survived.out)
    # The job loses updates, so its final state differs from that of a failure-free job. Each recovery has checked that
    # data-parallel replicas are equal.
    wanted = failure_free(4, **flags_)
    assert main(["verify", str(wanted.folder), str(tmp_path / "run"), "--json"]) == 1
    verdict = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert not verdict["equal"]
    assert len(verdict["lost_updates"]) == len(recoveries)


def test_state_that_is_wiped_comes_back_with_older_experts_and_training_goes_on(tmp_path: Path) -> None:
    flags_ = SPARSE | PARTIAL | {"train_iters": 14, "moevement_wipe_at": [5, 11]}
    record = train(1, tmp_path / "run", **flags_)
    assert [line["iteration"] for line in record.metrics()] == list(range(1, 15))
    recoveries = [event for event in record.events() if event["event"] == "recovery"]
    assert [recovery["until"] for recovery in recoveries] == [5, 11]
    assert all(sum(recovery["lost_tokens"].values()) > 0 for recovery in recoveries)


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        pytest.param({"moevement_selection": "load"}, marks=pytest.mark.full),
        pytest.param({"moevement_strategy": "moetion", "moevement_plt_limit": False}, marks=pytest.mark.full),
    ],
    ids=["moc", "moc-by-load", "moetion"],
)
def test_what_is_run_again_is_trained_again(overrides: dict[str, Any], tmp_path: Path) -> None:
    """Roll back to iteration 0. No token is lost, so the drill checks that every update is repeated."""
    flags_ = SPARSE | PARTIAL | {"train_iters": 8, "moevement_dense_interval": 10, "moevement_wipe_at": 4} | overrides
    record = train(1, tmp_path / "run", **flags_)
    (recovery,) = (event for event in record.events() if event["event"] == "recovery")
    assert (recovery["replayed"], recovery["lost_tokens"]) == (4, {})
    never = train(1, tmp_path / "never", **flags_ | {"moevement_wipe_at": False})
    assert record.summary()["state_digest"] == never.summary()["state_digest"]


@pytest.mark.full
def test_fewer_experts_are_written_to_disk_than_are_kept_in_memory(tmp_path: Path) -> None:
    """Kill ranks whose snapshots are only in files: each of their experts is restored from its newest file."""
    flags_: dict[str, Any] = SPARSE | PARTIAL | {
        "pipeline_model_parallel_size": 2, "moevement_replicas": 0, "train_iters": 36, "moevement_dense_interval": 1,
        "moevement_snapshot_experts": 2, "moevement_persist_experts": 1,
        "moevement_persist_dir": str(tmp_path / "windows"),
    }  # fmt: skip
    faults = tuple(f"rank={rank},iteration={at},phase=backward" for rank, at in ((0, 14), (1, 22)))
    survived = survive(2, 2, tmp_path / "run", inject=faults, **flags_)
    survived.check_metrics(36)
    recoveries = survived.events("recovery")
    assert [recovery["sources"]["file"] > 0 for recovery in recoveries] == [True, True]
    assert all(sum(recovery["lost_tokens"].values()) > 0 for recovery in recoveries)
    newest = manifests(tmp_path / "windows")[0]
    held = [read_header(path).contents for path in sorted((tmp_path / "windows" / newest.name).glob("rank_00000_*"))]
    full = np.array([list(contents) for contents in held]) == str(int(Saved.FULL))
    on_stage = LAYERS // 2
    assert full.sum(axis=1).min() == full.shape[1] - on_stage * EXPERTS + on_stage, "one expert of each layer"
    assert full.any(axis=0).all()


def test_a_survivors_memory_has_newer_experts_than_files(tmp_path: Path) -> None:
    """Kill one of two expert-parallel ranks without peers. Each expert is restored as its owner has it.

    A snapshot holds two experts of a layer, one of each rank, and a file one of them. So the survivor's experts are at
    most one iteration old, as in its memory, and those of the killed rank are as old as its files.
    """
    flags_: dict[str, Any] = SPARSE | PARTIAL | {
        "expert_model_parallel_size": 2, "moevement_replicas": 0, "train_iters": 24, "moevement_dense_interval": 1,
        "moevement_snapshot_experts": 2, "moevement_persist_experts": 1,
        "moevement_persist_dir": str(tmp_path / "windows"),
    }  # fmt: skip
    survived = survive(2, 2, tmp_path / "run", inject=("rank=0,iteration=18,phase=backward",), **flags_)
    survived.check_metrics(24)
    (recovery,) = survived.events("recovery")
    reached = recovery["until"] - recovery["replayed"]
    tokens: Counter[tuple[int, int, int]] = Counter()
    argv = [str(SCRIPT), *flags(**SAMPLES, expert_model_parallel_size=2, train_iters=18)]
    for outcome in run_ranks(tokens_by_iteration, 2, argv, init_process_group=False):
        tokens.update(outcome.result)
    lost = recovery["lost_tokens"]
    of_survivor = [expert_name(layer, expert) for layer in range(LAYERS) for expert in (2, 3)]
    for layer in range(LAYERS):
        for expert in (2, 3):
            assert lost.get(expert_name(layer, expert), 0) in (0, tokens[reached, layer, expert])
    newest = sum(lost.get(name, 0) for name in of_survivor)
    oldest = sum(count for name, count in lost.items() if name not in of_survivor)
    assert newest < oldest, "files of the killed rank are older than the survivor's memory"
    assert recovery["sources"]["memory"] > 0
    assert recovery["sources"]["file"] > 0


@pytest.mark.full
@pytest.mark.parametrize("replicas", [0, pytest.param(1, marks=pytest.mark.full)])
def test_without_a_copy_in_memory_versions_come_from_disk(replicas: int, tmp_path: Path) -> None:
    """Kill a rank without peers, or a rank and the holder of its copy: only files have the state of its experts."""
    flags_: dict[str, Any] = SPARSE | PARTIAL | {
        "pipeline_model_parallel_size": 2, "moevement_replicas": replicas, "train_iters": 24,
        "moevement_dense_interval": 1, "moevement_persist_dir": str(tmp_path / "windows"),
    }  # fmt: skip
    faults = ["rank=0,iteration=18,phase=backward", *(["rank=1,phase=recover"] if replicas else [])]
    survived = survive(2, 2, tmp_path / "run", inject=tuple(faults), **flags_)
    survived.check_metrics(24)
    (recovery,) = survived.events("recovery")
    assert recovery["sources"]["file"] > 0
    assert sum(recovery["lost_tokens"].values()) > 0
    (event,) = survived.events("restart" if replicas else "recovery_from_disk")
    assert "window_" in event["text"]


def test_a_measured_k_saves_all_experts_that_copies_carry(tmp_path: Path) -> None:
    """Copies are said to be quick, so K grows to E as soon as ranks decide, and a failure loses no update."""
    chosen = PARTIAL | {"moevement_snapshot_experts": "auto", "moevement_bandwidth": "1000"}
    flags_ = SPARSE | LAYOUTS["PP2xEP2"][1] | {"train_iters": 24} | chosen
    survived = survive(4, 1, tmp_path / "run", inject=("rank=1,iteration=22,phase=backward",), **flags_)
    survived.check_metrics(24)
    (recovery,) = survived.events("recovery")
    assert not recovery["lost_tokens"]
    assert "windows of 1 snapshot, every 2 iterations," in survived.out
