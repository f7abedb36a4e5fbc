"""Flags of parallel layouts whose losses are compared with those of one rank."""

from __future__ import annotations

from typing import Any

ULPS = 4 * 2.0**-21
"""Four units in the last place of a float32 between 4 and 8."""

PP2: dict[str, Any] = {"pipeline_model_parallel_size": 2}
EP2: dict[str, Any] = {"expert_model_parallel_size": 2}
# The vocabulary is padded to a multiple of this times the tensor-parallel size, and padding enters the softmax.
TP2: dict[str, Any] = {"tensor_model_parallel_size": 2, "sequence_parallel": True, "make_vocab_size_divisible_by": 8}
DISTRIBUTED_OPTIMIZER = {"use_distributed_optimizer": True}
OVERLAP = DISTRIBUTED_OPTIMIZER | {"overlap_grad_reduce": True, "overlap_param_gather": True}
INTERLEAVED = PP2 | {"num_virtual_stages_per_pipeline_rank": 2}
ALLGATHER = {"moe_token_dispatcher_type": "allgather"}
FULL_RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SELECTIVE_RECOMPUTE = {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "moe"]}
