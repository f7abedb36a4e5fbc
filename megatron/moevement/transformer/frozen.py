"""Frozen and active operators in a Megatron model (MoEvement section 3.3).

A frozen operator computes its output and the gradient of its input, but no weight gradient. For Megatron's linear
layers, norms and embeddings, it suffices that ``requires_grad`` of the weights is False in the forward pass. This
module handles three parts for which it does not suffice: the router, Transformer Engine's grouped linear, and the
layers above a frozen embedding.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from megatron.moevement.optimizer.views import Trained


class FrozenMode:
    """Switch that freezes operators of this rank's virtual stages.

    Args:
        chunks: unwrapped virtual stages.
        trained: parameters of each operator. Parameters that are not trainable at construction stay untrainable.
    """

    def __init__(self, chunks: Sequence[Any], trained: Mapping[str, Sequence[Trained]]) -> None:
        self._parameters = {
            name: [entry.parameter for entry in entries if entry.parameter.requires_grad]
            for name, entries in trained.items()
        }
        self._together = [group for chunk in chunks for group in _frozen_together(chunk)]
        self._hooks: list[Any] = []
        self._chunks = chunks

    def freeze(self, frozen: frozenset[str]) -> None:
        """Freeze these operators from the next forward pass on, and activate all others."""
        for name, parameters in self._parameters.items():
            for parameter in parameters:
                parameter.requires_grad_(name not in frozen)
        for group in self._together:
            if any(parameter.requires_grad for parameter in group):
                for parameter in group:
                    parameter.requires_grad_(True)

    @contextmanager
    def as_if_active(self) -> Iterator[None]:
        """Set ``requires_grad`` of all trainable parameters in a ``with`` block.

        The block must not run a forward pass, which would record gradients of frozen operators.
        """
        before = [
            (parameter, parameter.requires_grad) for parameters in self._parameters.values() for parameter in parameters
        ]
        for parameter, _ in before:
            parameter.requires_grad_(True)
        try:
            yield
        finally:
            for parameter, required in before:
                parameter.requires_grad_(required)

    def begin(self) -> None:
        """Install hooks before the first forward pass with frozen operators."""
        for chunk in self._chunks:
            if getattr(chunk, "embedding", None) is not None:
                self._hooks.append(chunk.embedding.register_forward_hook(_require_grad))

    def end(self) -> None:
        """Activate all operators, and remove the hooks."""
        self.freeze(frozenset())
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()


def _require_grad(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    """Let the gradient flow back to the embedding's output, even if the embedding is frozen.

    There are two reasons. A recomputed block whose input requires no gradient computes no gradients, not even those of
    active operators. And all ranks that exchange tokens must take part in the backward pass: a rank with an active
    expert in the first layer would wait forever for a rank whose experts in that layer are all frozen.
    """
    if torch.is_grad_enabled() and not output.requires_grad:
        output.requires_grad_(True)
    return output


def _frozen_together(chunk: Any) -> list[list[torch.nn.Parameter]]:
    """Return groups of weights that all have to compute gradients as soon as one of them is active.

    These are the weights of Transformer Engine's grouped linear, which is one module for all experts of a layer. It
    checks ``requires_grad`` of the first expert only, and so would drop the gradients of active experts if the first
    expert is frozen. The optimizer skips the frozen experts. Layers on this project's kernels (``experts.py``,
    ``grouped_linear.py``) are not in the result, because the kernels handle each expert separately.
    """
    groups = []
    for module in chunk.modules():
        count = getattr(module, "num_gemms", None)
        if isinstance(count, int) and hasattr(module, "weight0") and not getattr(module, "takes_mixed_experts", False):
            for kind in ("weight", "bias"):
                group = [getattr(module, f"{kind}{index}", None) for index in range(count)]
                groups.append([weight for weight in group if isinstance(weight, torch.nn.Parameter)])
    return groups


def gating_without_weight_gradient(
    original: Callable[..., Any],
    inp: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    router_dtype: torch.dtype,
) -> torch.Tensor:
    """Skip the weight gradient of a frozen router, in ``router_gating_linear``.

    Megatron's own backward pass always computes the weight gradient.
    """
    if weight.requires_grad or not torch.is_grad_enabled():
        return original(inp, weight, bias, router_dtype)
    return _frozen_gating().apply(inp, weight, bias, router_dtype)


@functools.cache
def _frozen_gating() -> Any:
    from megatron.core.transformer.moe import moe_utils

    class FrozenGating(moe_utils.RouterGatingLinearFunction):
        """Autograd function with Megatron's forward pass, and only the input's gradient in the backward pass."""

        @staticmethod
        def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
            tokens, weight, _ = ctx.saved_tensors
            grad_TE, weight_EH = grad_output.view(-1, grad_output.shape[-1]), weight.to(ctx.router_dtype)
            if moe_utils.te_general_gemm is not None and ctx.router_dtype != torch.float64:
                grad_TH = moe_utils.te_general_gemm(weight_EH, grad_TE, ctx.router_dtype, layout="NN", grad=True)[0]
            else:
                grad_TH = torch.mm(grad_TE, weight_EH)
            return grad_TH.to(ctx.input_dtype).view(tokens.shape), None, None, None

    return FrozenGating
