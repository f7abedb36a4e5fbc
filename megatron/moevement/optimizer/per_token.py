"""Division of gradients by the number of tokens of the batch (``--calculate-per-token-loss``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def divide_gradients(chunks: Sequence[Any], num_tokens: int, counted: torch.Tensor) -> None:
    """Divide gradients by the number of tokens in the batch, as Megatron's ``finalize_model_grads`` does at its end.

    A replay without the last stage calls this function, because only the last stage counts tokens.

    Args:
        chunks: this rank's virtual stages.
        num_tokens: tokens of the batch.
        counted: number of tokens that this rank counted. Only its dtype and device are used.
    """
    scaling = 1.0 / torch.clamp(torch.full_like(counted, num_tokens), min=1)
    for chunk in chunks:
        chunk.scale_gradients(scaling)
