"""Operators of real ranks are those that a plan describes, tensor by tensor; experts have the model's numbers."""

from __future__ import annotations

from typing import Any

import pytest

from megatron.moevement.describe import describe
from tests.functional.bodies import operators_held, state_weighed
from tests.functional.jobs import REGIMES
from tests.harness import run_ranks
from tests.training import SCRIPT, flags

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "pipeline and experts": (
        4,
        {"pipeline_model_parallel_size": 2, "expert_model_parallel_size": 2, "moe_layer_freq": "[0,1,1,1]",
         "moe_shared_expert_intermediate_size": 48},
    ),
    "interleaved, tied embeddings": (
        2,
        {"pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 2,
         "untie_embeddings_and_output_weights": False},
    ),
    "tensor parallel": (
        2,
        {"tensor_model_parallel_size": 2, "sequence_parallel": True, "moe_token_dispatcher_type": "allgather",
         "expert_model_parallel_size": 2},
    ),
    "dense": (1, {"num_experts": None, "moe_router_topk": None, "moe_ffn_hidden_size": None,
                  "moe_aux_loss_coeff": None, "moe_router_load_balancing_type": None,
                  "moe_token_dispatcher_type": None}),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYOUTS)
def test_ranks_hold_what_a_plan_describes(name: str) -> None:
    ranks, overrides = LAYOUTS[name]
    words = flags(train_iters=1, **overrides)
    shape = describe("tiny", words, ranks)
    outcomes = run_ranks(operators_held, ranks, [str(SCRIPT), *words], init_process_group=False)
    experts_seen: dict[int, set[str]] = {}
    for outcome in outcomes:
        _, (stage, expert_rank) = outcome.result.pop("place")
        described = {
            operator.name: (str(operator.kind), sorted(tensor.elements for tensor in operator.tensors))
            for operator in shape.stages[stage].operators
        }
        held = {name: (kind, sorted(sizes)) for name, (kind, sizes) in outcome.result.items()}
        experts_seen.setdefault(stage, set()).update(name for name in held if ".experts." in name)
        if expert_rank == 0:
            assert held == described
        else:
            assert sorted(held.values()) == sorted(described.values())
    if overrides.get("num_experts", 4):
        layers = {name.split(".experts.")[0] for seen in experts_seen.values() for name in seen}
        for seen in experts_seen.values():
            assert seen == {
                f"{layer}.experts.{e}" for layer in layers for e in range(4) if f"{layer}.experts.0" in seen
            }
        expected = {1, 2, 3} if "moe_layer_freq" in overrides else {0, 1, 2, 3}
        assert layers == {f"layers.{layer}" for layer in expected}


SPLIT = {"pipeline_model_parallel_size": 2, "expert_model_parallel_size": 2}
FP8 = {"bf16": True, "fp8_format": "hybrid", "use_distributed_optimizer": True, "fp8_param_gather": True}
WEIGHED: dict[str, tuple[int, dict[str, Any]]] = {
    "BF16": (4, SPLIT | {"bf16": True, "use_distributed_optimizer": True}),
    "FP32": (2, {"use_distributed_optimizer": True}),
    "replicas, FP16 and tied embeddings": (
        4, SPLIT | {"fp16": True, "untie_embeddings_and_output_weights": False, "initial_loss_scale": 2**12}
    ),
    "buckets of two virtual stages": (
        4, SPLIT | {"bf16": True, "use_distributed_optimizer": True, "num_virtual_stages_per_pipeline_rank": 2,
                    "overlap_grad_reduce": True, "ddp_bucket_size": 4000},
    ),
    "tensor parallel, grouped queries": (
        4, {"bf16": True, "use_distributed_optimizer": True, "tensor_model_parallel_size": 2, "sequence_parallel": True,
            "moe_token_dispatcher_type": "allgather", "expert_model_parallel_size": 2, "group_query_attention": True,
            "num_query_groups": 2},
    ),
    "shards of tied embeddings": (
        4, SPLIT | {"bf16": True, "use_distributed_optimizer": True, "untie_embeddings_and_output_weights": False}
    ),
    "dense": (
        2, {"bf16": True, "use_distributed_optimizer": True, "num_experts": None, "moe_router_topk": None,
            "moe_ffn_hidden_size": None, "moe_aux_loss_coeff": None, "moe_router_load_balancing_type": None,
            "moe_token_dispatcher_type": None},
    ),
    "experts of one tensor-parallel rank": (
        4, {"bf16": True, "use_distributed_optimizer": True, "tensor_model_parallel_size": 2, "sequence_parallel": True,
            "expert_model_parallel_size": 4},
    ),
    "blockwise": (4, SPLIT | FP8 | {"fp8_recipe": "blockwise"}),
    "MXFP8": (4, SPLIT | FP8 | {"fp8_recipe": "mxfp8", "reuse_grad_buf_for_mxfp8_param_ag": True}),
    "some layers in BF16": (
        2, FP8 | {"fp8_recipe": "tensorwise", "first_last_layers_bf16": True, "num_layers_at_start_in_bf16": 1,
                  "num_layers_at_end_in_bf16": 1},
    ),
    **{
        name: (4, SPLIT | {"bf16": True, "use_distributed_optimizer": True} | regime)
        for name, regime in REGIMES.items()
    },
}  # fmt: skip


QUICK = {"BF16", "FP8/FP16/FP8+FP16", "blockwise"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] * (name not in QUICK)) for name in WEIGHED]
)
def test_a_plan_knows_the_bytes_of_every_rank(name: str) -> None:
    ranks, chosen = WEIGHED[name]
    words = flags(train_iters=1, **chosen)
    shape = describe("tiny", words, ranks)
    planned = [stage.rank_bytes(shape.regime) for stage in shape.stages]
    for outcome in run_ranks(state_weighed, ranks, [str(SCRIPT), *words], init_process_group=False):
        weighed = outcome.result
        plan = planned[weighed["stage"]][weighed["rank"]]
        assert (plan.compute, plan.full, plan.gradient) == (weighed["compute"], weighed["full"], weighed["gradient"]), (
            outcome.rank
        )
