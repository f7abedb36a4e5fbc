"""Refusals of flags whose effects sparse snapshots do not cover."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Iterator

from megatron.moevement.arguments import session_config
from megatron.moevement.preflight.refusal import Refusal, beside, complaints, given
from moevement_core.policy.popularity import Ordering
from moevement_core.restart.faults import Fault
from moevement_core.strategies.config import RecoveryKind
from moevement_core.util.environment import NODE_ENV
from moevement_core.util.words import counted

_ELSEWHERE = "the optimizer's state is not where snapshots read it"
_WGRAD = "it computes weight gradients outside of the backward pass, where a replay cannot skip frozen weights"
_BATCHES = "a replay cannot get the same batches again"
REFUSED = (
    Refusal("--optimizer-cpu-offload", given("optimizer_cpu_offload"), _ELSEWHERE),
    Refusal("--use-torch-fsdp2", given("use_torch_fsdp2"), _ELSEWHERE),
    Refusal("--use-megatron-fsdp", given("use_megatron_fsdp"), _ELSEWHERE),
    Refusal("--qk-clip", given("qk_clip"), "weights change once more after the optimizer step"),
    Refusal("--skip-train", given("skip_train"), "the job changes no state that could be lost"),
    Refusal(
        "--cuda-graph-impl", lambda args: args.cuda_graph_impl != "none",
        "a captured graph cannot skip frozen operators in a replay",
    ),
    Refusal(
        "--optimizer-cuda-graph", beside("optimizer_cuda_graph", False),
        "a recovery can neither skip nor repeat a captured update",
    ),
    Refusal("--overlap-moe-expert-parallel-comm", given("overlap_moe_expert_parallel_comm"), _WGRAD),
    Refusal("--delay-wgrad-compute", given("delay_wgrad_compute"), _WGRAD),
    Refusal("--defer-embedding-wgrad-compute", given("defer_embedding_wgrad_compute"), _WGRAD),
    Refusal(
        "--moe-expert-rank-capacity-factor", lambda args: args.moe_expert_rank_capacity_factor is not None,
        "Megatron then repeats steps on its own",
    ),
    Refusal("--perform-rl-step", given("perform_rl_step"), _BATCHES),
    Refusal("--dataloader-type external", lambda args: args.dataloader_type == "external", _BATCHES),
    Refusal("--fp4-param-gather", given("fp4_param_gather"), "a snapshot does not hold FP4 weights as they are stored"),
    Refusal(
        "--reuse-grad-buf-for-mxfp8-param-ag with --moevement-strategy moetion",
        lambda args: bool(args.reuse_grad_buf_for_mxfp8_param_ag and args.moevement_strategy == "moetion"),
        "MoEtion chooses the gradients to log after a gather has overwritten them",
    ),
    Refusal(
        "--reuse-grad-buf-for-mxfp8-param-ag with --overlap-param-gather",
        lambda args: bool(args.reuse_grad_buf_for_mxfp8_param_ag and args.overlap_param_gather),
        "the next forward pass gathers weights through gradient buffers, which overwrites gradients",
    ),
)  # fmt: skip


OPTIMIZERS = ("adam", "muon")
"""Supported optimizers: Adam, and Muon, whose update of a matrix needs the gradient of the whole matrix."""


def sparse_checkpoints(args: Namespace) -> Iterator[str]:
    """Yield complaints about settings with which sparse snapshots do not work."""
    if session_config(args) is None:
        why = "without --moevement-sparse-ckpt; give both"
        if args.moevement_sparse_ckpt:
            why = "with --moevement-strategy none; give another strategy"
        for flag in ("persist_dir", "load", "wipe_at", "wipe_stages", "inject", "inject_mtbf", "inject_trace"):
            if getattr(args, f"moevement_{flag}"):
                yield f"--moevement-{flag.replace('_', '-')} {why}"
        return
    yield from _optimizer(args)
    yield from _injected(args)
    yield from _copies(args)
    yield from _capacity_order(args)
    yield from _room(args)
    pp = args.pipeline_model_parallel_size
    if beyond := [stage for stage in args.moevement_wipe_stages or () if not 0 <= stage < pp]:
        yield f"--moevement-wipe-stages {beyond[0]}: --pipeline-model-parallel-size {pp} has stages 0 to {pp - 1}"
    yield from complaints(REFUSED, args, "--moevement-sparse-ckpt with {flag}: {reason}; leave one of these flags out")


def _optimizer(args: Namespace) -> Iterator[str]:
    """Yield complaints about optimizers with unknown state, or with updates that a recovery cannot repeat."""
    asked = f"--moevement-sparse-ckpt with --optimizer {args.optimizer}"
    if args.optimizer not in OPTIMIZERS:
        yield f"{asked}: snapshots do not know the optimizer's state; use one of {', '.join(OPTIMIZERS)}"
    if args.optimizer not in OPTIMIZERS[1:]:
        return
    if args.use_distributed_optimizer and args.overlap_param_gather:
        yield (
            f"{asked} --use-distributed-optimizer: a replay gathers whole matrices right after an update; leave "
            "--overlap-param-gather out"
        )
    if args.moevement_recovery != RecoveryKind.REPLAY:
        yield (
            f"{asked} --moevement-recovery {args.moevement_recovery}: an update needs the gradient of a whole matrix, "
            f"but each rank logs a part of it; give {RecoveryKind.REPLAY}"
        )


def _injected(args: Namespace) -> Iterator[str]:
    """Yield complaints about injected faults of ranks that the job does not have."""
    for text in args.moevement_inject:
        if (rank := Fault.parse(text).rank) >= args.world_size:
            yield f"--moevement-inject {text}: the job has ranks 0 to {args.world_size - 1}, not {rank}"


def _has_capacity(args: Namespace) -> bool:
    """Return True if Megatron limits the tokens of an expert. A negative factor means no limit."""
    return args.moe_expert_capacity_factor is not None and args.moe_expert_capacity_factor >= 0


def _capacity_order(args: Namespace) -> Iterator[str]:
    """Yield a complaint if ``--moevement-order`` asks for an order by capacity, and experts have no capacity limit."""
    if args.moevement_order == Ordering.CAPACITY and not _has_capacity(args):
        yield (
            f"--moevement-order {args.moevement_order}: experts have no capacity; give --moe-expert-capacity-factor, "
            f"or --moevement-order {Ordering.HARD_COUNT}"
        )


def _room(args: Namespace) -> Iterator[str]:
    """Yield complaints about ``--moevement-capacity-boost`` if experts cannot have extra capacity."""
    if args.moevement_capacity_boost is None:
        return
    asked = f"--moevement-capacity-boost {args.moevement_capacity_boost:g}"
    if not _has_capacity(args):
        yield f"{asked}: experts have no capacity limit; give --moe-expert-capacity-factor, or leave the boost out"
    if args.moe_pad_expert_input_to_capacity:
        yield f"{asked} with --moe-pad-expert-input-to-capacity, which gives all experts one capacity; leave one out"


def _copies(args: Namespace) -> Iterator[str]:
    """Yield a complaint if the job has too few nodes for ``--moevement-replicas``; none if nodes are not yet known."""
    wanted, world = args.moevement_replicas, args.world_size
    if not wanted or args.moevement_replicas_on_same_node:
        return
    on_one_host = os.environ.get("LOCAL_WORLD_SIZE") == str(world) and NODE_ENV not in os.environ
    per_node = args.moevement_ranks_per_node or (world if on_one_host else None)
    if per_node is not None and wanted >= (nodes := -(-world // per_node)):
        yield (
            f"--moevement-replicas {wanted}: each copy has to be on another node than the rank and its other copies, "
            f"and the job has only {counted(nodes - 1, 'node')} besides the rank's node; lower the number, leave the "
            "flag out, or add --moevement-replicas-on-same-node"
        )
