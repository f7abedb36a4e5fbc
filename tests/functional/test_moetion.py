"""MoEtion in live jobs: which experts it saves, what a kill costs, and a count of lost tokens that is exact."""

from __future__ import annotations

import json
import re
from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from moevement_cli.main import main
from moevement_core.operators import expert_name
from moevement_core.policy.schedule import Saved
from moevement_core.snapshot.snapshot import BOUNDARY
from tests.failure_free import failure_free, failure_free_digest
from tests.functional.bodies import live_and_saved, tokens_by_iteration
from tests.functional.jobs import EP2XDP2, LAYOUTS, PHASES, SAMPLES, SPARSE
from tests.harness import run_ranks
from tests.launching import survive
from tests.training import SCRIPT, flags

EXPERTS, LAYERS, SPAN = 4, 4, 8
"""Number of experts of a layer, number of layers, and number of snapshots that together have every expert's full state.

Each snapshot has one of four experts.
"""
PARTIAL: dict[str, Any] = {
    "moevement_window": False, "moevement_strategy": "moetion", "moevement_snapshot_experts": 1,
}  # fmt: skip
Expert = tuple[int, int]


def recount(tokens: Counter[tuple[int, int, int]], layers: range, reached: int) -> dict[Expert, int]:
    """Run Algorithm 1 on all tokens up to iteration ``reached``; return the iteration of each expert's last save."""
    # Experts of the initial state count as saved in turn, in the order below: it alternates between two ranks with two
    # experts each. Each layer begins with another expert.
    turns = [0, 2, 1, 3]
    last, full, held = dict[Expert, int](), dict[Expert, int](), set[Expert]()
    for place, layer in enumerate(layers):
        for turn, expert in enumerate(turns[place:] + turns[:place]):
            last[layer, expert], full[layer, expert] = 0, turn - 3
            if turn == 3:
                held.add((layer, expert))
    for now in range(1, reached + 1):
        risk = {pair: sum(tokens[t, *pair] for t in range(last[pair] + 1, now + 1)) for pair in last}
        of_layer = {layer: sum(risk[layer, expert] for expert in range(EXPERTS)) for layer in layers}
        claims = {layer: Fraction(of_layer[layer] * len(layers), sum(of_layer.values())) for layer in layers}
        shares = {layer: min(EXPERTS, int(claim)) for layer, claim in claims.items()}
        for layer in sorted(layers, key=lambda index: (int(claims[index]) - claims[index], index)):
            shares[layer] += sum(shares.values()) < len(layers)
        chosen: set[Expert] = set()
        for layer in layers:
            due = {expert for expert in range(EXPERTS) if now - full[layer, expert] >= SPAN}
            order = sorted(range(EXPERTS), key=lambda e: (e not in due, -risk[layer, e], e))
            chosen |= {(layer, expert) for expert in order[: max(shares[layer], len(due))]}
        for pair in chosen:
            if pair not in held or now - full[pair] >= SPAN:
                full[pair] = now
            last[pair] = now
        held = chosen
    return last


@pytest.mark.full
@pytest.mark.parametrize(
    "layout", [LAYOUTS["PP2xEP2"][1], pytest.param(EP2XDP2, marks=pytest.mark.full)], ids=["PP2xEP2", "EP2xDP2"]
)
def test_lost_tokens_are_those_that_a_recount_finds(layout: dict[str, Any], tmp_path: Path) -> None:
    flags_ = SPARSE | layout | {"train_iters": 20}
    survived = survive(4, 1, tmp_path / "run", inject=("rank=1,iteration=17,phase=backward",), **flags_ | PARTIAL)
    survived.check_metrics(20)
    (recovery,) = survived.events("recovery")
    stages = layout.get("pipeline_model_parallel_size", 1)
    reached = recovery["until"] - recovery["replayed"]
    tokens: Counter[tuple[int, int, int]] = Counter()
    argv = [str(SCRIPT), *flags(**SAMPLES | layout, train_iters=17)]
    for outcome in run_ranks(tokens_by_iteration, 4, argv, init_process_group=False):
        tokens.update(outcome.result)
    wanted, on_stage = {}, LAYERS // stages
    for stage in range(stages):
        layers = range(stage * on_stage, (stage + 1) * on_stage)
        for (layer, expert), version in recount(tokens, layers, reached).items():
            if lost := sum(tokens[t, layer, expert] for t in range(version + 1, reached + 1)):
                wanted[expert_name(layer, expert)] = lost
    assert wanted, "one of four experts of a layer cannot be all that got tokens"
    assert recovery["lost_tokens"] == wanted
    total = sum(count for (iteration, *_), count in tokens.items() if iteration <= reached)
    assert recovery["proportion_lost_so_far"] == pytest.approx(sum(wanted.values()) / total)
    assert re.search(rf"\b{sum(wanted.values()):,} routed tokens\b", survived.out)


def test_survivors_lose_nothing_that_their_own_snapshots_hold(tmp_path: Path) -> None:
    """Own snapshots hold all experts, and peers receive one of four: only the lost rank's experts are older."""
    rates = {"moevement_bandwidth": "1000", "moevement_network_bandwidth": "0.000001"}
    flags_ = SPARSE | LAYOUTS["PP2xEP2"][1] | PARTIAL | rates
    flags_ |= {"train_iters": 24, "moevement_snapshot_experts": False}
    survived = survive(4, 1, tmp_path / "run", inject=("rank=1,iteration=21,phase=backward",), **flags_)
    survived.check_metrics(24)
    (recovery,) = survived.events("recovery")
    assert recovery["sources"]["memory"] > 0
    assert recovery["sources"]["peer"] > 0
    # Rank 1 has experts 2 and 3 of the first stage, whose layers are 0 and 1.
    of_rank = {expert_name(layer, expert) for layer in (0, 1) for expert in (2, 3)}
    assert recovery["lost_tokens"].keys() <= of_rank
    assert sum(recovery["lost_tokens"].values()) > 0


@pytest.mark.full
@pytest.mark.parametrize("layout", [LAYOUTS["PP2xEP2"][1], EP2XDP2], ids=["PP2xEP2", "EP2xDP2"])
def test_a_rank_killed_in_every_phase_of_an_iteration(
    layout: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags_ = SPARSE | layout | {"train_iters": 22} | PARTIAL
    survived = survive(4, 2, tmp_path / "run", inject=PHASES, **flags_)
    survived.check_metrics(22)
    assert len(survived.failures()) == len(PHASES)
    recoveries = survived.events("recovery")
    assert all(sum(recovery["lost_tokens"].values()) > 0 for recovery in recoveries)
    assert [recovery["ranks"] for recovery in recoveries] == [[0, 1, 2, 3]] * len(recoveries)
    assert re.search(r"\b1 of 4 experts\b", survived.out)
    wanted = failure_free(4, **flags_)
    assert main(["verify", str(wanted.folder), str(tmp_path / "run"), "--json"]) == 1
    verdict = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert not verdict["equal"]
    assert len(verdict["lost_updates"]) == len(recoveries)


def test_no_part_of_a_snapshot_is_freed_while_older_versions_in_it_are_needed(tmp_path: Path) -> None:
    """Gradients that a newer full state replaces stay: a snapshot without them restores no expert any more."""
    chosen = PARTIAL | {"moevement_snapshot_experts": 3, "moevement_replicas": 1}
    job = {"expert_model_parallel_size": 2, "train_iters": 12}
    words = [*flags(**SPARSE | job | chosen), "--run-dir", str(tmp_path / "run")]
    gradients = 0
    for rank, outcome in enumerate(run_ranks(live_and_saved, 2, [str(SCRIPT), *words], init_process_group=False)):
        result = outcome.result
        for (source, iteration), tensors in [*result["own"].items(), *result["kept"].items()]:
            if source == rank:
                _, contents, names = result["schedules"][iteration]
                wanted = {name for name, saved in zip(names, contents, strict=True) if saved != Saved.OMITTED}
                assert {name for name, _ in tensors} - {BOUNDARY} == wanted & set(result["held"])
                gradients += sum(saved == Saved.GRADIENT for saved in contents)
    assert gradients > 0, "experts of the previous snapshot are saved as gradients"


@pytest.mark.full
def test_what_was_run_again_is_restored_like_anything_else(tmp_path: Path) -> None:
    """Kill ranks of a job without peers, which rolls back to windows on disk.

    A later recovery needs gradients of iterations that an earlier recovery repeated.
    """
    flags_: dict[str, Any] = SPARSE | {"pipeline_model_parallel_size": 2, "moevement_replicas": 0, "train_iters": 28}
    wanted = failure_free_digest(2, **flags_)
    strategy = PARTIAL | {"moevement_snapshot_experts": EXPERTS, "moevement_persist_dir": str(tmp_path / "windows")}
    faults = tuple(f"rank={rank},iteration={at},phase=backward" for rank, at in ((0, 13), (1, 18), (0, 24)))
    survived = survive(2, 2, tmp_path / "run", inject=faults, **flags_ | strategy)
    survived.check_metrics(28)
    assert survived.digest == wanted
    recoveries = survived.events("recovery")
    assert len(recoveries) == len(faults)
    assert all(recovery["replayed"] > 1 for recovery in recoveries), "they are saved again while they are run again"
    assert any(recovery["redone"] for recovery in recoveries)


@pytest.mark.full
def test_experts_get_more_room_until_what_they_lost_is_repaid(tmp_path: Path) -> None:
    flags_ = SPARSE | LAYOUTS["PP2xEP2"][1] | PARTIAL
    flags_ |= {"train_iters": 100, "moe_expert_capacity_factor": 1.0, "moevement_capacity_boost": 0.5}
    fault = "rank=1,iteration=12,phase=backward"  # in the first stage; all ranks roll back, also those of the last
    survived = survive(4, 1, tmp_path / "run", inject=(fault,), **flags_)
    survived.check_metrics(100)
    (recovery,) = survived.events("recovery")
    lost = sum(count for name, count in recovery["lost_tokens"].items() if int(name.split(".")[1]) >= LAYERS // 2)
    owed = [line["tokens_owed"] for line in survived.record.metrics()]
    before, after = owed[: recovery["until"]], owed[recovery["until"] :]
    assert not any(before[: recovery["until"] - recovery["replayed"]])
    assert 0 < after[0] <= lost
    assert after == sorted(after, reverse=True)
    assert len(set(after)) > 2, "repaid over several iterations"
    assert after[-1] == 0
