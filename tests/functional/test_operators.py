"""The operators of real ranks are those that a plan describes, tensor by tensor; experts have the model's numbers."""

from __future__ import annotations

from typing import Any

import pytest

from megatron.moevement.describe import describe
from tests.functional.bodies import operators_held
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
            operator.name: (str(operator.kind), sorted(operator.tensors)) for operator in shape.stages[stage].operators
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
