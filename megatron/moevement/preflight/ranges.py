"""Ranges of the numbers in Megatron's flags, independent of other flags; Megatron checks few of them."""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Iterator

from moevement_core.util.numbers import AT_LEAST_ONE, NOT_NEGATIVE, POSITIVE, SHARE, Range

_BELOW_ONE = Range(0.0, math.nextafter(1.0, 0.0))
RANGES: dict[str, Range] = {
    "train_iters": NOT_NEGATIVE, "train_samples": NOT_NEGATIVE, "eval_iters": NOT_NEGATIVE,
    "eval_interval": NOT_NEGATIVE, "save_interval": NOT_NEGATIVE, "exit_interval": NOT_NEGATIVE,
    "exit_duration_in_mins": NOT_NEGATIVE, "log_interval": AT_LEAST_ONE, "ckpt_step": NOT_NEGATIVE,
    "non_persistent_save_interval": NOT_NEGATIVE, "save_retain_interval": NOT_NEGATIVE,
    "manual_gc_interval": NOT_NEGATIVE, "tensorboard_log_interval": NOT_NEGATIVE,
    "tensorboard_queue_size": AT_LEAST_ONE, "timing_log_level": Range(0, 2),
    "check_weight_hash_across_dp_replicas_interval": NOT_NEGATIVE, "train_sync_interval": NOT_NEGATIVE,
    "num_layers": AT_LEAST_ONE, "hidden_size": AT_LEAST_ONE, "num_attention_heads": AT_LEAST_ONE,
    "num_query_groups": AT_LEAST_ONE, "kv_channels": AT_LEAST_ONE, "ffn_hidden_size": AT_LEAST_ONE,
    "seq_length": AT_LEAST_ONE, "max_position_embeddings": AT_LEAST_ONE, "vocab_size": AT_LEAST_ONE,
    "make_vocab_size_divisible_by": AT_LEAST_ONE, "mtp_num_layers": AT_LEAST_ONE,
    "num_experts": AT_LEAST_ONE, "moe_router_topk": AT_LEAST_ONE, "moe_ffn_hidden_size": AT_LEAST_ONE,
    "moe_shared_expert_intermediate_size": AT_LEAST_ONE, "moe_router_num_groups": AT_LEAST_ONE,
    "moe_router_group_topk": AT_LEAST_ONE, "moe_z_loss_coeff": NOT_NEGATIVE, "moe_input_jitter_eps": NOT_NEGATIVE,
    "micro_batch_size": AT_LEAST_ONE, "global_batch_size": AT_LEAST_ONE, "rampup_batch_size": NOT_NEGATIVE,
    "tensor_model_parallel_size": AT_LEAST_ONE, "pipeline_model_parallel_size": AT_LEAST_ONE,
    "context_parallel_size": AT_LEAST_ONE, "expert_model_parallel_size": AT_LEAST_ONE,
    "expert_tensor_parallel_size": AT_LEAST_ONE, "num_distributed_optimizer_instances": AT_LEAST_ONE,
    "distributed_timeout_minutes": AT_LEAST_ONE,
    "lr": NOT_NEGATIVE, "min_lr": NOT_NEGATIVE, "decoupled_lr": NOT_NEGATIVE, "decoupled_min_lr": NOT_NEGATIVE,
    "lr_warmup_init": NOT_NEGATIVE, "lr_warmup_fraction": SHARE, "lr_warmup_iters": NOT_NEGATIVE,
    "lr_warmup_samples": NOT_NEGATIVE, "lr_decay_iters": AT_LEAST_ONE, "lr_decay_samples": AT_LEAST_ONE,
    "lr_wsd_decay_iters": NOT_NEGATIVE, "lr_wsd_decay_samples": NOT_NEGATIVE,
    "weight_decay": NOT_NEGATIVE, "start_weight_decay": NOT_NEGATIVE, "end_weight_decay": NOT_NEGATIVE,
    "clip_grad": NOT_NEGATIVE, "adam_beta1": _BELOW_ONE, "adam_beta2": _BELOW_ONE, "adam_eps": POSITIVE,
    "sgd_momentum": NOT_NEGATIVE, "hidden_dropout": SHARE, "attention_dropout": SHARE,
    "init_method_std": NOT_NEGATIVE, "layernorm_epsilon": POSITIVE, "rotary_base": AT_LEAST_ONE,
    "rotary_percent": SHARE,
    "loss_scale": POSITIVE, "initial_loss_scale": POSITIVE, "min_loss_scale": POSITIVE,
    "loss_scale_window": AT_LEAST_ONE, "hysteresis": AT_LEAST_ONE,
    "num_workers": NOT_NEGATIVE, "num_dataset_builder_threads": AT_LEAST_ONE, "seed": AT_LEAST_ONE,
    "dist_ckpt_workers": AT_LEAST_ONE,
    "inprocess_soft_timeout": POSITIVE, "inprocess_hard_timeout": POSITIVE,
    "inprocess_monitor_thread_interval": POSITIVE,
}  # fmt: skip
"""Allowed values of flags, by their names in the parsed arguments. A missing value (None) is not checked."""
_NAMED = {"layernorm_epsilon": "--norm-epsilon"}
"""Flags that have another name in the parsed arguments, by this other name."""
_MAY_BE_INFINITE = ("moevement_",)
"""Prefix of this project's flags. Some of their values may be infinite; the code that reads a flag checks its value."""


def ranges(args: Namespace) -> Iterator[str]:
    """Yield complaints about numbers that are out of range, NaN or infinite."""
    for name, value in vars(args).items():
        values = value if isinstance(value, list | tuple) else [value]
        for number in values:
            if isinstance(number, bool) or not isinstance(number, int | float):
                continue
            allowed = RANGES.get(name)
            if allowed is not None and not allowed.holds(number):
                yield f"{_flag(name)} {number:g}: needs {allowed}"
            elif isinstance(number, float) and not math.isfinite(number) and not name.startswith(_MAY_BE_INFINITE):
                yield f"{_flag(name)} {number}: needs a finite number"


def _flag(name: str) -> str:
    return _NAMED.get(name, f"--{name.replace('_', '-')}")
