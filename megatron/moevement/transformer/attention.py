"""Megatron's local attention with key heads and value heads of different widths, for multi-latent attention.

``MLASelfAttention`` passes both widths to its core attention, but the local ``DotProductAttention`` accepts neither.
The arithmetic of the local attention works for any widths. The softmax scale depends on the key width, and the shape of
the output depends on the value width.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any


def attention_with_channels(
    original: Callable[..., None],
    self: Any,
    config: Any,
    *args: Any,
    k_channels: int | None = None,
    v_channels: int | None = None,
    softmax_scale: float | None = None,
    **kwargs: Any,
) -> None:
    """Accept the widths of heads, ``k_channels`` and ``v_channels``, in ``DotProductAttention.__init__``."""
    if softmax_scale is None and k_channels is not None:
        softmax_scale = 1.0 / math.sqrt(k_channels)
    original(self, config, *args, softmax_scale=softmax_scale, **kwargs)
    if v_channels is not None:
        self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition
