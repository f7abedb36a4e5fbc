"""Checks of flags against this machine: its GPU, its packages, and its shared memory."""

from __future__ import annotations

import importlib.util
import os
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

from megatron.moevement import platform
from megatron.moevement.preflight.refusal import Refusal, beside, complaints, given

_KERNELS = "for its kernels or its communication"
_FP8 = "only Transformer Engine supports it"
NEEDS_GPU = (
    Refusal("--fp8-recipe", lambda args: args.fp8_recipe if args.fp8 and args.fp8_recipe == "custom" else None, _FP8),
    Refusal("--fp8-output-proj", given("fp8_output_proj"), _FP8),
    Refusal("--fp4-format", beside("fp4", None), _KERNELS),
    Refusal("--cuda-graph-impl", beside("cuda_graph_impl", "none"), _KERNELS),
    Refusal("--tp-comm-overlap", given("tp_comm_overlap"), _KERNELS),
    Refusal("--use-nccl-ub", given("nccl_ub"), _KERNELS),
    Refusal("--moe-token-dispatcher-type flex", lambda args: args.moe_token_dispatcher_type == "flex", _KERNELS),
    Refusal("--optimizer-cpu-offload", given("optimizer_cpu_offload"), _KERNELS),
    Refusal("--use-torch-fsdp2", given("use_torch_fsdp2"), _KERNELS),
    Refusal("--use-megatron-fsdp", given("use_megatron_fsdp"), _KERNELS),
    Refusal("--moe-permute-fusion", given("moe_permute_fusion"), _KERNELS),
    Refusal("--moe-router-fusion", given("moe_router_fusion"), _KERNELS),
    Refusal("--overlap-moe-expert-parallel-comm", given("overlap_moe_expert_parallel_comm"), _KERNELS),
)


ATTENTION = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")
"""Environment variables that allow or forbid Transformer Engine's attention kernels.

Megatron sets them according to ``--attention-backend``.
"""
_ATTENTION_OF = {"auto": "111", "flash": "100", "fused": "010", "unfused": "001", "local": "000"}


def attention(args: Namespace) -> Iterator[str]:
    """Yield complaints about environment variables that contradict ``--attention-backend``.

    On a machine without a GPU, the function instead removes these variables, which have no effect there.
    """
    if platform.is_cpu():
        for name in ATTENTION:
            os.environ.pop(name, None)
        return
    backend = args.attention_backend.name
    for name, value in zip(ATTENTION, _ATTENTION_OF.get(backend, ""), strict=False):
        if (actual := os.environ.get(name)) not in (None, value):
            yield (
                f"{name}={actual} contradicts --attention-backend {backend}, which needs {value}; unset "
                f"{', '.join(ATTENTION)}, and choose the backend only by the flag"
            )


def reruns(args: Namespace) -> Iterator[str]:
    """Yield a complaint about a ``--rerun-mode`` that Megatron's parser accepts, and that makes Megatron fail later."""
    if args.rerun_mode == "report_stats":
        yield (
            "--rerun-mode report_stats: Megatron's parser accepts this mode, but Megatron's state machine calls it "
            "report_determinism_stats and fails; give validate_results or disabled"
        )


SHARED = Path("/dev/shm")
_PREFETCHED, _BYTES_OF_TOKEN = 2, 24
"""Number of batches that each data worker prefetches; bytes of a token in a batch (token, label, position: 8 each)."""
_SEMAPHORES = 1 << 16
"""Bytes of shared memory that the queues of workers need."""


def shared_memory(args: Namespace) -> Iterator[str]:
    """Yield a complaint if shared memory is too small for the batches of data workers.

    A rank would fail at its first batch.
    """
    if not args.num_workers or not SHARED.is_dir():
        return
    needed = _SEMAPHORES + args.num_workers * _PREFETCHED * args.micro_batch_size * args.seq_length * _BYTES_OF_TOKEN
    shared = os.statvfs(SHARED)
    if (free := shared.f_bavail * shared.f_frsize) < needed:
        yield (
            f"--num-workers {args.num_workers}: {SHARED} has {free / 1e6:.1f} MB free, but the workers' batches need "
            f"{needed / 1e6:.1f} MB or more; free some, give the container more, or give --num-workers 0"
        )


def optimizer(args: Namespace) -> Iterator[str]:
    """Yield complaints about optimizers and load balancing that other flags, or the lack of a GPU, exclude."""
    if args.use_distributed_optimizer and args.optimizer == "sgd":
        yield f"--optimizer {args.optimizer}: the distributed optimizer supports only Adam; use adam, or do without it"
    if args.optimizer == "muon" and args.use_distributed_optimizer and not args.bf16:
        yield (
            "--optimizer muon --use-distributed-optimizer without --bf16: Megatron's layer-wise optimizer steps only "
            "BF16 weights; add --bf16, or leave --use-distributed-optimizer out"
        )
    emerging = args.optimizer not in ("adam", "sgd")
    if emerging and importlib.util.find_spec("emerging_optimizers") is None:
        yield f"--optimizer {args.optimizer}: needs the package emerging_optimizers; install it, or use adam"
    kinds = args.moe_router_load_balancing_type
    coefficients = args.moe_aux_loss_coeff
    if (
        args.num_experts
        and "sinkhorn" in kinds
        and any(coefficients if isinstance(coefficients, list) else [coefficients])
    ):
        yield "--moe-router-load-balancing-type sinkhorn: supports no auxiliary loss; give --moe-aux-loss-coeff 0"


def fp8(args: Namespace) -> Iterator[str]:
    """Yield complaints about FP8 settings that Megatron and this project's FP8 do not support on this machine.

    This project's FP8 is ``megatron/moevement/fp8``.
    """
    has_te = importlib.util.find_spec("transformer_engine") is not None
    narrow = args.use_precision_aware_optimizer and not args.optimizer_cpu_offload
    asked = "--fp8-format" if args.fp8 else "--use-precision-aware-optimizer"
    if (args.fp8 or narrow) and platform.is_cpu() == has_te:
        why = "without a GPU, this project's FP8 needs a machine without Transformer Engine; leave the flag out here"
        if not has_te:
            why = "on a GPU it needs Transformer Engine, which is not installed; use NVIDIA's PyTorch container"
        yield f"{asked}: {why}"
    if narrow and args.fp16 and not args.accumulate_allreduce_grads_in_fp32 and args.clip_grad > 0.0:
        yield (
            "--use-precision-aware-optimizer --fp16: gradients are reduced in FP16, but Megatron clips gradients of "
            "this optimizer only in FP32 or BF16; add --accumulate-allreduce-grads-in-fp32"
        )
    if not args.fp8:
        return
    keeps_weights = args.fp8_param_gather and not args.use_megatron_fsdp
    if keeps_weights and args.fp8_recipe == "mxfp8" and not args.reuse_grad_buf_for_mxfp8_param_ag:
        yield (
            "--fp8-recipe mxfp8 --fp8-param-gather: MXFP8 weights have two forms, which Megatron can gather only "
            "through gradient buffers; add --reuse-grad-buf-for-mxfp8-param-ag"
        )
    if keeps_weights and args.fp8_recipe != "delayed" and args.main_params_dtype != "fp32":
        yield (
            f"--fp8-recipe {args.fp8_recipe} --fp8-param-gather --main-params-dtype {args.main_params_dtype}: an "
            "optimizer that keeps master weights itself writes FP8 weights only with --fp8-recipe delayed; give "
            "--main-params-dtype fp32"
        )
    if args.fp8_recipe != "delayed" or has_te:
        return
    if keeps_weights and args.overlap_param_gather and (args.fp16 or args.loss_scale is not None):
        yield (
            "--fp8-recipe delayed --fp8-param-gather --overlap-param-gather with a loss scale: a skipped update "
            "changes scales and not weights, and a gather in the next forward pass does not know of the skip; leave "
            "--overlap-param-gather out, or use --bf16 without --loss-scale, or another recipe"
        )
    if args.recompute_granularity == "selective" and "mla_up_proj" in (args.recompute_modules or ()):
        yield (
            "--recompute-modules mla_up_proj with --fp8-recipe delayed: the recomputation would use other scales; "
            "leave mla_up_proj out, or use another recipe"
        )


def without_gpu(args: Namespace) -> Iterator[str]:
    """Yield complaints about settings that need Transformer Engine, a GPU or NCCL, where the machine lacks it."""
    if args.transformer_impl == "transformer_engine" and importlib.util.find_spec("transformer_engine") is None:
        yield (
            "--transformer-impl transformer_engine: Transformer Engine is not installed; "
            "install it (NVIDIA's PyTorch container has it) or give --transformer-impl local"
        )
    if args.transformer_impl == "local" and args.context_parallel_size > 1:
        yield (
            f"--context-parallel-size {args.context_parallel_size}: context parallelism needs Transformer Engine's "
            "attention, which needs a GPU; use 1 with --transformer-impl local"
        )
    if not platform.is_cpu():
        return
    if args.distributed_backend != "gloo":
        yield f"--distributed-backend {args.distributed_backend}: no GPU found; leave the flag out or give gloo"
    if args.transformer_impl != "local":
        yield f"--transformer-impl {args.transformer_impl}: no GPU found; leave the flag out or give local"
    is_layer_wise = args.optimizer == "dist_muon" or (args.optimizer == "muon" and args.use_distributed_optimizer)
    if is_layer_wise and args.overlap_param_gather:
        yield (
            f"--optimizer {args.optimizer} --overlap-param-gather: ranks own different numbers of weights, which gloo "
            "cannot gather in the forward pass; leave --overlap-param-gather out"
        )
    text = "{flag}: needs a GPU ({reason}); leave the flag out on this machine"
    yield from complaints(NEEDS_GPU, args, text)
    expert_tp = args.expert_tensor_parallel_size or args.tensor_model_parallel_size
    dropless = args.moe_expert_capacity_factor is None or not args.moe_pad_expert_input_to_capacity
    if args.num_experts and expert_tp > 1 and args.moe_token_dispatcher_type == "alltoall" and dropless:
        yield (
            f"--expert-tensor-parallel-size {expert_tp}: gloo cannot gather uneven numbers of tokens over expert "
            "tensor parallel ranks; give --expert-tensor-parallel-size 1, or --moe-expert-capacity-factor with "
            "--moe-pad-expert-input-to-capacity, or --moe-token-dispatcher-type allgather"
        )
