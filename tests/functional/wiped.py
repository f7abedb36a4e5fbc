"""Jobs whose memory is wiped on purpose (``--moevement-wipe-at``), and checks of their records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from moevement_core.run.run_record import RunRecord
from moevement_core.run.verify import compare
from tests.failure_free import failure_free
from tests.training import train

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
    """Train a job without failures and with wiped memory; return the records of both runs."""
    defaults: dict[str, Any] = {
        "moevement_sparse_ckpt": True,
        "moevement_ranks_per_node": 1,
        "moevement_replicas": min(1, ranks - 1),
    }
    wanted = failure_free(ranks, train_iters=ITERATIONS, **job)
    recovered = train(ranks, folder / "recovered", train_iters=ITERATIONS, **job, **defaults, **sparse)
    return wanted, recovered


def check(wanted: RunRecord, recovered: RunRecord, sparse: dict[str, Any], case: str = "") -> list[dict[str, Any]]:
    difference = compare(wanted, recovered).first_difference
    assert difference is None, f"{difference} {case}"
    recoveries = recovered.summary()["checkpointing"]["recoveries"]
    wiped = sparse["moevement_wipe_at"]
    assert [recovery["until"] for recovery in recoveries] == (wiped if isinstance(wiped, list) else [wiped]), case
    assert all(recovery["replayed"] > 0 for recovery in recoveries), case
    for recovery in recoveries:
        assert recovery["restored_until"] <= recovery["until"], case
        # A recovery that recomputed nothing has verified nothing; any other has verified all that it restored.
        assert recovery["verified_until"] == (recovery["restored_until"] if recovery["recomputed"] else None), case
    return list(recoveries)
