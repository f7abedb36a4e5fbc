"""Frozen and active operators in a Megatron model (MoEvement section 3.3).

A frozen operator computes its output and the gradient of its input. Its weight gradient is not computed: Megatron's
linear layers, norms and embeddings look at ``requires_grad`` of their weights in the forward pass, and take another
path. Three places do not, and are helped here: the router, Transformer Engine's grouped linear, and what stands above a
frozen embedding.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from megatron.moevement.optimizer.views import Trained


class FrozenMode:
    """Freezes operators of this rank's virtual stages.

    Args:
        chunks: unwrapped.
        trained: the parameters of each operator. One that was not trainable stays so.
    """

    def __init__(self, chunks: Sequence[Any], trained: Mapping[str, Sequence[Trained]]) -> None:
        self._parameters = {
            name: [one.parameter for one in its if one.parameter.requires_grad] for name, its in trained.items()
        }
        self._together = [group for chunk in chunks for group in _frozen_together(chunk)]
        self._hooks: list[Any] = []
        self._chunks = chunks

    def freeze(self, frozen: frozenset[str]) -> None:
        """Operators to be frozen from the next forward pass on; all others are active."""
        for name, parameters in self._parameters.items():
            for parameter in parameters:
                parameter.requires_grad_(name not in frozen)
        for group in self._together:
            if any(parameter.requires_grad for parameter in group):
                for parameter in group:
                    parameter.requires_grad_(True)

    @contextmanager
    def as_if_active(self) -> Iterator[None]:
        """Everything says that it requires a gradient, for a while in which none is computed."""
        before = [(one, one.requires_grad) for parameters in self._parameters.values() for one in parameters]
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
        """Everything is active again."""
        self.freeze(frozenset())
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()


def _require_grad(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    """Let the gradient flow down to the embedding even where nothing below needs it.

    A recomputed block whose input requires no gradient computes none, of its active operators neither. And ranks that
    exchange tokens must agree on what flows back: one with an active expert in the first layer would wait for ever for
    one whose experts there are all frozen.
    """
    if torch.is_grad_enabled() and not output.requires_grad:
        output.requires_grad_(True)
    return output


def _frozen_together(chunk: Any) -> list[list[torch.nn.Parameter]]:
    """Weights of which a module looks at the first one only, and takes all for the same.

    Transformer Engine's grouped linear (one module for all experts of a layer) would drop the gradients of active
    experts behind a frozen first one. While one of them is active they all compute gradients; the optimizer passes the
    frozen ones over. Our kernels (``experts.py``) take each expert by itself.
    """
    groups = []
    for module in chunk.modules():
        count = getattr(module, "num_gemms", None)
        if isinstance(count, int) and hasattr(module, "weight0") and not getattr(module, "takes_mixed_experts", False):
            for kind in ("weight", "bias"):
                group = [getattr(module, f"{kind}{index}", None) for index in range(count)]
                groups.append([one for one in group if isinstance(one, torch.nn.Parameter)])
    return groups


def gating_without_weight_gradient(original: Callable[..., Any]) -> Callable[..., Any]:
    """``router_gating_linear``, whose backward pass computes a weight gradient whoever wants it."""
    from megatron.core.transformer.moe import moe_utils

    class FrozenGating(moe_utils.RouterGatingLinearFunction):
        """Megatron's forward pass; of the backward pass the gradient of the input."""

        @staticmethod
        def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
            tokens, weight, _ = ctx.saved_tensors
            grad_TE, weight_EH = grad_output.view(-1, grad_output.shape[-1]), weight.to(ctx.router_dtype)
            if moe_utils.te_general_gemm is not None and ctx.router_dtype != torch.float64:
                grad_TH = moe_utils.te_general_gemm(weight_EH, grad_TE, ctx.router_dtype, layout="NN", grad=True)[0]
            else:
                grad_TH = torch.mm(grad_TE, weight_EH)
            return grad_TH.to(ctx.input_dtype).view(tokens.shape), None, None, None

    @functools.wraps(original)
    def router_gating_linear(
        inp: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, router_dtype: torch.dtype
    ) -> torch.Tensor:
        if weight.requires_grad or not torch.is_grad_enabled():
            return original(inp, weight, bias, router_dtype)
        return FrozenGating.apply(inp, weight, bias, router_dtype)

    return router_gating_linear
