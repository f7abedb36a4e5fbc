"""Random states of every rank in Megatron's dense checkpoints.

Megatron saves one set of random states for each tensor- and pipeline-parallel rank and gives it to all data-parallel
ranks. Expert-parallel ranks are among those, and each has an expert tracker of its own, so after a resume all but the
first would draw the first one's numbers. Megatron can save the states of every data-parallel rank; it does so under
``--data-parallel-random-init``, a flag that also changes the initial weights. Here it is set just while states are
collected and given back.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from megatron.moevement.runtime.job import Process


def states_of_every_rank(process: Process) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """``get_rng_state`` that collects the states of all data-parallel ranks where experts are spread over them."""

    def wrapper(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def get_rng_state(*args: Any, **kwargs: Any) -> Any:
            from megatron.training import get_args

            megatron_args = get_args()
            wanted = megatron_args.data_parallel_random_init or megatron_args.expert_model_parallel_size > 1
            with process.job.live.undo.nested() as inner:
                inner.set(megatron_args, "data_parallel_random_init", wanted)
                return original(*args, **kwargs)

        return get_rng_state

    return wrapper


def states_of_this_rank(original: Callable[..., Any]) -> Callable[..., Any]:
    """``dist_checkpointing.load`` whose random states are those of this rank, where Megatron takes the first.

    A checkpoint of stock Megatron, or of fewer data-parallel ranks, holds fewer: the last one stands for the rest, as
    its only one does in stock Megatron.
    """

    @functools.wraps(original)
    def load(*args: Any, **kwargs: Any) -> Any:
        from megatron.core import mpu
        from megatron.training import get_args

        loaded = original(*args, **kwargs)
        states = loaded.get("rng_state") if isinstance(loaded, dict) else None
        if isinstance(states, list) and states and not get_args().data_parallel_random_init:
            loaded["rng_state"] = [states[min(mpu.get_data_parallel_rank(), len(states) - 1)]]
        return loaded

    return load
