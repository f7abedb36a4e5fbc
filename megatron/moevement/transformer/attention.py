"""Megatron's local attention with key and value heads of different widths, as multi-latent attention has them.

``MLASelfAttention`` names both widths to its core attention; the local ``DotProductAttention`` takes neither, although
its arithmetic does not care: all that depends on a width is the shape of its output.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any


def attention_with_channels(original: Callable[..., None]) -> Callable[..., None]:
    """``DotProductAttention.__init__`` that takes ``k_channels`` and ``v_channels``, widths of one head."""

    @functools.wraps(original)
    def __init__(
        self: Any,
        config: Any,
        *args: Any,
        k_channels: int | None = None,
        v_channels: int | None = None,
        softmax_scale: float | None = None,
        **kwargs: Any,
    ) -> None:
        if softmax_scale is None and k_channels is not None:
            softmax_scale = 1.0 / math.sqrt(k_channels)
        original(self, config, *args, softmax_scale=softmax_scale, **kwargs)
        if v_channels is not None:
            self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition

    return __init__
