"""Refusals of flags that elastic jobs or experts in slots do not support."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Iterator

from megatron.moevement.arguments import session_config
from megatron.moevement.preflight.refusal import Refusal, complaints, given
from moevement_core.elastic.config import SWITCH, ElasticConfig
from moevement_core.util.environment import MEMBER_ENV
from moevement_core.util.flags import from_args

_PER_SHARD = "its state has scales of the shards that it is in, and shards change"
REFUSED = (
    Refusal(
        "--use-tp-pp-dp-mapping", given("use_tp_pp_dp_mapping"), "ranks of a pipeline stage do not stand in a row"
    ),
    Refusal("--use-precision-aware-optimizer", given("use_precision_aware_optimizer"), _PER_SHARD),
    Refusal("--fp8-param-gather", given("fp8_param_gather"), _PER_SHARD),
    Refusal(
        "--data-parallel-random-init", given("data_parallel_random_init"),
        "replicas draw different random numbers, and those of lost ones are lost",
    ),
    Refusal(
        "--step-batch-size-schedule", given("step_batch_size_schedule"),
        "each of its batches would have to suit every number of replicas",
    ),
    Refusal(
        "--dataloader-type cyclic", lambda args: args.dataloader_type == "cyclic",
        "its order of samples depends on the number of replicas",
    ),
    Refusal(
        "--moevement-strategy moc or moetion", lambda args: args.moevement_strategy in ("moc", "moetion"),
        "what experts at older versions cost is counted by the ranks that saved them",
    ),
)  # fmt: skip
_WHOLE = "slots spread over the data-parallel ranks of a stage, of which each holds whole experts"
SLOTS_REFUSED = (
    Refusal("--tensor-model-parallel-size", lambda args: args.tensor_model_parallel_size > 1, _WHOLE),
    Refusal("--context-parallel-size", lambda args: args.context_parallel_size > 1, _WHOLE),
    Refusal("--expert-model-parallel-size", lambda args: args.expert_model_parallel_size > 1, _WHOLE),
    Refusal(
        "--expert-tensor-parallel-size", lambda args: (args.expert_tensor_parallel_size or 1) > 1, _WHOLE
    ),
    Refusal(
        "--moe-token-dispatcher-type other than alltoall", lambda args: args.moe_token_dispatcher_type != "alltoall",
        "other dispatchers send a token to the ranks of its expert, not to one of its replicas",
    ),
    Refusal(
        "--moe-grouped-gemm", given("moe_grouped_gemm"),
        "the weights of a rank's experts are one module's, which saves them by their ranks",
    ),
    Refusal(
        "--moe-pad-expert-input-to-capacity", given("moe_pad_expert_input_to_capacity"),
        "replicas of an expert have its tokens, and not its capacity, in common",
    ),
    Refusal(
        "--moe-router-padding-for-quantization", given("moe_router_padding_for_quantization"),
        "it pads the tokens of experts, and slots have parts of them",
    ),
    Refusal("--fp8-format", given("fp8"), "amaxes of an expert would be those of one of its replicas"),
    Refusal("--mtp-num-layers", given("mtp_num_layers"), "its layers have numbers of their own"),
    Refusal(
        "--use-distributed-optimizer and --save or --load without --dist-ckpt-optim-fully-reshardable",
        lambda args: args.use_distributed_optimizer and not args.dist_ckpt_optim_fully_reshardable
        and bool(args.save or args.load),
        "Megatron's default format is of one number of expert-parallel ranks, and loads wrong state into another",
    ),
)  # fmt: skip


def elastic(args: Namespace) -> Iterator[str]:
    """Yield complaints about settings that an elastic job does not support."""
    config = from_args(ElasticConfig, args)
    if not config.is_elastic:
        for flag in ("expert_slots", "expert_placement"):
            if getattr(args, f"moevement_{flag}") is not None:
                yield f"--moevement-{flag.replace('_', '-')} without {SWITCH}; give both"
        return
    if session_config(args) is None:
        yield f"{SWITCH} without --moevement-sparse-ckpt, which knows what ranks have committed; give both"
        return
    if MEMBER_ENV not in os.environ:
        yield f"{SWITCH} without `moevement launch`, which forms the job again; launch it, or leave the flag out"
        return
    yield from complaints(REFUSED, args, f"{SWITCH} with {{flag}}: {{reason}}; leave one of them out")
    if config.expert_slots is None:
        if config.placement is not None:
            yield "--moevement-expert-placement without --moevement-expert-slots; give both"
        return
    asked = f"--moevement-expert-slots {config.expert_slots}"
    if not args.num_experts:
        yield f"{asked} without --num-experts: there are no experts; leave it out"
        return
    yield from complaints(SLOTS_REFUSED, args, f"{asked} with {{flag}}: {{reason}}; leave one of them out")
    ranks = args.world_size // args.pipeline_model_parallel_size
    if (room := ranks * config.expert_slots) < args.num_experts:
        least = -(-args.num_experts // ranks)
        yield f"{asked}: {ranks} ranks of a stage hold {room} of {args.num_experts} experts; needs {least} or more"
