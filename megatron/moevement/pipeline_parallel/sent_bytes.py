"""Bytes that a rank sends to other stages in an iteration. The boundary log needs the same amount of memory."""

from __future__ import annotations

from argparse import Namespace

import torch


def bytes_sent_per_iteration(args: Namespace, stage: int) -> int:
    """Return the bytes that a rank of ``stage`` sends in an iteration of the largest global batch, in both directions.

    With ``--variable-seq-lengths`` the result is an upper bound.
    """
    micro_batches = args.global_batch_size // (args.micro_batch_size * args.data_parallel_size)
    length = args.seq_length // args.context_parallel_size
    if args.sequence_parallel:
        length //= args.tensor_model_parallel_size
    dtype = torch.float32 if args.fp32_residual_connection else args.params_dtype
    tensor_bytes = length * args.micro_batch_size * args.hidden_size * dtype.itemsize
    return int(sends_per_micro_batch(args, stage) * micro_batches * tensor_bytes)


def sends_per_micro_batch(args: Namespace, stage: int) -> int:
    """Return the number of tensors that a rank of ``stage`` sends to other stages for one micro-batch.

    The last virtual stage of the model sends nothing forward, and the first sends nothing backward.
    """
    stages, chunks = args.pipeline_model_parallel_size, args.virtual_pipeline_model_parallel_size or 1
    return 2 * chunks - (stage == stages - 1) - (stage == 0) if stages > 1 else 0
