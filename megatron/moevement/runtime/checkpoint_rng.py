"""Random states of every rank in Megatron's dense checkpoints.

For each tensor- and pipeline-parallel rank, Megatron saves the random states of one data-parallel rank, and gives them
to all data-parallel ranks when it loads them. Among these are expert-parallel ranks, and each of them needs its own
random state for experts. So after a resume, all expert-parallel ranks would draw the same numbers. With
``--data-parallel-random-init``, Megatron saves the states of every data-parallel rank, but that flag also changes the
initial weights. This module sets the flag only while Megatron collects the states, and selects this rank's states when
Megatron loads them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.moevement.runtime.job import Process


def states_of_every_rank(process: Process, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Collect the states of every data-parallel rank, in place of ``get_rng_state``.

    Without expert parallelism, the function collects what Megatron collects.
    """
    megatron_args = process.args
    wanted = megatron_args.data_parallel_random_init or megatron_args.expert_model_parallel_size > 1
    with process.job.live.undo.nested() as inner:
        inner.set(megatron_args, "data_parallel_random_init", wanted)
        return original(*args, **kwargs)


def states_of_this_rank(process: Process, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Give each data-parallel rank the random states that it had saved, in place of ``dist_checkpointing.load``.

    Megatron's own function gives every rank the states of the first data-parallel rank. If stock Megatron or a smaller
    job saved the checkpoint, it has states for fewer data-parallel ranks than this job has. All further ranks then get
    the states of the last rank in the checkpoint.
    """
    from megatron.core import mpu

    loaded = original(*args, **kwargs)
    states = loaded.get("rng_state") if isinstance(loaded, dict) else None
    if isinstance(states, list) and states and not process.args.data_parallel_random_init:
        loaded["rng_state"] = [states[min(mpu.get_data_parallel_rank(), len(states) - 1)]]
    return loaded
