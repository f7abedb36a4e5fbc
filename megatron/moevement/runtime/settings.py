"""Flags on which replayed iterations depend, as the manifest of a window on disk records them."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from moevement_core.storage.manifest import DATA_SETTINGS

SETTINGS = (
    "world_size", "tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size",
    "expert_model_parallel_size", "expert_tensor_parallel_size", "context_parallel_size", "sequence_parallel",
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels",
    "num_experts", "moe_ffn_hidden_size", "moe_layer_freq", "moe_router_topk", "moe_shared_expert_intermediate_size",
    "mtp_num_layers", "multi_latent_attention", "add_bias_linear", "padded_vocab_size", "normalization", "swiglu",
    "position_embedding_type", "max_position_embeddings", "untie_embeddings_and_output_weights", "transformer_impl",
    "seq_length", "micro_batch_size", "global_batch_size", "step_batch_size_schedule", "dataloader_type", "seed",
    "eod_mask_loss", "reset_position_ids", "reset_attention_mask", "qk_layernorm", "rotary_base", "rotary_percent",
    "hidden_dropout", "attention_dropout", "fp16", "bf16", "fp8", "fp8_recipe", "fp8_param_gather",
    "fp8_margin", "fp8_amax_history_len", "fp8_amax_compute_algo", "optimizer", "use_distributed_optimizer",
    "use_layer_wise_distributed_optimizer",
    "accumulate_allreduce_grads_in_fp32", "lr", "min_lr", "lr_decay_style", "weight_decay", "clip_grad", "adam_beta1",
    "adam_beta2", "adam_eps", "decoupled_lr", "moe_router_score_function", "moe_router_load_balancing_type",
    "moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_input_jitter_eps", "moe_expert_capacity_factor",
    "moe_token_drop_policy", "moe_pad_expert_input_to_capacity", "moe_router_enable_expert_bias",
    "moe_router_bias_update_rate", "moe_router_dtype", "moe_router_group_topk", "moe_token_dispatcher_type",
    "calculate_per_token_loss", "iterations_to_skip",
)  # fmt: skip
"""Flags on which replayed iterations depend. A job that loads a window from disk needs the values with which the window
was written."""
DATA = (
    "data_path", "data_args_path", "train_data_path", "per_split_data_args_path", "split", "train_samples",
    "train_iters", "tokenizer_type", "tokenizer_model", "vocab_file", "mock_data",
)  # fmt: skip
"""Flags that decide which samples come next.

A job that loads a window from disk may have other values than the job that wrote it, if both read the same samples in
the iterations of the replay. For example, it may train for more iterations, if no sample is read twice.
"""


def settings_of(args: Namespace) -> dict[str, Any]:
    """Return this job's settings for the manifest of a window."""
    settings = {name: _plain(getattr(args, name, None)) for name in SETTINGS}
    if not getattr(args, "group_query_attention", False):
        settings["num_query_groups"] = args.num_attention_heads  # Megatron sets this value when it first counts FLOPs.
    settings[DATA_SETTINGS] = {name: _plain(getattr(args, name, None)) for name in DATA}
    return settings


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in (sorted(value) if isinstance(value, set | frozenset) else value)]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
