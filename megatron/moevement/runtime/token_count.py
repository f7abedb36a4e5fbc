"""Record of each batch's token count, which only the last stage computes, for replays without the last stage."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from megatron.moevement.runtime.job import Process


def keep_token_count(process: Process) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a wrapper of ``finalize_model_grads`` that keeps the token count of the batch, summed over all ranks."""

    def wrapper(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def finalize_model_grads(model: list[Any], num_tokens: Any = None, *args: Any, **kwargs: Any) -> Any:
            result = original(model, num_tokens, *args, **kwargs)
            process.job.live.num_tokens = num_tokens
            return result

        return finalize_model_grads

    return wrapper
