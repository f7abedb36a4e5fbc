"""Refusals of flags that do not survive an interruption and a new entry in one process.

A job with spares interrupts and enters training again after every failure.
"""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Iterator

from megatron.moevement import platform
from megatron.moevement.preflight.refusal import Refusal, complaints, given
from moevement_core.util.environment import MEMBER_ENV

REFUSED = (
    Refusal(
        "--inprocess-restart", given("inprocess_restart"), "both would restart the job; leave the flag out"
    ),
)  # fmt: skip
REFUSED_ON_GPUS = (
    Refusal(
        "--moe-token-dispatcher-type flex", lambda args: args.moe_token_dispatcher_type == "flex",
        "its kernels (DeepEP, HybridEP) cannot be aborted, and every rank that waits for a lost one loses its device's "
        "context; give --moe-token-dispatcher-type alltoall",
    ),
    Refusal(
        "--use-nccl-ub", given("nccl_ub"),
        "gradient and weight buffers are registered with communicators, and nobody registers them with those that a "
        "recovery makes; leave the flag out",
    ),
    Refusal(
        "--tp-comm-overlap", given("tp_comm_overlap"),
        "Transformer Engine's communication buffers are made for processes of which one is replaced, and nobody has "
        "interrupted their kernels yet; leave the flag out",
    ),
)  # fmt: skip
"""Refusals for GPUs alone; without a GPU, every job refuses these flags."""


def spares(args: Namespace) -> Iterator[str]:
    """Yield complaints about flags that a job with spares does not support."""
    if MEMBER_ENV not in os.environ:
        return
    refused = REFUSED if platform.is_cpu() else (*REFUSED, *REFUSED_ON_GPUS)
    yield from complaints(refused, args, "{flag} with --spares: {reason}, or do without --spares")
