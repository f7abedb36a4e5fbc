"""Weight gradients of a grouped linear layer for its active experts only (``--moevement-frozen-kernels wgrad``).

Transformer Engine's grouped linear is one module for all experts of a rank, and computes all weight gradients or none.
This module runs it as if all experts were frozen, in training and in replays. So it computes only outputs and input
gradients, with equal bits in training and in replays. ``moevement_kernels.linear`` computes the weight gradients of
active experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from moevement_kernels.linear import with_weight_gradients


class SplitWeightGradients:
    """Hooks of a grouped linear layer without biases, whose weight gradients this project's kernel computes.

    The layer must skip all weight gradients if no weight requires a gradient in the forward pass.

    Args:
        linear: module with ``num_gemms`` weights ``weight0``, ``weight1`` and so on. Its forward pass takes tokens
            sorted by expert and the number of tokens of each expert, and returns the output and a bias or None.
    """

    def __init__(self, linear: Any) -> None:
        self._trainable = self._required = [weight.requires_grad for weight in _weights_of(linear)]
        self._is_inside = False
        """True during the layer's forward pass; it stays True if a restart interrupts the pass."""
        linear.takes_mixed_experts, linear.split_weight_gradients = True, self
        linear.register_forward_pre_hook(self._before)
        linear.register_forward_hook(self._after, always_call=True)

    def reset(self, linear: Any) -> None:
        """Activate all trainable weights if the layer's forward pass was interrupted, and do nothing otherwise.

        Without the reset, weights that the interrupted pass held as constants would never be trained again.
        """
        if self._is_inside:
            _require(linear, self._trainable)
            self._is_inside = False

    def _before(self, linear: Any, inputs: Any) -> None:
        self._required = [weight.requires_grad for weight in _weights_of(linear)]
        self._is_inside = True
        _require(linear, [False] * len(self._required))

    def _after(self, linear: Any, inputs: tuple[torch.Tensor, Sequence[int]], output: Any) -> Any:
        _require(linear, self._required)
        self._is_inside = False
        if output is None:  # The forward pass has raised an exception.
            return None
        (x, counts), (y, bias), weights = inputs, output, _weights_of(linear)
        if linear.config.gradient_accumulation_fusion:
            for weight in weights:
                weight.fuse_weight_gradient = True  # type: ignore[attr-defined]
        return with_weight_gradients(y, x, counts, weights), bias


def _weights_of(linear: Any) -> list[torch.nn.Parameter]:
    return [getattr(linear, f"weight{expert}") for expert in range(linear.num_gemms)]


def _require(linear: Any, required: Sequence[bool]) -> None:
    for weight, is_required in zip(_weights_of(linear), required, strict=True):
        weight.requires_grad_(is_required)
