"""Refusals of flags that elastic jobs or experts in slots do not support."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Iterator

from megatron.moevement.arguments import session_config
from megatron.moevement.preflight.refusal import Refusal, complaints, given
from moevement_core.elastic.config import SWITCH, ElasticConfig, SlotsConfig
from moevement_core.util.environment import MEMBER_ENV
from moevement_core.util.flags import from_args

_PER_SHARD = "the state has a scale for each shard, and shards change with the number of replicas"
REFUSED = (
    Refusal(
        "--use-tp-pp-dp-mapping", given("use_tp_pp_dp_mapping"), "ranks of a pipeline stage would not be consecutive"
    ),
    Refusal("--use-precision-aware-optimizer", given("use_precision_aware_optimizer"), _PER_SHARD),
    Refusal("--fp8-param-gather", given("fp8_param_gather"), _PER_SHARD),
    Refusal(
        "--optimizer muon and --use-distributed-optimizer",
        lambda args: args.optimizer == "muon" and args.use_distributed_optimizer,
        "a rank owns whole matrices, and ranges of matrices cannot be moved",
    ),
    Refusal(
        "--data-parallel-random-init", given("data_parallel_random_init"),
        "each replica has its own random states, which are lost with the replica",
    ),
    Refusal(
        "--step-batch-size-schedule", given("step_batch_size_schedule"),
        "every batch size of the schedule would have to suit every number of replicas",
    ),
    Refusal(
        "--dataloader-type cyclic", lambda args: args.dataloader_type == "cyclic",
        "the order of samples depends on the number of replicas",
    ),
)  # fmt: skip
_WHOLE = "each data-parallel rank of a stage has to hold whole experts in its slots"
SLOTS_REFUSED = (
    Refusal("--tensor-model-parallel-size", lambda args: args.tensor_model_parallel_size > 1, _WHOLE),
    Refusal("--context-parallel-size", lambda args: args.context_parallel_size > 1, _WHOLE),
    Refusal("--expert-model-parallel-size", lambda args: args.expert_model_parallel_size > 1, _WHOLE),
    Refusal(
        "--expert-tensor-parallel-size", lambda args: (args.expert_tensor_parallel_size or 1) > 1, _WHOLE
    ),
    Refusal(
        "--moe-token-dispatcher-type other than alltoall", lambda args: args.moe_token_dispatcher_type != "alltoall",
        "other dispatchers send a token to all ranks of its expert, not to one replica of the expert",
    ),
    Refusal(
        "--moe-grouped-gemm", given("moe_grouped_gemm"),
        "one module has the weights of all experts of a rank, and saves them by rank and not by expert",
    ),
    Refusal(
        "--moe-pad-expert-input-to-capacity", given("moe_pad_expert_input_to_capacity"),
        "the replicas of an expert share the expert's tokens, but not its capacity",
    ),
    Refusal(
        "--moe-router-padding-for-quantization", given("moe_router_padding_for_quantization"),
        "Megatron pads the tokens of a whole expert, but a slot has only a part of these tokens",
    ),
    Refusal("--fp8-format", given("fp8"), "the amax history of an expert would come from only one of its replicas"),
    Refusal(
        "--mtp-num-layers", given("mtp_num_layers"), "layers of multi-token prediction have separate layer numbers"
    ),
    Refusal(
        "--use-distributed-optimizer and --save or --load without --dist-ckpt-optim-fully-reshardable",
        lambda args: args.use_distributed_optimizer and not args.dist_ckpt_optim_fully_reshardable
        and bool(args.save or args.load),
        "Megatron's default format loads wrong state if the number of expert-parallel ranks has changed",
    ),
)  # fmt: skip


def elastic(args: Namespace) -> Iterator[str]:
    """Yield complaints about settings that an elastic job does not support."""
    config = from_args(SlotsConfig, args)
    if not from_args(ElasticConfig, args).is_elastic:
        for flag in ("expert_slots", "expert_placement"):
            if getattr(args, f"moevement_{flag}") is not None:
                yield f"--moevement-{flag.replace('_', '-')} without {SWITCH}; give both"
        return
    if session_config(args) is None:
        yield f"{SWITCH} without --moevement-sparse-ckpt, which records what ranks have committed; give both"
        return
    if MEMBER_ENV not in os.environ:
        yield f"{SWITCH} without `moevement launch`, which re-forms the job; use the command, or leave the flag out"
        return
    yield from complaints(REFUSED, args, f"{SWITCH} with {{flag}}: {{reason}}; leave one of these flags out")
    if config.expert_slots is None:
        if config.placement is not None:
            yield "--moevement-expert-placement without --moevement-expert-slots; give both"
        return
    asked = f"--moevement-expert-slots {config.expert_slots}"
    if not args.num_experts:
        yield f"{asked} without --num-experts: the model has no experts; leave --moevement-expert-slots out"
        return
    yield from complaints(SLOTS_REFUSED, args, f"{asked} with {{flag}}: {{reason}}; leave one of these flags out")
    ranks = args.world_size // args.pipeline_model_parallel_size
    if (room := ranks * config.expert_slots) < args.num_experts:
        least = -(-args.num_experts // ranks)
        yield f"{asked}: {ranks} ranks of a stage hold {room} of {args.num_experts} experts; give {least} or more"
