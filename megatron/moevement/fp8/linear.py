"""Product of a linear layer in FP8, and Megatron's linear layers that use it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from megatron.moevement.fp8 import autocast
from megatron.moevement.fp8.autocast import Call
from megatron.moevement.fp8.delayed import DelayedScales
from megatron.moevement.fp8.formats import Quantised
from megatron.moevement.fp8.recipe import Recipe, Role
from megatron.moevement.fp8.tensor import QuantisedTensor, keep_in_fp8


class _Product(torch.autograd.Function):
    """Autograd function ``input @ weight.T`` of quantised matrices, with its two gradients."""

    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, weight: torch.Tensor, quantised: Quantised, call: Call) -> torch.Tensor:
        """Return the product ``[..., N]`` of ``[..., K]`` and ``[N, K]``, in the dtype of the tokens."""
        flat = tokens.reshape(-1, tokens.shape[-1])
        quantised_tokens = call.quantise(flat, Role.INPUT)
        ctx.tokens, ctx.weight, ctx.call = quantised_tokens.column, quantised.column, call
        ctx.dtypes = tokens.dtype, weight.dtype
        product = quantised_tokens.row.dequantised() @ quantised.row.dequantised().T
        return product.to(tokens.dtype).view(*tokens.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None]:
        """Return the gradient of the input, and the gradient of the weight unless the weight is frozen."""
        flat = gradient.reshape(-1, gradient.shape[-1])
        quantised_gradient = ctx.call.quantise(flat, Role.GRADIENT)
        of_tokens = of_weight = None
        if ctx.needs_input_grad[0]:
            of_tokens = (quantised_gradient.row.dequantised() @ ctx.weight.dequantised()).to(ctx.dtypes[0])
            of_tokens = of_tokens.view(*gradient.shape[:-1], of_tokens.shape[-1])
        if ctx.needs_input_grad[1]:
            of_weight = (quantised_gradient.column.dequantised().T @ ctx.tokens.dequantised()).to(ctx.dtypes[1])
        ctx.call.after_backward()
        return of_tokens, of_weight, None, None


def forward_in_fp8(
    original: Callable[..., torch.Tensor],
    self: Any,
    input: torch.Tensor,
    weight: torch.Tensor,
    *args: Any,
    **kwargs: Any,
) -> torch.Tensor:
    """Run a linear layer in FP8 inside :func:`autocast.autocast`, in place of Megatron's ``_forward_impl``."""
    region = autocast.current()
    if region is None or getattr(self, "fp8_recipe", None) is None:
        return original(self, input, weight, *args, **kwargs)
    return _linear(self, region.call(getattr(self, "fp8", None)), input, weight, **kwargs)


def _linear(
    layer: Any,
    call: Call,
    tokens: torch.Tensor,
    weight: torch.Tensor,
    *,
    bias: torch.Tensor | None,
    allreduce_dgrad: bool,
    sequence_parallel: bool,
    tp_group: Any,
    **others: Any,
) -> torch.Tensor:
    """Compute Megatron's ``linear_with_grad_accumulation_and_async_allreduce`` in FP8.

    The arguments in ``others`` are ignored, because they only make Megatron's function faster on a GPU.
    """
    from megatron.core.tensor_parallel import mappings

    if sequence_parallel:
        tokens = mappings.gather_from_sequence_parallel_region(tokens, tensor_parallel_output_grad=True, group=tp_group)
    elif allreduce_dgrad:
        tokens = mappings.copy_to_tensor_model_parallel_region(tokens, group=tp_group)
    product = _Product.apply(tokens, weight, _quantised_weight(layer, call, weight), call)
    return product if bias is None else product + bias


def _quantised_weight(layer: Any, call: Call, weight: torch.Tensor) -> Quantised:
    """Return the quantised weight of a layer.

    A weight does not change between the micro-batches of an iteration, so only the first micro-batch quantises it.
    """
    if isinstance(weight, QuantisedTensor):
        return weight.quantised()
    if layer.is_first_microbatch or layer.fp8_weight is None:
        layer.fp8_weight = call.quantise(weight.detach(), Role.WEIGHT)
        layer.is_first_microbatch = False
    return layer.fp8_weight


_building: list[list[Any]] = []
"""Linear layers built inside each open context of :func:`building`, one list for each context."""


def forget() -> None:
    """Drop all contexts of :func:`building` that an interruption has left open."""
    _building.clear()


def remember_layer(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    """Add a linear layer to the innermost context of :func:`building`, in place of its ``__init__``."""
    original(self, *args, **kwargs)
    for layers in _building[-1:]:
        layers.append(self)


@contextmanager
def building(recipe: Recipe, *, keeps_weights: bool) -> Iterator[None]:
    """Prepare all linear layers that Megatron builds in a ``with`` block for FP8.

    If ``keeps_weights``, the layers also hold their weights in FP8 (``--fp8-param-gather``).
    """
    layers: list[Any] = []
    _building.append(layers)
    try:
        yield
    finally:
        _building.pop()
    for layer in layers:
        layer.fp8_recipe = recipe
        layer.fp8_weight = None
        layer.is_first_microbatch = True
        if recipe.is_delayed:
            layer.fp8 = DelayedScales(recipe)
        if keeps_weights:
            keep_in_fp8(layer, recipe)
