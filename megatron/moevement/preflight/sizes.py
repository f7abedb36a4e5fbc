"""Checks of sizes that have to divide each other, and of numbers that Megatron requires."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator


def missing(args: Namespace) -> Iterator[str]:
    """Yield complaints about required flags of Megatron that are missing; ``ranges`` checks their values."""
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
            yield f"{flag}: missing, and Megatron has no default; give a positive number"
    if args.train_iters is None and args.train_samples is None and not args.skip_train:
        yield "--train-iters: missing; give the number of iterations, or --train-samples"
    if not args.eval_interval and args.train_iters is not None and not args.skip_train:
        yield "--eval-interval: missing; Megatron computes sizes of data sets from it, even with --eval-iters 0"


def world_size(args: Namespace) -> Iterator[str]:
    """Yield complaints if the ranks do not form whole model replicas."""
    tp, pp, cp = args.tensor_model_parallel_size, args.pipeline_model_parallel_size, args.context_parallel_size
    model = tp * pp * cp
    if args.world_size % model:
        yield (
            f"world size {args.world_size}: not a multiple of {model} = --tensor-model-parallel-size {tp} x "
            f"--pipeline-model-parallel-size {pp} x --context-parallel-size {cp}; start a multiple of {model} ranks "
            "(moevement launch --nproc) or lower one of the three sizes"
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
    """Yield complaints about the number of experts, and about flags that experts do not work with."""
    ep, number = args.expert_model_parallel_size, args.num_experts
    if number is None:
        if ep > 1:
            yield f"--expert-model-parallel-size {ep}: the model has no experts; give --num-experts, or size 1"
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
            "--num-experts with biases in linear layers: Megatron's local experts add biases in place, which torch "
            "refuses in the backward pass; add --disable-bias-linear"
        )


def initialization(args: Namespace) -> Iterator[str]:
    """Yield a complaint about a flag with which Megatron would create wrong initial weights without an error."""
    if args.use_cpu_initialization and args.num_experts and args.expert_model_parallel_size > 1:
        yield (
            "--use-cpu-initialization with --expert-model-parallel-size "
            f"{args.expert_model_parallel_size}: Megatron would give all expert-parallel ranks the same weights; "
            "leave --use-cpu-initialization out"
        )


def layers(args: Namespace) -> Iterator[str]:
    """Yield complaints if layers do not divide over pipeline stages and their virtual stages."""
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
    """Yield complaints if attention heads and widths do not divide over tensor-parallel ranks."""
    tp, heads, hidden = args.tensor_model_parallel_size, args.num_attention_heads, args.hidden_size
    if heads is None or hidden is None:
        return
    if args.kv_channels is None and not args.multi_latent_attention and hidden % heads:
        yield (
            f"--hidden-size {hidden}: not a multiple of --num-attention-heads {heads}; "
            "change one of them or give --kv-channels"
        )
    if heads % tp:
        yield f"--num-attention-heads {heads}: not a multiple of --tensor-model-parallel-size {tp}; change one of them"
    groups = args.num_query_groups
    if args.group_query_attention and groups:
        if heads % groups:
            yield f"--num-query-groups {groups}: does not divide --num-attention-heads {heads}; use a divisor"
        if groups % tp and tp % groups:
            yield (
                f"--num-query-groups {groups}: neither a multiple nor a divisor of --tensor-model-parallel-size {tp}; "
                "change one of them"
            )
    for flag, width in (
        ("--ffn-hidden-size", args.ffn_hidden_size),
        ("--moe-ffn-hidden-size", args.moe_ffn_hidden_size),
    ):
        if width is not None and (width <= 0 or width % tp):
            yield f"{flag} {width}: needs a positive multiple of --tensor-model-parallel-size {tp}"


def lengths_and_batches(args: Namespace) -> Iterator[str]:
    """Yield complaints about sequence lengths, and about a global batch that does not divide into micro-batches."""
    length, positions = args.seq_length, args.max_position_embeddings
    if length is None or args.micro_batch_size is None:
        return
    if positions is None:
        yield f"--max-position-embeddings: missing; give at least --seq-length {length}"
    elif positions < length:
        yield (
            f"--seq-length {length}: longer than --max-position-embeddings {positions}; "
            f"raise --max-position-embeddings to {length} or shorten the sequence"
        )
    tp, cp = args.tensor_model_parallel_size, args.context_parallel_size
    if args.sequence_parallel and tp > 1 and length % tp:
        yield (
            f"--seq-length {length}: not a multiple of --tensor-model-parallel-size {tp}, as --sequence-parallel "
            f"needs it; use {_multiples(length, tp)}"
        )
    if cp > 1 and length % (2 * cp):
        near = _multiples(length, 2 * cp)
        yield f"--seq-length {length}: not a multiple of {2 * cp} = 2 x --context-parallel-size; use {near}"
    model = tp * args.pipeline_model_parallel_size * cp
    if args.world_size % model or args.global_batch_size is None or args.step_batch_size_schedule:
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
            f"--global-batch-size {args.global_batch_size}: {micro_batches} micro-batches per rank, but the "
            f"interleaved schedule needs a multiple of --pipeline-model-parallel-size {pp}; "
            f"use {_multiples(args.global_batch_size, step * pp)}"
        )


def learning_rate(args: Namespace) -> Iterator[str]:
    """Yield complaints about a missing learning rate, and about a warmup that does not end before the decay."""
    if args.lr is None and not args.skip_train and not args.use_checkpoint_args:
        yield "--lr: missing, and Megatron has no default; give a learning rate"
    for unit, length in (("iters", args.train_iters), ("samples", args.train_samples)):
        warmup = getattr(args, f"lr_warmup_{unit}") or 0
        decay = getattr(args, f"lr_decay_{unit}")
        end = decay if decay is not None else length
        if warmup and end is not None and warmup >= end:
            flag = f"--lr-decay-{unit}" if decay is not None else f"--train-{unit}"
            yield f"--lr-warmup-{unit} {warmup}: not below {flag} {end}; warm up for less, or train longer"


def _multiples(value: int, of: int) -> str:
    below = value // of * of
    return f"{below} or {below + of}" if below else str(of)


def batch_schedule(args: Namespace) -> Iterator[str]:
    """Yield a complaint about the flag for growing batches that Megatron 0.19 parses but does not use."""
    if args.rampup_batch_size is not None:
        start, more, samples = args.rampup_batch_size
        yield (
            f"--rampup-batch-size {start} {more} {samples}: Megatron parses it and trains with --global-batch-size "
            'from the first iteration on; give --step-batch-size-schedule, "0:4 768:8 2304:12" for example'
        )
