"""Popularity of experts in one pass over what a router has decided: tokens routed, and probabilities.

Counts are exact. Probabilities are summed in FP32 over blocks of rows and in FP64 over blocks, always in that order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from moevement_kernels.backend import has_kernels

ROWS = 128


class Popularity(NamedTuple):
    """Of each expert, on the device of the input."""

    tokens: torch.Tensor
    """int64 ``[E]``."""
    probability: torch.Tensor
    """FP64 ``[E]``."""


def reference(routing_map: torch.Tensor, probabilities: torch.Tensor) -> Popularity:
    """``routing_map``: bool ``[T, E]``; ``probabilities``: floating point ``[T, E]``."""
    return Popularity(routing_map.sum(0), probabilities.double().sum(0))


def popularity(routing_map: torch.Tensor, probabilities: torch.Tensor) -> Popularity:
    """As :func:`reference`, without waiting for the device.

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    if routing_map.dtype != torch.bool or routing_map.dim() != 2 or routing_map.shape != probabilities.shape:
        raise ValueError(
            f"routing map {tuple(routing_map.shape)} {routing_map.dtype}, probabilities {tuple(probabilities.shape)}; "
            "needs bool [T, E] and the same shape"
        )
    if not has_kernels(routing_map) or not routing_map.numel():
        return reference(routing_map, probabilities)
    from moevement_kernels.triton_popularity import count_kernel

    tokens, experts = routing_map.shape
    blocks, across = -(-tokens // ROWS), 32
    device = routing_map.device
    hard = torch.empty(blocks, experts, dtype=torch.int32, device=device)
    soft = torch.empty(blocks, experts, dtype=torch.float32, device=device)
    count_kernel[blocks, -(-experts // across)](
        routing_map.contiguous().view(torch.uint8), probabilities.contiguous(), hard, soft, tokens, experts,
        BT=ROWS, BE=across,
    )  # fmt: skip
    return Popularity(hard.sum(0, dtype=torch.int64), soft.sum(0, dtype=torch.float64))
