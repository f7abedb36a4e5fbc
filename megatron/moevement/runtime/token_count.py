"""Record of each batch's token count, which only the last stage computes, for replays without the last stage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.moevement.runtime.job import Process


def keep_token_count(
    process: Process, original: Callable[..., Any], model: list[Any], num_tokens: Any = None, *args: Any, **kwargs: Any
) -> Any:
    """Keep the token count of the batch, summed over all ranks, after ``finalize_model_grads``."""
    result = original(model, num_tokens, *args, **kwargs)
    process.job.live.num_tokens = num_tokens
    return result
