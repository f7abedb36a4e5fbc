"""Features of model and precision agree with one rank under pipeline and expert parallelism."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moevement_core.run.verify import compare
from tests.functional.layouts import ULPS
from tests.training import losses, start_from, train

FEATURES: dict[str, dict[str, Any]] = {
    "capacity-with-drops": {"moe_expert_capacity_factor": 0.75},
    "capacity-with-padding": {"moe_expert_capacity_factor": 1.25, "moe_pad_expert_input_to_capacity": True},
    "shared-experts": {"moe_shared_expert_intermediate_size": 32},
    "first-layer-dense": {"moe_layer_freq": "[0]*1+[1]*3"},
    "sigmoid-router-expert-bias": {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_router_bias_update_rate": 1e-2,
    },
    "sequence-aux-loss": {"moe_router_load_balancing_type": "seq_aux_loss"},
    "group-query-attention": {"group_query_attention": True, "num_query_groups": 2},
    "multi-latent-attention": {
        "multi_latent_attention": True,
        "kv_lora_rank": 16,
        "qk_head_dim": 8,
        "qk_pos_emb_head_dim": 8,
        "v_head_dim": 8,
        "position_embedding_type": "rope",
        "rope_type": "rope",
    },
    "tied-embeddings": {"untie_embeddings_and_output_weights": False},
    "layer-norm-gelu-learned-positions": {
        "normalization": "LayerNorm",
        "swiglu": False,
        "position_embedding_type": "learned_absolute",
    },
    "per-token-loss": {"calculate_per_token_loss": True},
    "router-in-fp32": {"moe_router_dtype": "fp32", "bf16": True},
}

TOLERANCE = {
    # An ULP of the gradient's sum decides which of two nearly equal tokens is dropped, so losses differ a little.
    "capacity-with-drops": 1e-3,
    "capacity-with-padding": 1e-3,
    # BF16 has 8 bits of mantissa, and each data-parallel rank rounds its own part of the gradient.
    "router-in-fp32": 2e-2,
}


ONLY_IN_FULL = (
    "sequence-aux-loss", "capacity-with-padding", "per-token-loss", "router-in-fp32", "first-layer-dense",
    "group-query-attention", "layer-norm-gelu-learned-positions", "shared-experts", "tied-embeddings",
    "capacity-with-drops", "multi-latent-attention", "sigmoid-router-expert-bias",
)  # fmt: skip
"""Features similar to others here, for ``make test-full``."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] if name in ONLY_IN_FULL else []) for name in FEATURES]
)
def test_a_feature_agrees_with_one_rank(name: str, tmp_path: Path) -> None:
    feature = FEATURES[name]
    weights = start_from(tmp_path / "weights", **feature)
    one_rank = train(1, tmp_path / "one", **weights, **feature)
    four_ranks = train(
        4, tmp_path / "four", pipeline_model_parallel_size=2, expert_model_parallel_size=2,
        use_distributed_optimizer=True, **weights, **feature,
    )  # fmt: skip
    assert losses(four_ranks) == pytest.approx(losses(one_rank), abs=TOLERANCE.get(name, 2 * ULPS), rel=0)
    assert losses(one_rank)[4] < losses(one_rank)[1]


def test_fp16_backs_off_its_loss_scale_and_goes_on(tmp_path: Path) -> None:
    record = train(2, tmp_path, pipeline_model_parallel_size=2, fp16=True, initial_loss_scale=2**38, train_iters=30)
    skipped = [line["skipped"] for line in record.metrics()]
    assert skipped[0]
    assert not skipped[-1]
    assert losses(record)[30] < losses(record)[1]


def test_dropout_differs_by_rank_where_it_should(tmp_path: Path) -> None:
    """Compare draws: expert-parallel ranks differ in those of the expert tracker, not of the data-parallel one."""
    from tests.functional.bodies import draws_by_tracker
    from tests.harness import run_ranks
    from tests.training import SCRIPT, flags

    argv = [
        str(SCRIPT),
        *flags(expert_model_parallel_size=2, tensor_model_parallel_size=2, sequence_parallel=True, train_iters=1,
               make_vocab_size_divisible_by=8),
    ]  # fmt: skip
    ranks = [outcome.result for outcome in run_ranks(draws_by_tracker, 4, argv, init_process_group=False)]
    # Ranks 0 and 1 are tensor-parallel peers in the dense part. Experts are spread over all four ranks, by expert rank
    # and then by expert-data rank: ranks 0 and 2 hold other experts than ranks 1 and 3.
    assert ranks[0]["model-parallel-rng"] != ranks[1]["model-parallel-rng"]
    assert ranks[0]["model-parallel-rng"] == ranks[2]["model-parallel-rng"]
    assert ranks[0]["data-parallel-rng"] == ranks[1]["data-parallel-rng"] == ranks[3]["data-parallel-rng"]
    assert ranks[0]["expert-parallel-rng"] != ranks[1]["expert-parallel-rng"]
    assert ranks[0]["expert-parallel-rng"] == ranks[2]["expert-parallel-rng"]


def test_optimizers_agree_on_the_update(tmp_path: Path) -> None:
    """Compare runs with and without the distributed optimizer, which sum gradients in different orders."""
    plain = train(2, tmp_path / "plain", bf16=True)
    sharded = train(2, tmp_path / "sharded", bf16=True, use_distributed_optimizer=True)
    assert losses(plain) == pytest.approx(losses(sharded), abs=2e-3)
    verdict = compare(plain, sharded)
    assert not verdict.parts["optimizer_state"]
