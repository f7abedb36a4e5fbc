"""Snapshots hold exactly the live state, on their own rank and on its peers, and do not change training."""

from __future__ import annotations

import re
import signal
from pathlib import Path
from typing import Any

import pytest

from moevement_core.overhead.fields import PARTS
from moevement_core.policy.schedule import Saved
from moevement_core.run.run_record import RunRecord
from moevement_core.run.verify import compare
from tests.failure_free import failure_free
from tests.functional.bodies import live_and_saved, one_killed_while_sending, with_peers_that_keep_nothing
from tests.harness import run_ranks
from tests.training import SCRIPT, flags, outcomes, train

PP2: dict[str, Any] = {"pipeline_model_parallel_size": 2}
EP2: dict[str, Any] = {"expert_model_parallel_size": 2}
SPARSE: dict[str, Any] = {"moevement_sparse_ckpt": True, "moevement_ranks_per_node": 1}
DISTRIBUTED_OPTIMIZER: dict[str, Any] = {"use_distributed_optimizer": True}
OVERLAP = DISTRIBUTED_OPTIMIZER | {"overlap_grad_reduce": True, "overlap_param_gather": True}
EXPERT_BIAS: dict[str, Any] = {
    "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True,
    "moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0.0,
}  # fmt: skip

# name: (ranks, flags of the job, flags of sparse checkpointing)
RUNS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "PP2xEP2, distributed optimizer, BF16": (
        4, PP2 | EP2 | DISTRIBUTED_OPTIMIZER | {"bf16": True}, {"moevement_window": 3},
    ),
    "interleaved, rolling, measured window": (
        2, PP2 | {"num_virtual_stages_per_pipeline_rank": 2, "bf16": True},
        {"moevement_window_kind": "rolling", "moevement_replicas": 1},
    ),
    "EP2, overlap, FP16, expert bias, soft count": (
        2, EP2 | OVERLAP | EXPERT_BIAS | {"fp16": True, "initial_loss_scale": 2**26, "hysteresis": 1},
        {"moevement_window": 4, "moevement_replicas": 1, "moevement_order": "soft"},
    ),
    "TP2 with sequence parallelism, FP32, decayed": (
        2, {"tensor_model_parallel_size": 2, "sequence_parallel": True, "moe_token_dispatcher_type": "allgather"},
        {"moevement_window": 2, "moevement_replicas": 1, "moevement_order": "decayed"},
    ),
    "DP2 without the distributed optimizer, BF16, dropout": (
        2, {"bf16": True, "hidden_dropout": 0.1}, {"moevement_window": 3, "moevement_replicas": 1},
    ),
    "one rank, no replicas": (1, {"bf16": True}, {"moevement_window": 2, "moevement_replicas": 0}),
}  # fmt: skip


TP2: dict[str, Any] = {
    "tensor_model_parallel_size": 2, "sequence_parallel": True, "moe_token_dispatcher_type": "allgather",
}  # fmt: skip
BF16: dict[str, Any] = {"bf16": True}
INTERLEAVED = PP2 | {"num_virtual_stages_per_pipeline_rank": 2}
ONE_COPY: dict[str, Any] = {"moevement_replicas": 1}
RELATIVES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    f"{layout}, {'with' if distributed else 'without'} the distributed optimizer, {kind}": (
        ranks,
        flags_ | BF16 | (DISTRIBUTED_OPTIMIZER if distributed else {}),
        ONE_COPY | {"moevement_window": 3, "moevement_window_kind": kind},
    )
    for layout, (ranks, flags_) in {
        "PP2": (2, PP2), "EP2": (2, EP2), "PP2xEP2": (4, PP2 | EP2), "VPP2": (2, INTERLEAVED), "TP2": (2, TP2),
        "EP2xDP2": (4, EP2), "TP2xEP2": (2, TP2 | EP2),
        "tied embeddings": (2, PP2 | {"untie_embeddings_and_output_weights": False}),
    }.items()
    for distributed in (True, False)
    for kind in ("aligned", "rolling")
}  # fmt: skip
EVERY = RUNS | RELATIVES


QUICK = [name for name in RUNS if name.startswith("EP2, overlap")]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.full]) for name in EVERY]
)
def test_snapshots_hold_what_was_live_everywhere_and_training_never_notices(name: str, tmp_path: Path) -> None:
    ranks, job, sparse = EVERY[name]
    plain_run = train(ranks, tmp_path / "plain", train_iters=11, **job)
    words = [*flags(train_iters=11, **job, **(SPARSE | sparse)), "--run-dir", str(tmp_path / "sparse")]
    ended = run_ranks(live_and_saved, ranks, [str(SCRIPT), *words], init_process_group=False)
    replicas = sparse.get("moevement_replicas", 2)
    _check_run(plain_run, RunRecord(tmp_path / "sparse"), replicas, bool(job.get("fp16")))
    _check_snapshots([outcome.result for outcome in ended], replicas)


def _check_run(plain_run: RunRecord, with_snapshots: RunRecord, replicas: int, overflows: bool) -> None:
    """Check that the runs have equal bits, and that the record has the cost of snapshots."""
    assert compare(plain_run, with_snapshots).first_difference is None
    metrics = with_snapshots.metrics()
    if overflows:
        assert {line["skipped"] for line in metrics} == {True, False}, "overflows, and steps between them"
    assert all({"stall_s", "copied_bytes", "replicated_bytes", "replication_lag"} <= line.keys() for line in metrics)
    assert all(line["copied_bytes"] > 0 for line in metrics)
    with_cost = [line["iteration"] for line in metrics if "overhead" in line]
    assert with_cost == [8, 9, 10, 11][4 - len(with_cost) :], "after a quiet iteration that nothing else disturbed"
    assert metrics[-1]["overhead"] == pytest.approx(sum(metrics[-1][f"overhead_{part}"] for part in PARTS))
    summary = with_snapshots.summary()["checkpointing"]
    assert summary["windows_abandoned"] == 0
    assert summary["copied_bytes"] > 0
    assert (summary["replicated_bytes"] > 0) == (replicas > 0)


def _check_snapshots(results: list[dict[str, Any]], replicas: int) -> None:
    """Check the snapshots of each rank: those that it took, and their copies on peers."""
    for rank, result in enumerate(results):
        own = {iteration for source, iteration in result["own"] if source == rank}
        first = min(own)
        assert own == set(range(first, 11)), "a snapshot of every state, and a whole window of the first one"
        assert first < 0
        for iteration in range(first, 11):
            _check_contents(result, rank, iteration)
        if not replicas:
            assert not result["kept"]
            continue
        copies = [(place, held) for other in results for place, held in other["kept"].items() if place[0] == rank]
        assert len({iteration for (_, iteration), _ in copies}) >= 11 - 1, "the last may still have been under way"
        assert len(copies) >= replicas * 10
        for (_, iteration), held in copies:
            assert held == result["own"][rank, iteration]
        assert len({source for source, _ in result["kept"]} - {rank}) == replicas


def _check_contents(result: dict[str, Any], rank: int, iteration: int) -> None:
    """Check that a snapshot has exactly the tensors that the schedule names, with the bits of the live state then."""
    schedule, contents, names = result["schedules"][iteration]
    held = {key: digest for key, digest in result["own"][rank, iteration].items() if key[0]}
    live = result["live"][iteration]
    assert {key: live[key] for key in held} == held
    saved = dict(zip(names, contents, strict=True))
    for operator in result["held"]:
        keys = {key for key in held if key[0] == operator}
        live_keys = {key for key in live if key[0] == operator}
        weights = {key for key in live_keys if key[1].endswith(("/weight", "/scale"))}
        expected = {Saved.NOTHING: set(), Saved.COMPUTE: weights, Saved.FULL: live_keys - weights}[saved[operator]]
        assert keys == expected, f"{operator} in iteration {iteration} under schedule {schedule}"


def test_a_gate_probability_order_and_a_token_order_are_both_taken_at_a_window(tmp_path: Path) -> None:
    record = train(
        2, tmp_path / "run", train_iters=8, **EP2, **SPARSE, moevement_window=2, moevement_replicas=1,
        moevement_reorder_threshold=0.0, moevement_reorder_fraction=0.0,
    )  # fmt: skip
    assert record.summary()["checkpointing"]["reorders"] == 3, "at 2, 4 and 6: any change counts"


@pytest.mark.parametrize(
    ("change", "pattern"),
    [
        (
            {"moevement_ranks_per_node": None, "moevement_replicas": 1},
            r"\b1 replicas\b.*\b0\b.*--moevement-replicas\b.*--moevement-replicas-on-same-node\b",
        ),
        (
            {"moevement_host_memory_gb": "0.0001", "moevement_replicas": 1},
            r"\brank 0\b.*\b0\.0\d\d GB\b.*--moevement-host-memory-gb\b",
        ),
    ],
)
def test_what_only_the_ranks_can_know_is_refused_in_one_line_too(change: dict[str, Any], pattern: str) -> None:
    ended = outcomes(2, None, check=False, **EP2, **(SPARSE | {"moevement_window": 2} | change))
    assert {outcome.exit_code for outcome in ended} == {2}
    lines = [line for outcome in ended for line in outcome.output.splitlines() if line.startswith("moevement: ")]
    assert len([line for line in lines if re.search(pattern, line)]) == 1, lines


@pytest.mark.full
@pytest.mark.parametrize(
    ("layout", "sparse"),
    [
        ({**PP2, "bf16": True}, {}),
        pytest.param(INTERLEAVED, {"moevement_window_kind": "rolling"}, marks=pytest.mark.full),
        pytest.param({**EP2, **DISTRIBUTED_OPTIMIZER}, {}, marks=pytest.mark.full),
    ],
)
def test_the_memory_that_a_refusal_names_is_enough(
    layout: dict[str, Any], sparse: dict[str, Any], tmp_path: Path
) -> None:
    """Train with exactly the memory for snapshots, copies of peers, and logs; stages have different sizes."""
    sparse = SPARSE | {"moevement_window": 3, "moevement_replicas": 1} | sparse
    ended = outcomes(2, None, check=False, **layout, **sparse, moevement_host_memory_gb=0.0001)
    output = (text for outcome in ended for text in outcome.output.splitlines())
    (line,) = [text for text in output if "--moevement-host-memory-gb" in text]
    named = re.search(r"\brank \d\b.*?(\d+\.\d{3}) GB\b", line)
    assert named is not None
    record = train(2, tmp_path, train_iters=30, **layout, **sparse, moevement_host_memory_gb=float(named[1]))
    summary = record.summary()["checkpointing"]
    assert summary["persisted_from"] >= 24
    assert not summary["warnings"]
    used = max(line["snapshot_memory_bytes"] + line["log_memory_bytes"] for line in record.metrics())
    assert used <= float(named[1]) * 1e9


@pytest.mark.builds
def test_nothing_is_persisted_for_long_and_everybody_learns_of_it(tmp_path: Path) -> None:
    """Check that the job warns, logs an event and reports in its summary if peers acknowledge no copy.

    Memory must not grow meanwhile.
    """
    words = flags(train_iters=40, **PP2, **SPARSE, moevement_window=2, moevement_replicas=1, moevement_peer_timeout=0.5)
    ended = run_ranks(
        with_peers_that_keep_nothing, 2, [str(SCRIPT), *words, "--run-dir", str(tmp_path)], init_process_group=False
    )
    record = RunRecord(tmp_path)
    events = [event for event in record.events() if event["event"] == "nothing_persisted"]
    assert [(event["iterations"], event["persisted_from"]) for event in events] == [(7, None), (14, None), (28, None)]
    assert re.findall(r"\d+", events[0]["text"]) == ["7", "2"], "iterations in a row, and of a window"
    assert f"WARNING rank 0: {events[0]['text']}" in ended[0].output
    summary = record.summary()["checkpointing"]
    assert summary["warnings"] == [event["text"] for event in events]
    assert summary["longest_unpersisted"] >= 39
    assert summary["persisted_from"] is None
    lines = record.metrics()
    bound = (2 * 2 + 1 + 2 + 2 + 1) * lines[-1]["log_bytes"]
    assert 0 < lines[-1]["log_memory_bytes"] == lines[15]["log_memory_bytes"] <= bound


@pytest.mark.full
def test_stages_that_never_reorder_and_stages_that_do_agree_under_a_memory_cap(tmp_path: Path) -> None:
    """Train a stage without experts, which never reorders, and a stage with them; skip an iteration in between."""
    job = PP2 | {"moe_layer_freq": "[0,0,1,1]", "bf16": True, "iterations_to_skip": "5"}
    plain_run = train(2, tmp_path / "plain", train_iters=16, **job)
    sparse = SPARSE | {"moevement_replicas": 1, "moevement_host_memory_gb": 1, "moevement_window": 2}
    record = train(2, tmp_path / "sparse", train_iters=16, **job, **sparse)
    assert compare(plain_run, record).first_difference is None
    assert record.summary()["checkpointing"]["persisted_from"] > 5
    assert record.summary()["checkpointing"]["reorders"] > 0


def test_copies_may_stay_on_the_node_if_that_is_asked_for(tmp_path: Path) -> None:
    sparse = SPARSE | {"moevement_ranks_per_node": None, "moevement_replicas_on_same_node": True}
    record = train(2, tmp_path, train_iters=4, **EP2, **sparse, moevement_replicas=1, moevement_window=2)
    assert record.summary()["checkpointing"]["replicated_bytes"] > 0


@pytest.mark.full
def test_a_run_that_loads_a_dense_checkpoint_goes_on_with_snapshots(tmp_path: Path) -> None:
    sparse = SPARSE | {"moevement_window": 2, "moevement_replicas": 1}
    job = EP2 | DISTRIBUTED_OPTIMIZER | {"bf16": True, "save": str(tmp_path / "dense"), "save_interval": 4}
    whole = failure_free(2, train_iters=8, **job)
    resumed = train(
        2, tmp_path / "resumed", train_iters=8, **job, **sparse, load=str(tmp_path / "dense"), ckpt_step=4,
    )  # fmt: skip
    assert compare(whole, resumed, common_iterations=True).first_difference is None
    assert resumed.summary()["checkpointing"]["persisted_from"] >= 4


def test_a_peer_killed_while_it_sends_leaves_the_persisted_window_whole_on_all_others() -> None:
    words = flags(train_iters=20, **DISTRIBUTED_OPTIMIZER, **SPARSE, moevement_window=2, micro_batch_size=1,
                  global_batch_size=3)  # fmt: skip
    ended = run_ranks(
        one_killed_while_sending, 3, [str(SCRIPT), *words], 1, 9, init_process_group=False, check=False, timeout_s=900
    )
    assert ended[1].exit_code == -signal.SIGKILL
    for outcome in (ended[0], ended[2]):
        assert outcome.error == ""
        report = outcome.result
        assert report["failed"], "without spares the job ends"
        assert report["persisted"] >= 4
        window = {report["persisted"], report["persisted"] + 1}
        assert window <= set(report["own"])
        assert window <= set(report["kept"][1]), "what the dead rank had persisted is on its peers"
        assert 9 not in report["kept"][1], "half a snapshot is none"
        warning = r"^moevement: WARNING rank \d: .*\b(peer|rank) 1\b.*\b(copies|snapshots)\b"
        assert re.search(warning, outcome.output, re.MULTILINE), outcome.output
