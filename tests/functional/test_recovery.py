"""Memory of all ranks is overwritten with NaN, and restored from sparse snapshots with the same bits.

``--moevement-wipe-at`` wipes the state, recovers it, and compares digests of it with those from before. The tests
then compare each run, to its end, with a run that never failed.
"""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest

from moevement_core.run.run_record import RunRecord
from tests.failure_free import failure_free
from tests.functional.bodies import wiped_with_damaged_snapshots
from tests.functional.jobs import BOTH
from tests.functional.wiped import (
    ALWAYS_REORDER,
    BF16,
    DISTRIBUTED,
    DROPOUT,
    DROPS,
    EP2,
    EXPERT_BIAS,
    FP16,
    ITERATIONS,
    KERNELS,
    OVERLAP,
    PP2,
    RECOMPUTE,
    ROLLING,
    SHARED_EXPERTS,
    TIED,
    TP2,
    VPP2,
    check,
    recover,
)
from tests.harness import run_ranks
from tests.training import SCRIPT, flags

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
        1, BF16 | {
            "step_batch_size_schedule": "0:4 384:6 1056:8", "global_batch_size": False, "num_layers": 1,
            "num_experts": 2,
        },
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
QUICK = [
    "experts on our kernels, mixed frozen and active",
    "batches that grow, a window of more iterations than operators",
]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.full]) for name in RUNS]
)
def test_a_wiped_job_comes_back_bit_for_bit(name: str, tmp_path: Path) -> None:
    ranks, job, sparse = RUNS[name]
    wanted, recovered = recover(ranks, job, sparse, tmp_path)
    recoveries = check(wanted, recovered, sparse)
    assert all(recovery["sources"]["memory"] > 0 for recovery in recoveries)
    assert recoveries[-1]["restored_until"] >= recoveries[-1]["first"]
    assert recoveries[-1]["recomputed"] > 0 or sparse["moevement_window"] == 1, "a window of one has nothing to compare"
    if job.get("fp16"):
        skipped = [line["iteration"] for line in recovered.metrics() if line["skipped"]]
        last = recoveries[-1]
        assert any(last["first"] < iteration <= last["until"] for iteration in skipped), "an overflow is replayed"
        assert any(last["first"] < i <= last["until"] and i not in skipped for i in range(ITERATIONS)), "a step too"


@BOTH
def test_damaged_snapshots_are_had_from_a_peer(recovery: str, tmp_path: Path) -> None:
    """Flip a bit in each snapshot of rank 1 (with redo, a bit of a gradient); a peer has undamaged copies."""
    job = EP2 | DISTRIBUTED | BF16
    sparse = {"moevement_window": 2, "moevement_wipe_at": 7, "moevement_recovery": recovery}
    words = flags(train_iters=10, moevement_sparse_ckpt=True, moevement_ranks_per_node=1, moevement_replicas=1,
                  **job, **sparse)  # fmt: skip
    wanted = failure_free(2, train_iters=10, **job)
    argv = [str(SCRIPT), *words, "--run-dir", str(tmp_path / "recovered")]
    run_ranks(wiped_with_damaged_snapshots, 2, argv, 1, init_process_group=False)
    (done,) = check(wanted, RunRecord(tmp_path / "recovered"), sparse)
    assert done["sources"]["peer"] >= 2, "every snapshot of rank 1 that the recovery begins from"
    assert done["sources"]["memory"] >= 2
    assert (done["redone"] > 0) == (recovery == "redo")


def random_case(random: Random) -> tuple[int, dict[str, Any], dict[str, Any]]:
    """Return a random layout with random precision, features, window and iterations of wipes."""
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


@pytest.mark.parametrize("seed", [pytest.param(seed, marks=pytest.mark.full) for seed in range(40)])
def test_any_layout_wiped_at_any_iteration(seed: int, tmp_path: Path) -> None:
    ranks, job, sparse = random_case(Random(seed))
    case = f"seed {seed}: {ranks} ranks, {job}, {sparse}"
    print(case)
    recoveries = check(*recover(ranks, job, sparse, tmp_path), sparse, case)
    if sparse.get("moevement_verify") == "iteration":
        for recovery in recoveries:
            assert recovery["restored_until"] == recovery["until"] - 1, case
            # A state of the last comparison, and the state that the run began from, are not recomputed.
            assert (recovery["recomputed"] > 0) == (recovery["until"] - 1 > max(recovery["first"], 0)), case
