"""Recipes: small jobs that between them use the features whose bits a recovery has to restore.

Flags extend :data:`tests.training.TINY`, a GPT-MoE of four layers with four experts in FP32. Every recipe has
``--deterministic-mode``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tests.functional.jobs import REGIMES

ITERATIONS = 12
"""Length of a job, in iterations."""
PHASES = ("forward", "backward", "reduce", "commit", "step", "gather", "snapshot", "replicate")
"""Phases of an iteration in which a rank is killed."""


@dataclass(frozen=True)
class TrainingRecipe:
    """Job of the matrix."""

    name: str
    subject: str
    """Features that the recipe adds to the matrix, for docs/determinism.md."""
    nproc: int
    """Number of ranks."""
    layout: str
    """Parallel layout, for docs/determinism.md."""
    flags: dict[str, Any]
    """Flags in the form of :func:`tests.training.flags`, without those of :data:`COMMON`."""
    kills: tuple[str, ...] = ()
    """Phases of the kills in CI; empty if only the full matrix has the recipe."""
    resume: dict[str, Any] = field(default_factory=dict)
    """Additional flags of a run that continues from a dense checkpoint."""
    fails: dict[str, str] = field(default_factory=dict)
    """Reasons why the recipe fails gates, by the name of the gate."""

    @property
    def is_quick(self) -> bool:
        """Return True if CI runs the recipe."""
        return bool(self.kills)

    @property
    def training(self) -> dict[str, Any]:
        """Flags of the job without checkpoints."""
        return {name: value for name, value in self._all.items() if not name.startswith("moevement")}

    @property
    def saving(self) -> dict[str, Any]:
        """Flags of the job with sparse checkpoints."""
        return self._all

    @property
    def _all(self) -> dict[str, Any]:
        return COMMON | ({"moevement_replicas": 1} if self.nproc == 2 else {}) | self.flags


COMMON: dict[str, Any] = {
    "deterministic_mode": True,
    "global_batch_size": 8,
    "moevement_sparse_ckpt": True,
    "moevement_window": 3,
    "moevement_replicas_on_same_node": True,
}
"""Flags of every recipe, which a recipe may override."""
PP2: dict[str, Any] = {"pipeline_model_parallel_size": 2}
EP2: dict[str, Any] = {"expert_model_parallel_size": 2}
VPP2 = PP2 | {"num_layers_per_virtual_pipeline_stage": 1}
TP2: dict[str, Any] = {
    "tensor_model_parallel_size": 2, "sequence_parallel": True, "moe_token_dispatcher_type": "allgather",
}  # fmt: skip
DISTRIBUTED: dict[str, Any] = {"use_distributed_optimizer": True, "bf16": True}
OVERLAP = DISTRIBUTED | {"overlap_grad_reduce": True, "overlap_param_gather": True}
DROPOUT: dict[str, Any] = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
DENSE: dict[str, Any] = {
    "num_experts": None, "moe_router_topk": None, "moe_ffn_hidden_size": None, "moe_token_dispatcher_type": None,
    "moe_aux_loss_coeff": None, "moe_router_load_balancing_type": None, "expert_tensor_parallel_size": None,
}  # fmt: skip
LATENT: dict[str, Any] = {
    "multi_latent_attention": True, "kv_lora_rank": 16, "qk_head_dim": 8, "qk_pos_emb_head_dim": 8, "v_head_dim": 8,
}  # fmt: skip
WITHOUT_LOSS: dict[str, Any] = {"moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0.0}
BIAS = WITHOUT_LOSS | {
    "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True, "moe_router_bias_update_rate": 1e-2,
    "moe_router_dtype": "fp32",
}  # fmt: skip
GROUPS: dict[str, Any] = {
    "num_experts": 8, "moe_router_num_groups": 2, "moe_router_group_topk": 1, "moe_router_topk_scaling_factor": 2.5,
}  # fmt: skip
SHARED: dict[str, Any] = {"moe_shared_expert_intermediate_size": 32}
QWEN3: dict[str, Any] = {
    "group_query_attention": True, "num_query_groups": 2, "qk_layernorm": True, "kv_channels": 16, "num_experts": 8,
    "moe_aux_loss_coeff": 1e-3, "rotary_base": 1000000,
}  # fmt: skip
GPT_OSS: dict[str, Any] = WITHOUT_LOSS | {
    "swiglu": False, "quick_geglu": True, "glu_linear_offset": 1.0, "activation_func_clamp_value": 7.0,
    "softmax_type": "learnable", "add_qkv_bias": True, "group_query_attention": True, "num_query_groups": 2,
}  # fmt: skip
DEEPSEEK_V3 = LATENT | BIAS | GROUPS | SHARED | {
    "q_lora_rank": 16, "moe_layer_freq": "([0]*1+[1]*3)", "mtp_num_layers": 1,
}  # fmt: skip
DEEPSEEK_V4 = LATENT | BIAS | SHARED | {
    "q_lora_rank": 16, "num_experts": 16, "moe_ffn_hidden_size": 16, "moe_router_topk": 3,
    "moe_router_score_function": "sqrtsoftplus", "moe_router_topk_scaling_factor": 1.5,
    "activation_func_clamp_value": 10.0, "mtp_num_layers": 1,
}  # fmt: skip
FP8: dict[str, Any] = {"fp8_format": "hybrid", "fp8_recipe": "blockwise", "bf16": True}
RECOMPUTE: dict[str, Any] = {
    "recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1,
}  # fmt: skip
REDO: dict[str, Any] = {"moevement_recovery": "redo"}

RECIPES: tuple[TrainingRecipe, ...] = (
    TrainingRecipe(
        "muon_distributed", "Muon with the distributed optimizer: each rank updates whole matrices", 2, "DP2",
        DISTRIBUTED | {"optimizer": "muon"}, ("commit", "gather"),
    ),
    TrainingRecipe(
        "muon_pipeline", "Muon with Nesterov momentum", 2, "PP2", PP2 | {"optimizer": "muon", "muon_nesterov": True,
        "bf16": True},
    ),
    TrainingRecipe(
        "deepseek_v4",
        "DeepSeek-V4-shaped: 16 small experts, square-root-softplus scores with a bias, a shared expert, latent "
        "attention, clamped SwiGLU, a layer that predicts ahead",
        2, "EP2", DEEPSEEK_V4 | EP2 | DISTRIBUTED, ("backward", "step"),
    ),
    TrainingRecipe(
        "qwen3_redo", "Qwen3-shaped: norms of queries and keys, grouped queries; recovery by redo", 2, "EP2",
        QWEN3 | EP2 | OVERLAP | REDO, ("forward", "snapshot"),
    ),
    TrainingRecipe(
        "overlap", "gradients and parameters exchanged during computation", 2, "DP2", OVERLAP, ("reduce", "replicate"),
    ),
    TrainingRecipe(
        "tensor_dropout", "tensor parallelism with sequence parallelism, dropout", 2, "TP2", TP2 | DROPOUT,
        ("backward", "commit"),
    ),
    TrainingRecipe(
        "interleaved_ahead", "virtual stages, a layer that predicts ahead", 2, "PP2, virtual 2",
        VPP2 | {"mtp_num_layers": 1, "bf16": True},
        ("forward", "step"),
    ),
    TrainingRecipe(
        "dense", "no experts, tied embeddings", 2, "PP2",
        DENSE | PP2 | {"untie_embeddings_and_output_weights": False},
    ),
    TrainingRecipe("dense_distributed", "no experts, distributed optimizer", 2, "DP2", DENSE | DISTRIBUTED),
    TrainingRecipe("replicas", "replicas with the whole state, FP32", 2, "DP2", DROPOUT),
    TrainingRecipe("pipeline_experts", "expert and pipeline parallelism", 4, "PP2 x EP2", PP2 | EP2 | OVERLAP),
    TrainingRecipe("pipeline_four", "four stages", 4, "PP4", {"pipeline_model_parallel_size": 4}),
    TrainingRecipe(
        "tensor_pipeline", "tensor and pipeline parallelism, BF16", 4, "TP2 x PP2", TP2 | PP2 | {"bf16": True},
    ),
    TrainingRecipe(
        "expert_tensor", "experts divided over tensor-parallel ranks", 2, "TP2, expert TP2",
        TP2 | {"expert_tensor_parallel_size": 2, "bf16": True},
    ),
    TrainingRecipe(
        "mixtral", "Mixtral-shaped: grouped queries, top-2 of softmax scores", 4, "PP2 x EP2",
        PP2 | EP2 | DISTRIBUTED | {"group_query_attention": True, "num_query_groups": 2},
    ),
    TrainingRecipe(
        "gpt_oss", "gpt-oss-shaped: sinks in the softmax, clamped GeGLU", 2, "EP2", GPT_OSS | EP2 | OVERLAP,
    ),
    TrainingRecipe(
        "deepseek_v2", "DeepSeek-V2-shaped: latent attention, auxiliary loss of each sequence, shared expert", 2, "PP2",
        LATENT | SHARED | PP2 | {"moe_router_load_balancing_type": "seq_aux_loss", "bf16": True},
    ),
    TrainingRecipe(
        "deepseek_v3", "DeepSeek-V3-shaped: a dense layer, router with a bias and groups, a layer that predicts ahead",
        4, "PP2 x EP2", DEEPSEEK_V3 | PP2 | EP2 | DISTRIBUTED,
    ),
    TrainingRecipe(
        "deepseek_v4_muon", "DeepSeek-V4-shaped, with Muon", 4, "PP2 x EP2",
        DEEPSEEK_V4 | PP2 | EP2 | {"optimizer": "muon", "bf16": True},
    ),
    TrainingRecipe(
        "top_one", "one expert for each token, capacity factor with dropped tokens", 2, "EP2",
        EP2 | {"moe_router_topk": 1, "moe_router_pre_softmax": True, "moe_expert_capacity_factor": 0.6,
        "moe_token_drop_policy": "probs"},
    ),
    TrainingRecipe(
        "sinkhorn", "Sinkhorn router", 2, "EP2",
        EP2 | {"moe_router_load_balancing_type": "sinkhorn", "moe_aux_loss_coeff": 0.0, "moe_router_topk": 1},
    ),
    TrainingRecipe(
        "router_noise", "auxiliary loss of all ranks, z-loss, jitter of the router's input", 2, "EP2",
        EP2 | DISTRIBUTED | {"moe_router_load_balancing_type": "global_aux_loss", "moe_z_loss_coeff": 1e-3,
        "moe_input_jitter_eps": 0.01},
    ),
    TrainingRecipe(
        "grouped", "experts in one grouped product, recompute of selected modules", 2, "EP2",
        EP2 | DISTRIBUTED | {"moe_grouped_gemm": True, "recompute_granularity": "selective",
        "recompute_modules": ["core_attn", "moe_act"]},
    ),
    TrainingRecipe("recompute", "recompute of all layers, dropout", 2, "PP2", PP2 | RECOMPUTE | DROPOUT),
    TrainingRecipe(
        "half", "FP16 with a loss scale that overflows, skipped updates", 2, "PP2",
        PP2 | {"fp16": True, "initial_loss_scale": 2**17, "loss_scale_window": 2, "hysteresis": 1},
    ),
    TrainingRecipe("fp8", "FP8 in blocks", 2, "PP2", PP2 | FP8),
    TrainingRecipe(
        "fp8_moments", "master weights in FP16, moments in FP8", 2, "DP2",
        {"bf16": True, "use_distributed_optimizer": True} | REGIMES["FP8/FP16/FP8+FP16"],
        fails={"restart_replay": "Megatron's dense checkpoint converts moments in FP8 to FP32 and back"},
    ),
    TrainingRecipe(
        "token_loss", "loss and gradients divided by the number of tokens", 2, "PP2",
        PP2 | {"calculate_per_token_loss": True, "bf16": True},
    ),
    TrainingRecipe(
        "schedule", "warmup and cosine decay, weight decay that grows, more micro-batches later", 2, "PP2",
        PP2 | {"lr_decay_style": "cosine", "lr_warmup_iters": 3, "min_lr": 5e-4, "weight_decay_incr_style": "linear",
        "start_weight_decay": 0.01, "end_weight_decay": 0.1, "step_batch_size_schedule": "0:4 768:8 1536:16",
        "global_batch_size": None},
    ),
    TrainingRecipe(
        "documents", "positions and masks that begin again in each document", 2, "PP2",
        PP2 | {"reset_position_ids": True, "reset_attention_mask": True, "eod_mask_loss": True},
    ),
    TrainingRecipe(
        "muon_experts", "Muon with experts on several ranks, FP32", 4, "PP2 x EP2", PP2 | EP2 | {"optimizer": "muon"},
    ),
    TrainingRecipe(
        "muon_experts_distributed", "Muon with the distributed optimizer and experts on several ranks", 4,
        "EP2 x expert DP2", EP2 | DISTRIBUTED | {"optimizer": "muon"},
    ),
)  # fmt: skip
