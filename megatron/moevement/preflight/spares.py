"""Refusals of flags that a job with spares does not support.

After every failure, such a job interrupts training and enters it again in the same processes.
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
        "kernels of DeepEP and HybridEP cannot be aborted, and every rank that waits for a lost rank loses its "
        "device's context; give --moe-token-dispatcher-type alltoall",
    ),
    Refusal(
        "--use-nccl-ub", given("nccl_ub"),
        "gradient and weight buffers are registered with NCCL communicators, but not with the new communicators after "
        "a recovery; leave the flag out",
    ),
    Refusal(
        "--tp-comm-overlap", given("tp_comm_overlap"),
        "Transformer Engine's communication buffers belong to a fixed set of processes, and an interruption of their "
        "kernels is untested; leave the flag out",
    ),
)  # fmt: skip
"""Refusals on GPUs alone; without a GPU, ``machine.py`` refuses these flags in every job."""


def spares(args: Namespace) -> Iterator[str]:
    """Yield complaints about flags that a job with spares does not support."""
    if MEMBER_ENV not in os.environ:
        return
    refused = REFUSED if platform.is_cpu() else (*REFUSED, *REFUSED_ON_GPUS)
    yield from complaints(refused, args, "{flag} with --spares: {reason}, or leave --spares out")
