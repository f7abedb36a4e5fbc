"""What cannot work, said before anything is built: one line with the flag, the value found and what to do.

Megatron answers most of these with an assertion from every rank, some of them after the model is built. Every rank
runs the same checks on the same flags and comes to the same answer; rank 0 prints it.
Each check is a small function from the parsed, not yet validated, namespace to complaints; the first one wins.
"""

from __future__ import annotations

import functools
import importlib.util
import linecache
import os
import traceback
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from megatron.moevement import platform
from megatron.moevement.restart.environment import MEMBER_ENV, NODE_ENV
from megatron.moevement.sparse_config import SparseConfig
from moevement_core.errors import ConfigError
from moevement_core.injection import Fault

Check = Callable[[Namespace], Iterator[str]]


def validate_args_after_preflight(original: Callable[..., Any]) -> Callable[..., Any]:
    """``validate_args`` that first runs :func:`check`, and whose own assertions become one line too."""

    @functools.wraps(original)
    def validate_args(args: Namespace, defaults: dict[str, Any] | None = None) -> Any:
        from megatron.moevement.arguments import describe_filled_in

        check(args)
        if args.rank == 0:
            for line in describe_filled_in(args):
                print(f"moevement: {line}", flush=True)
        try:
            return original(args, defaults or {})
        except (AssertionError, ValueError, RuntimeError, NotImplementedError) as error:
            raise ConfigError(_one_line(error)) from error

    return validate_args


def one_line_errors(original: Callable[..., Any]) -> Callable[..., Any]:
    """A function that makes Megatron's configuration objects from flags, whose refusals become one line."""

    @functools.wraps(original)
    def from_args(*args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        except (AssertionError, ValueError, NotImplementedError) as error:
            raise ConfigError(_one_line(error)) from error

    return from_args


def check(args: Namespace) -> None:
    """Raise the first complaint about ``args`` as a :class:`ConfigError`."""
    for one in CHECKS:
        for complaint in one(args):
            raise ConfigError(complaint)


def _one_line(error: Exception) -> str:
    """Megatron's own words, or the condition that failed where it has none."""
    if words := " ".join(str(error).split()):
        return f"Megatron refuses these flags: {words}"
    frame = traceback.extract_tb(error.__traceback__)[-1]
    condition = linecache.getline(frame.filename, frame.lineno or 0).strip()
    return f"Megatron refuses these flags: {condition} ({Path(frame.filename).name}:{frame.lineno})"


def empty_paths(args: Namespace) -> Iterator[str]:
    """A path that is empty comes from a variable that was not set; as a path it would mean the current folder."""
    for flag in ("run_dir", "moevement_persist_dir", "moevement_load", "moevement_inject_trace"):
        value = getattr(args, flag, None)
        if value is not None and not value.strip():
            yield (
                f"--{flag.replace('_', '-')} {value!r}: an empty path, as from a variable that is not set; give a "
                "folder, or leave the flag out"
            )


def positive_sizes(args: Namespace) -> Iterator[str]:
    """Sizes that divide others must be positive numbers."""
    required = {
        "--hidden-size": args.hidden_size,
        "--num-attention-heads": args.num_attention_heads,
        "--seq-length": args.seq_length,
        "--micro-batch-size": args.micro_batch_size,
        "--log-interval": args.log_interval,
    }
    if not getattr(args, "hybrid_layer_pattern", None) and not args.use_checkpoint_args:
        required["--num-layers"] = args.num_layers
    for flag, value in required.items():
        if value is None and not args.use_checkpoint_args and not args.yaml_cfg:
            yield f"{flag}: missing; Megatron has no default, give a positive number"
        if value is not None and value <= 0:
            yield f"{flag} {value}: needs a positive number"
    optional = {
        "--num-experts": args.num_experts,
        "--global-batch-size": args.global_batch_size,
        "--tensor-model-parallel-size": args.tensor_model_parallel_size,
        "--pipeline-model-parallel-size": args.pipeline_model_parallel_size,
        "--context-parallel-size": args.context_parallel_size,
        "--expert-model-parallel-size": args.expert_model_parallel_size,
        "--expert-tensor-parallel-size": args.expert_tensor_parallel_size,
        "--moe-router-topk": args.moe_router_topk if args.num_experts else None,
        "--seed": args.seed,
    }
    for flag, value in optional.items():
        if value is not None and value <= 0:
            yield f"{flag} {value}: needs a positive number"
    if args.train_iters is None and args.train_samples is None and not args.skip_train:
        yield "--train-iters: missing; say how long to train (or give --train-samples)"
    if not args.eval_interval and args.train_iters is not None and not args.skip_train:
        yield "--eval-interval: missing; Megatron sizes its data sets by it, even with --eval-iters 0"


def world_size(args: Namespace) -> Iterator[str]:
    """The ranks must fill whole model replicas."""
    tp, pp, cp = args.tensor_model_parallel_size, args.pipeline_model_parallel_size, args.context_parallel_size
    model = tp * pp * cp
    if args.world_size % model:
        yield (
            f"world size {args.world_size}: not a multiple of {model} = --tensor-model-parallel-size {tp} x "
            f"--pipeline-model-parallel-size {pp} x --context-parallel-size {cp}; start a multiple of {model} ranks "
            "(moevement launch --nproc) or lower one of the three"
        )
    ep, etp = args.expert_model_parallel_size, args.expert_tensor_parallel_size or tp
    expert_model = etp * ep * pp
    if args.world_size % expert_model:
        yield (
            f"--expert-model-parallel-size {ep}: world size {args.world_size} is not a multiple of {expert_model} = "
            f"{ep} x expert tensor parallel size {etp} x --pipeline-model-parallel-size {pp}; "
            f"start a multiple of {expert_model} ranks or lower --expert-model-parallel-size"
        )


def experts(args: Namespace) -> Iterator[str]:
    """Experts divide over expert-parallel ranks; a token cannot go to more experts than there are."""
    ep, number = args.expert_model_parallel_size, args.num_experts
    if number is None:
        if ep > 1:
            yield f"--expert-model-parallel-size {ep}: the model has no experts; give --num-experts or leave it out"
        return
    if number % ep:
        yield (
            f"--num-experts {number}: not a multiple of --expert-model-parallel-size {ep}; "
            f"use {_multiples(number, ep)} experts or an expert parallel size that divides {number}"
        )
    if args.moe_router_topk > number:
        yield f"--moe-router-topk {args.moe_router_topk}: more than --num-experts {number}; use {number} or less"
    groups = args.moe_router_num_groups
    if groups and number % groups:
        yield f"--moe-router-num-groups {groups}: does not divide --num-experts {number}; use a divisor of {number}"
    if args.tensor_model_parallel_size > 1 and not args.sequence_parallel:
        yield (
            f"--tensor-model-parallel-size {args.tensor_model_parallel_size}: Megatron trains experts under tensor "
            "parallelism only with sequence parallelism; add --sequence-parallel"
        )
    if args.transformer_impl == "local" and args.add_bias_linear:
        yield (
            "--num-experts with biases in linear layers: Megatron's local experts add them in place into a view, "
            "which torch refuses in backward; add --disable-bias-linear"
        )


def initialization(args: Namespace) -> Iterator[str]:
    """Ways to make initial weights that are wrong without a word."""
    if args.use_cpu_initialization and args.num_experts and args.expert_model_parallel_size > 1:
        yield (
            "--use-cpu-initialization with --expert-model-parallel-size "
            f"{args.expert_model_parallel_size}: Megatron then gives every expert-parallel rank the same experts; "
            "leave it out"
        )


def layers(args: Namespace) -> Iterator[str]:
    """Layers divide over pipeline stages and their virtual chunks."""
    number, pp = args.num_layers, args.pipeline_model_parallel_size
    chunks, per_chunk = args.num_virtual_stages_per_pipeline_rank, args.num_layers_per_virtual_pipeline_stage
    interleaved = (chunks or 1) > 1 or per_chunk is not None
    if interleaved and pp == 1:
        flag = "--num-virtual-stages-per-pipeline-rank" if chunks else "--num-layers-per-virtual-pipeline-stage"
        yield f"{flag} {chunks or per_chunk}: interleaving needs --pipeline-model-parallel-size 2 or more, found 1"
    uneven = (
        args.decoder_first_pipeline_num_layers or args.decoder_last_pipeline_num_layers
        or args.pipeline_model_parallel_layout or args.account_for_embedding_in_pipeline_split
        or args.account_for_loss_in_pipeline_split or getattr(args, "hybrid_layer_pattern", None) or number is None
    )  # fmt: skip
    if uneven:
        return
    if number % pp:
        yield (
            f"--num-layers {number}: not a multiple of --pipeline-model-parallel-size {pp}; use "
            f"{_multiples(number, pp)} layers, or place them with --decoder-first-pipeline-num-layers"
        )
    stage = number // pp
    if per_chunk is not None and (per_chunk <= 0 or stage % per_chunk):
        yield (
            f"--num-layers-per-virtual-pipeline-stage {per_chunk}: does not divide the {stage} layers of a stage "
            f"(--num-layers {number} / --pipeline-model-parallel-size {pp}); use a divisor of {stage}"
        )
    if chunks is not None and (chunks <= 0 or stage % chunks):
        yield (
            f"--num-virtual-stages-per-pipeline-rank {chunks}: does not divide the {stage} layers of a stage "
            f"(--num-layers {number} / --pipeline-model-parallel-size {pp}); use a divisor of {stage}"
        )


def widths(args: Namespace) -> Iterator[str]:
    """Attention heads and widths divide over tensor-parallel ranks."""
    tp, heads, hidden = args.tensor_model_parallel_size, args.num_attention_heads, args.hidden_size
    if heads is None or hidden is None:
        return
    if args.kv_channels is None and not args.multi_latent_attention and hidden % heads:
        yield (
            f"--hidden-size {hidden}: not a multiple of --num-attention-heads {heads}; "
            "change one of them or give --kv-channels"
        )
    if heads % tp:
        yield f"--num-attention-heads {heads}: not a multiple of --tensor-model-parallel-size {tp}"
    groups = args.num_query_groups
    if args.group_query_attention and groups:
        if heads % groups:
            yield f"--num-query-groups {groups}: does not divide --num-attention-heads {heads}; use a divisor"
        if groups % tp and tp % groups:
            yield f"--num-query-groups {groups}: neither a multiple nor a divisor of --tensor-model-parallel-size {tp}"
    for flag, width in (
        ("--ffn-hidden-size", args.ffn_hidden_size),
        ("--moe-ffn-hidden-size", args.moe_ffn_hidden_size),
    ):
        if width is not None and (width <= 0 or width % tp):
            yield f"{flag} {width}: needs a positive multiple of --tensor-model-parallel-size {tp}"


def lengths_and_batches(args: Namespace) -> Iterator[str]:
    """The sequence fits its positions and its cuts; the global batch divides into micro-batches."""
    length, positions = args.seq_length, args.max_position_embeddings
    if length is None or args.micro_batch_size is None:
        return
    if positions is None:
        yield f"--max-position-embeddings: missing; give at least --seq-length {length}"
    elif positions < length:
        yield (
            f"--seq-length {length}: longer than --max-position-embeddings {positions}; "
            f"raise the latter to {length} or shorten the sequence"
        )
    tp, cp = args.tensor_model_parallel_size, args.context_parallel_size
    if args.sequence_parallel and tp > 1 and length % tp:
        yield (
            f"--seq-length {length}: not a multiple of --tensor-model-parallel-size {tp}, over whose ranks "
            f"--sequence-parallel cuts it; use {_multiples(length, tp)}"
        )
    if cp > 1 and length % (2 * cp):
        near = _multiples(length, 2 * cp)
        yield f"--seq-length {length}: not a multiple of {2 * cp} = 2 x --context-parallel-size; use {near}"
    model = tp * args.pipeline_model_parallel_size * cp
    if args.world_size % model or args.global_batch_size is None or args.rampup_batch_size:
        return
    dp = args.world_size // model
    step = args.micro_batch_size * dp
    if args.global_batch_size % step:
        yield (
            f"--global-batch-size {args.global_batch_size}: not a multiple of {step} = --micro-batch-size "
            f"{args.micro_batch_size} x {dp} data-parallel ranks; use {_multiples(args.global_batch_size, step)}"
        )
    interleaved = (args.num_virtual_stages_per_pipeline_rank or 1) > 1 or args.num_layers_per_virtual_pipeline_stage
    pp, micro_batches = args.pipeline_model_parallel_size, args.global_batch_size // step
    if interleaved and not args.microbatch_group_size_per_vp_stage and micro_batches % pp:
        yield (
            f"--global-batch-size {args.global_batch_size}: {micro_batches} micro-batches per rank, and the "
            f"interleaved schedule needs a multiple of --pipeline-model-parallel-size {pp}; "
            f"use {_multiples(args.global_batch_size, step * pp)}"
        )


def learning_rate(args: Namespace) -> Iterator[str]:
    """Warmup ends before the decay does."""
    if args.lr is None and not args.skip_train and not args.use_checkpoint_args:
        yield "--lr: missing; Megatron has no default learning rate"
    for unit, length in (("iters", args.train_iters), ("samples", args.train_samples)):
        warmup = getattr(args, f"lr_warmup_{unit}") or 0
        decay = getattr(args, f"lr_decay_{unit}")
        end = decay if decay is not None else length
        if warmup and end is not None and warmup >= end:
            flag = f"--lr-decay-{unit}" if decay is not None else f"--train-{unit}"
            yield f"--lr-warmup-{unit} {warmup}: not below {flag} {end}; warm up for less, or train longer"


def data(args: Namespace) -> Iterator[str]:
    """Every named token file is there."""
    from megatron.core.datasets.utils import get_blend_from_list

    for flag in ("data_path", "train_data_path", "valid_data_path", "test_data_path"):
        blend = get_blend_from_list(getattr(args, flag))
        for prefix in blend[0] if blend else []:
            if "://" in prefix:
                continue
            missing = [suffix for suffix in (".bin", ".idx") if not Path(prefix + suffix).exists()]
            if missing:
                hint = "; leave the suffix out" if prefix.endswith((".bin", ".idx")) else ""
                yield (
                    f"--{flag.replace('_', '-')} {prefix}: no {prefix}{missing[0]}{hint}; "
                    "moevement data build makes both files from text"
                )
    if args.data_path and args.split is not None:
        yield from _split(args)
    for flag in ("tokenizer_model", "vocab_file", "merge_file", "data_args_path", "per_split_data_args_path"):
        path = getattr(args, flag, None) or ""
        # A tokenizer may also be named by its repository on a hub, which looks like owner/name.
        is_file = path and (flag != "tokenizer_model" or path.startswith(("/", ".")) or path.count("/") > 1)
        if is_file and not Path(path).exists():
            yield f"--{flag.replace('_', '-')} {path}: no such file"


def _split(args: Namespace) -> Iterator[str]:
    try:
        shares = [float(share) for share in args.split.split(",")]
    except ValueError:
        shares = []
    if len(shares) != 3 or min(shares) < 0 or sum(shares) <= 0:
        yield f"--split {args.split}: needs the shares of training, validation and test data, as in 95,4,1"
    elif not args.skip_train and shares[0] == 0:
        yield f"--split {args.split}: no share for training; the first number must be positive"
    elif args.eval_iters and shares[1] == 0:
        yield f"--split {args.split}: no share for validation; make the second number positive, or give --eval-iters 0"


def optimizer(args: Namespace) -> Iterator[str]:
    """The optimizer is one that this layout and this machine have."""
    if args.use_distributed_optimizer and args.optimizer == "sgd":
        yield f"--optimizer {args.optimizer}: the distributed optimizer has only Adam; do without it"
    emerging = args.optimizer not in ("adam", "sgd")
    if emerging and importlib.util.find_spec("emerging_optimizers") is None:
        yield f"--optimizer {args.optimizer}: needs the package emerging_optimizers; install it or use adam"
    kinds = args.moe_router_load_balancing_type
    coefficients = args.moe_aux_loss_coeff
    if (
        args.num_experts
        and "sinkhorn" in kinds
        and any(coefficients if isinstance(coefficients, list) else [coefficients])
    ):
        yield "--moe-router-load-balancing-type sinkhorn: takes no auxiliary loss; give --moe-aux-loss-coeff 0"


def run_directory(args: Namespace) -> Iterator[str]:
    """The run directory can be made."""
    if args.run_dir:
        try:
            Path(args.run_dir).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            yield f"--run-dir {args.run_dir}: {error.strerror}; give a folder that can be made"


def checkpoints(args: Namespace) -> Iterator[str]:
    """A dense checkpoint that is to be loaded is whole; a folder to save to can be made."""
    from megatron.moevement.runtime import dense_checkpoint

    if args.save and args.save_interval is None and not args.train_samples:
        yield "--save-interval: missing; say after how many iterations --save saves"
    if args.load:
        yield from dense_checkpoint.complaints(Path(args.load), args.ckpt_step)


def without_gpu(args: Namespace) -> Iterator[str]:
    """What a machine without a GPU, or gloo, cannot do."""
    if args.transformer_impl == "transformer_engine" and importlib.util.find_spec("transformer_engine") is None:
        yield (
            "--transformer-impl transformer_engine: Transformer Engine is not installed; "
            "install it (NVIDIA's PyTorch container has it) or give --transformer-impl local"
        )
    if args.transformer_impl == "local" and args.context_parallel_size > 1:
        yield (
            f"--context-parallel-size {args.context_parallel_size}: Megatron's context parallelism is Transformer "
            "Engine's attention, which needs a GPU; use 1 here"
        )
    if not platform.is_cpu():
        return
    if args.distributed_backend != "gloo":
        yield f"--distributed-backend {args.distributed_backend}: no GPU here; leave the flag out or give gloo"
    if args.transformer_impl != "local":
        yield f"--transformer-impl {args.transformer_impl}: no GPU here; leave the flag out or give local"
    refused = {
        "--fp8-format": args.fp8,
        "--fp4-format": getattr(args, "fp4", None),
        "--cuda-graph-impl": None if args.cuda_graph_impl == "none" else args.cuda_graph_impl,
        "--tp-comm-overlap": args.tp_comm_overlap or None,
        "--moe-token-dispatcher-type": "flex" if args.moe_token_dispatcher_type == "flex" else None,
        "--use-precision-aware-optimizer": args.use_precision_aware_optimizer or None,
        "--optimizer-cpu-offload": args.optimizer_cpu_offload or None,
        "--use-torch-fsdp2": args.use_torch_fsdp2 or None,
        "--use-megatron-fsdp": args.use_megatron_fsdp or None,
        "--moe-permute-fusion": args.moe_permute_fusion or None,
        "--moe-router-fusion": args.moe_router_fusion or None,
        "--overlap-moe-expert-parallel-comm": args.overlap_moe_expert_parallel_comm or None,
    }
    for flag, value in refused.items():
        if value is not None:
            shown = "" if value is True else f" {value}"
            yield f"{flag}{shown}: needs a GPU (its kernels or its communication); leave it out on this machine"
    expert_tp = args.expert_tensor_parallel_size or args.tensor_model_parallel_size
    dropless = args.moe_expert_capacity_factor is None or not args.moe_pad_expert_input_to_capacity
    if args.num_experts and expert_tp > 1 and args.moe_token_dispatcher_type == "alltoall" and dropless:
        yield (
            f"--expert-tensor-parallel-size {expert_tp}: gloo cannot gather uneven numbers of tokens over expert "
            "tensor parallel ranks; give --expert-tensor-parallel-size 1, or --moe-expert-capacity-factor with "
            "--moe-pad-expert-input-to-capacity, or --moe-token-dispatcher-type allgather"
        )


def _with_spares(args: Namespace) -> Iterator[str]:
    """What cannot be interrupted and entered again."""
    for text in args.moevement_inject:
        if (rank := Fault.parse(text).rank) >= args.world_size:
            yield f"--moevement-inject {text}: the job has ranks 0 to {args.world_size - 1}, not {rank}"
    if MEMBER_ENV not in os.environ:
        return
    if args.log_num_zeros_in_grad:
        yield (
            "--log-num-zeros-in-grad with --spares: its reduction comes after gradients are clipped, where a failure "
            "would leave a step half made; leave the flag out"
        )
    if args.inprocess_restart:
        yield "--inprocess-restart with --spares: both would restart the job; leave the flag out"


def _copies(args: Namespace) -> Iterator[str]:
    """Copies that the nodes cannot keep, as far as that is known before ranks meet."""
    wanted, world = args.moevement_replicas, args.world_size
    if not wanted or args.moevement_replicas_on_same_node:
        return
    on_one_host = os.environ.get("LOCAL_WORLD_SIZE") == str(world) and NODE_ENV not in os.environ
    per_node = args.moevement_ranks_per_node or (world if on_one_host else None)
    if per_node is not None and wanted >= (nodes := -(-world // per_node)):
        yield (
            f"--moevement-replicas {wanted}: needs as many nodes beside a rank's own, and there are {nodes - 1}; leave "
            "the flag out for as many copies as the nodes allow, or add --moevement-replicas-on-same-node"
        )


def sparse_checkpoints(args: Namespace) -> Iterator[str]:
    """What sparse snapshots cannot see or cannot keep apart."""
    if SparseConfig.from_args(args) is None:
        for flag in ("persist_dir", "load", "wipe_at", "wipe_stages", "inject", "inject_mtbf", "inject_trace"):
            if getattr(args, f"moevement_{flag}"):
                yield f"--moevement-{flag.replace('_', '-')} without --moevement-sparse-ckpt; give both"
        return
    if args.optimizer != "adam":
        yield f"--moevement-sparse-ckpt with --optimizer {args.optimizer}: its state is not known here; use adam"
    refused = {
        "--optimizer-cpu-offload": args.optimizer_cpu_offload,
        "--use-precision-aware-optimizer": args.use_precision_aware_optimizer,
        "--use-torch-fsdp2": args.use_torch_fsdp2,
        "--use-megatron-fsdp": args.use_megatron_fsdp,
        "--qk-clip": args.qk_clip,
        "--skip-train": args.skip_train,
        "--cuda-graph-impl": args.cuda_graph_impl != "none",
        "--overlap-moe-expert-parallel-comm": args.overlap_moe_expert_parallel_comm,
        "--delay-wgrad-compute": args.delay_wgrad_compute,
        "--defer-embedding-wgrad-compute": args.defer_embedding_wgrad_compute,
        "--overlap-param-gather-with-optimizer-step": args.overlap_param_gather_with_optimizer_step,
        "--moe-expert-rank-capacity-factor": args.moe_expert_rank_capacity_factor is not None,
        "--perform-rl-step": args.perform_rl_step,
        "--dataloader-type external": args.dataloader_type == "external",
        "--fp8-recipe delayed": args.fp8 is not None and args.fp8_recipe == "delayed",
        "--fp8-recipe mxfp8": args.fp8 is not None and args.fp8_recipe == "mxfp8" and args.fp8_param_gather,
    }
    yield from _with_spares(args)
    yield from _copies(args)
    pp = args.pipeline_model_parallel_size
    if beyond := [stage for stage in args.moevement_wipe_stages or () if not 0 <= stage < pp]:
        yield f"--moevement-wipe-stages {beyond[0]}: --pipeline-model-parallel-size {pp} has stages 0 to {pp - 1}"
    wgrad = "it computes weight gradients apart from backward, where a replay cannot leave out those of frozen weights"
    reasons = {
        "--qk-clip": "weights change once more after the optimizer step",
        "--skip-train": "nothing changes that could be lost",
        "--cuda-graph-impl": "a captured graph cannot leave out what is frozen in a replay",
        "--overlap-moe-expert-parallel-comm": wgrad,
        "--delay-wgrad-compute": wgrad,
        "--defer-embedding-wgrad-compute": wgrad,
        "--overlap-param-gather-with-optimizer-step": "the step of one optimizer waits for a gather of the other",
        "--moe-expert-rank-capacity-factor": "it repeats steps on its own",
        "--perform-rl-step": "its batches cannot be asked for again",
        "--dataloader-type external": "its batches cannot be asked for again",
        "--fp8-recipe delayed": "the history of its scales is not in a snapshot",
        "--fp8-recipe mxfp8": "with --fp8-param-gather the column-wise copy of the weights is not in a snapshot",
    }
    for flag, is_set in refused.items():
        if is_set:
            reason = reasons.get(flag, "the optimizer's state is not where snapshots look for it")
            yield f"--moevement-sparse-ckpt with {flag}: {reason}; leave one of them out"


def _multiples(value: int, of: int) -> str:
    below = value // of * of
    return f"{below} or {below + of}" if below else str(of)


CHECKS: tuple[Check, ...] = (
    empty_paths, positive_sizes, world_size, experts, initialization, layers, widths, lengths_and_batches,
    learning_rate, without_gpu, optimizer, data, run_directory, checkpoints, sparse_checkpoints,
)  # fmt: skip
