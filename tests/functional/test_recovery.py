"""All memory of all ranks is overwritten with NaN, and comes back from sparse snapshots with the bits it had.

``--moevement-wipe-at`` wipes, recovers, and compares every byte with what was there; each run is then compared with one
that never failed, to its end.
"""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest

from moevement_core.run_record import RunRecord
from moevement_core.verify import compare
from tests.functional.bodies import wiped_with_damaged_snapshots
from tests.harness import run_ranks
from tests.training import SCRIPT, flags, train

PP2: dict[str, Any] = {"pipeline_model_parallel_size": 2}
EP2: dict[str, Any] = {"expert_model_parallel_size": 2}
VPP2: dict[str, Any] = PP2 | {"num_virtual_stages_per_pipeline_rank": 2}
TP2: dict[str, Any] = {
    "tensor_model_parallel_size": 2, "sequence_parallel": True, "moe_token_dispatcher_type": "allgather",
}  # fmt: skip
DISTRIBUTED: dict[str, Any] = {"use_distributed_optimizer": True}
OVERLAP = DISTRIBUTED | {"overlap_grad_reduce": True, "overlap_param_gather": True}
BF16: dict[str, Any] = {"bf16": True}
# The scale doubles after every two good iterations until the gradients overflow, again and again.
FP16: dict[str, Any] = {"fp16": True, "initial_loss_scale": 2**17, "loss_scale_window": 2, "hysteresis": 1}
DROPOUT: dict[str, Any] = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
DROPS: dict[str, Any] = {"moe_expert_capacity_factor": 0.6, "moe_token_drop_policy": "probs"}
EXPERT_BIAS: dict[str, Any] = {
    "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True,
    "moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0.0,
}  # fmt: skip
SHARED_EXPERTS: dict[str, Any] = {"moe_shared_expert_intermediate_size": 32}
RECOMPUTE: dict[str, Any] = {
    "recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1,
}  # fmt: skip
TIED: dict[str, Any] = {"untie_embeddings_and_output_weights": False}
KERNELS: dict[str, Any] = {"moevement_frozen_kernels": "triton"}
ALWAYS_REORDER: dict[str, Any] = {"moevement_reorder_threshold": 0.0, "moevement_reorder_fraction": 0.0}
ROLLING: dict[str, Any] = {"moevement_window_kind": "rolling"}
ITERATIONS = 12


def recover(ranks: int, job: dict[str, Any], sparse: dict[str, Any], folder: Path) -> tuple[RunRecord, RunRecord]:
    """A run that is failure-free and one that is wiped, whose recoveries are told in its summary."""
    ours: dict[str, Any] = {
        "moevement_sparse_ckpt": True,
        "moevement_ranks_per_node": 1,
        "moevement_replicas": min(1, ranks - 1),
    }
    failure_free = train(ranks, folder / "failure_free", train_iters=ITERATIONS, **job)
    recovered = train(ranks, folder / "recovered", train_iters=ITERATIONS, **job, **ours, **sparse)
    return failure_free, recovered


def check(
    failure_free: RunRecord, recovered: RunRecord, sparse: dict[str, Any], told: str = ""
) -> list[dict[str, Any]]:
    difference = compare(failure_free, recovered).first_difference
    assert difference is None, f"{difference} {told}"
    recoveries = recovered.summary()["checkpointing"]["recoveries"]
    wiped = sparse["moevement_wipe_at"]
    assert [one["until"] for one in recoveries] == (wiped if isinstance(wiped, list) else [wiped]), told
    assert all(one["replayed"] > 0 for one in recoveries), told
    for one in recoveries:
        assert one["restored_until"] <= one["until"], told
        # Nothing is verified where nothing was recomputed; else all that was compared is.
        assert one["verified_until"] == (one["restored_until"] if one["recomputed"] else None), told
    return list(recoveries)


# name: (ranks, flags of the job, flags of sparse checkpointing)
RUNS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "PP2xEP2, distributed optimizer with overlap, shared experts, recompute": (
        4, PP2 | EP2 | OVERLAP | BF16 | SHARED_EXPERTS | RECOMPUTE, {"moevement_window": 4, "moevement_wipe_at": 9},
    ),
    "EP2, FP16 with overflows, scalers apart, expert bias, capacity drops": (
        2, EP2 | FP16 | EXPERT_BIAS | DROPS, {"moevement_window": 3, "moevement_wipe_at": [1, 8]} | ALWAYS_REORDER,
    ),
    "interleaved, tied embeddings, dropout, rolling, twice": (
        2, VPP2 | BF16 | DROPOUT | TIED, {"moevement_window": 5, "moevement_wipe_at": [3, 11]} | ROLLING,
    ),
    "TP2 with sequence parallelism, FP32, W of 1": (
        2, TP2, {"moevement_window": 1, "moevement_wipe_at": 6},
    ),
    "TP4 with sequence parallelism, whose ring sums depend on where a number stands": (
        4, TP2 | {"tensor_model_parallel_size": 4, "hidden_size": 64}, {"moevement_window": 6, "moevement_wipe_at": 7},
    ),
    "iterations left out, evaluations between": (
        2, PP2 | BF16 | {"iterations_to_skip": "8", "eval_iters": 1, "eval_interval": 4},
        {"moevement_window": 3, "moevement_wipe_at": [8, 9, 10]},
    ),
    "batches that grow, a window of more iterations than operators": (
        1, BF16 | {"rampup_batch_size": [4, 2, 16], "num_layers": 1, "num_experts": 2},
        {"moevement_window": 9, "moevement_wipe_at": 10},
    ),
    "a model without experts, warm-up and decay": (
        2, PP2 | BF16 | {
            "num_experts": False, "moe_router_topk": False, "moe_ffn_hidden_size": False, "moe_aux_loss_coeff": False,
            "moe_token_dispatcher_type": False, "moe_router_load_balancing_type": False,
            "expert_tensor_parallel_size": False, "lr_decay_style": "cosine", "lr_warmup_iters": 3, "clip_grad": 0.1,
        }, {"moevement_window": 2, "moevement_wipe_at": [4, 9]},
    ),
    "experts on our kernels, mixed frozen and active": (
        2, EP2 | BF16 | DISTRIBUTED | KERNELS, {"moevement_window": 4, "moevement_wipe_at": 9} | ALWAYS_REORDER,
    ),
    "experts on our kernels, recomputed": (
        2, PP2 | RECOMPUTE | KERNELS, {"moevement_window": 3, "moevement_wipe_at": 7},
    ),
    "DP2 without the distributed optimizer, W of 6": (
        2, BF16 | DROPOUT, {"moevement_window": 6, "moevement_wipe_at": 11},
    ),
}  # fmt: skip
QUICK = [*list(RUNS)[:3], "experts on our kernels, mixed frozen and active"]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.full]) for name in RUNS]
)
def test_a_wiped_job_comes_back_bit_for_bit(name: str, tmp_path: Path) -> None:
    ranks, job, sparse = RUNS[name]
    failure_free, recovered = recover(ranks, job, sparse, tmp_path)
    recoveries = check(failure_free, recovered, sparse)
    assert all(one["sources"]["memory"] > 0 for one in recoveries)
    assert recoveries[-1]["restored_until"] >= recoveries[-1]["first"]
    assert recoveries[-1]["recomputed"] > 0 or sparse["moevement_window"] == 1, "a window of one has nothing to compare"
    if job.get("fp16"):
        skipped = [line["iteration"] for line in recovered.metrics() if line["skipped"]]
        last = recoveries[-1]
        assert any(last["first"] < iteration <= last["until"] for iteration in skipped), "an overflow is replayed"
        assert any(last["first"] < i <= last["until"] and i not in skipped for i in range(ITERATIONS)), "a step too"


@pytest.mark.parametrize("recovery", ["replay", "redo"])
def test_damaged_snapshots_are_had_from_a_peer(recovery: str, tmp_path: Path) -> None:
    """With redo the bit is one of a gradient."""
    job = EP2 | DISTRIBUTED | BF16
    sparse = {"moevement_window": 2, "moevement_wipe_at": 7, "moevement_recovery": recovery}
    words = flags(train_iters=10, moevement_sparse_ckpt=True, moevement_ranks_per_node=1, moevement_replicas=1,
                  **job, **sparse)  # fmt: skip
    failure_free = train(2, tmp_path / "failure_free", train_iters=10, **job)
    argv = [str(SCRIPT), *words, "--run-dir", str(tmp_path / "recovered")]
    run_ranks(wiped_with_damaged_snapshots, 2, argv, 1, init_process_group=False)
    (done,) = check(failure_free, RunRecord(tmp_path / "recovered"), sparse)
    assert done["sources"]["peer"] >= 2, "every snapshot of rank 1 that the recovery begins from"
    assert done["sources"]["memory"] >= 2
    assert (done["redone"] > 0) == (recovery == "redo")


def random_case(random: Random) -> tuple[int, dict[str, Any], dict[str, Any]]:
    """Any layout with any precision, any features, any window, wiped anywhere."""
    ranks, job = random.choice([
        (1, {}), (2, {}), (2, TP2), (2, PP2), (2, VPP2), (2, EP2), (4, EP2), (4, PP2 | EP2), (4, PP2), (2, TP2 | EP2),
    ])  # fmt: skip
    job = dict(job)
    for options in (
        [{}, BF16, BF16, FP16],
        [{}, DISTRIBUTED, OVERLAP],
        [{}, DROPOUT],
        [{}, {}, EXPERT_BIAS],
        [{}, {}, DROPS],
        [{}, {}, SHARED_EXPERTS],
        [{}, {}, RECOMPUTE],
        [{}, {}, TIED],
        [{}, {}, KERNELS],
    ):
        job |= random.choice(options)
    sparse = {
        "moevement_window": random.randint(1, 6),
        "moevement_window_kind": random.choice(["aligned", "rolling"]),
        "moevement_wipe_at": sorted(random.sample(range(1, ITERATIONS), random.randint(1, 2))),
        **random.choice([{}, ALWAYS_REORDER]),
        **random.choice([{}, {"moevement_verify": "iteration"}, {"moevement_verify": "nothing"}]),
    }
    return ranks, job, sparse


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=[] if seed == 1 else [pytest.mark.full]) for seed in range(40)]
)
def test_any_layout_wiped_at_any_iteration(seed: int, tmp_path: Path) -> None:
    ranks, job, sparse = random_case(Random(seed))
    told = f"seed {seed}: {ranks} ranks, {job}, {sparse}"
    print(told)
    recoveries = check(*recover(ranks, job, sparse, tmp_path), sparse, told)
    if sparse.get("moevement_verify") == "iteration":
        for one in recoveries:
            assert one["restored_until"] == one["until"] - 1, told
            # What was restored at the last comparison, or is the state that the run began from, was not recomputed.
            assert (one["recomputed"] > 0) == (one["until"] - 1 > max(one["first"], 0)), told
