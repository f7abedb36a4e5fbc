"""Bytes that a rank sends to other stages in an iteration. The boundary log needs the same amount of memory."""

from __future__ import annotations

from argparse import Namespace

import torch


def bytes_sent_per_iteration(args: Namespace, stage: int) -> int:
    """Return the bytes that a rank of ``stage`` sends in an iteration of the largest global batch, in both directions.

    With ``--variable-seq-lengths`` the result is an upper bound. The last virtual stage of the model sends nothing
    forward, and the first sends nothing backward.
    """
    stages = args.pipeline_model_parallel_size
    chunks = args.virtual_pipeline_model_parallel_size or 1
    last = stages * chunks - 1
    sends = sum((chunk * stages + stage < last) + (chunk * stages + stage > 0) for chunk in range(chunks))
    micro_batches = args.global_batch_size // (args.micro_batch_size * args.data_parallel_size)
    length = args.seq_length // args.context_parallel_size
    if args.sequence_parallel:
        length //= args.tensor_model_parallel_size
    dtype = torch.float32 if args.fp32_residual_connection else args.params_dtype
    return int(sends * micro_batches * length * args.micro_batch_size * args.hidden_size * dtype.itemsize)
