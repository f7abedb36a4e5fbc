"""Record of each batch's token count. Only the last stage counts, but other stages may replay without that stage."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from megatron.moevement.runtime.job import Process


def keep_token_count(process: Process) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a wrapper of ``finalize_model_grads`` that records the token count after its sum over the job."""

    def wrapper(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def finalize_model_grads(model: list[Any], num_tokens: Any = None, *args: Any, **kwargs: Any) -> Any:
            result = original(model, num_tokens, *args, **kwargs)
            process.job.live.num_tokens = num_tokens
            return result

        return finalize_model_grads

    return wrapper
