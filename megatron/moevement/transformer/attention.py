"""Megatron's local attention with key heads and value heads of different widths, for multi-latent attention.

``MLASelfAttention`` passes both widths to its core attention, but the local ``DotProductAttention`` accepts neither.
The arithmetic of the local attention works for any widths. The softmax scale depends on the key width, and the shape of
the output depends on the value width.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any


def attention_with_channels(original: Callable[..., None]) -> Callable[..., None]:
    """Return a ``DotProductAttention.__init__`` that accepts the widths of heads, ``k_channels`` and ``v_channels``."""

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
