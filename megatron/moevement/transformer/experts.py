"""Megatron's experts on this project's kernels.

Modules, parameters and checkpoints stay Megatron's; only the forward pass is replaced. Training and replays both use
the kernels, because a replay with frozen experts must have the bits of training with active experts. These kernels
ensure equal bits (``moevement_kernels.op``).
"""

from __future__ import annotations

import functools
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from moevement_kernels.backend import Backend, select, why_reference
from moevement_kernels.cuda import grouped_product
from moevement_kernels.op import grouped_mlp

from megatron.moevement.transformer.grouped_linear import SplitWeightGradients
from megatron.moevement.transformer.kernel_choice import (
    FrozenKernels,
    activation_of,
    backend_of,
    splits_weight_gradients,
)
from moevement_core import log
from moevement_core.errors import ConfigError


def experts_with_kernels(
    arguments: Callable[[], Namespace], original: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Run experts on the kernels that ``--moevement-frozen-kernels`` names, in ``grouped_mlp_modules``.

    Args:
        arguments: function that returns the trainer's arguments.
        original: Megatron's function.
        args: arguments of the call.
        kwargs: keyword arguments of the call.
    """
    built = original(*args, **kwargs)
    return partial(_build, arguments, built) if isinstance(built, partial) else built


def _build(arguments: Callable[[], Namespace], built: Any, *args: Any, **kwargs: Any) -> Any:
    """Build the experts of a layer. The choice of kernels needs the configuration, which Megatron passes only here."""
    cls, flags = _classes().get(built.func), arguments()
    if cls is None or not vars(flags):  # Without arguments, the model is only described and never runs.
        return built(*args, **kwargs)
    config = kwargs["config"] if "config" in kwargs else args[1]
    if splits_weight_gradients(flags, config):
        return _with_own_weight_gradients(built(*args, **kwargs))
    backend = backend_of(flags, config)
    if backend is None:
        return built(*args, **kwargs)
    if backend is Backend.CUDA and torch.cuda.is_available():
        try:
            grouped_product.prepare()
        except grouped_product.CudaKernelError as error:
            raise ConfigError(f"--moevement-frozen-kernels cuda: {error}") from error
    select(backend)
    _say_once("experts", str(backend))
    return cls(*args, **{**built.keywords, **kwargs})


def _with_own_weight_gradients(experts: Any) -> Any:
    """Return grouped experts whose weight gradients come from this project's kernel, for active experts only.

    Raises:
        ConfigError: the experts are separate layers, so nothing is grouped.
    """
    linears = [getattr(experts, name, None) for name in ("linear_fc1", "linear_fc2")]
    if not all(hasattr(linear, "weight0") for linear in linears):
        raise ConfigError(
            f"--moevement-frozen-kernels {FrozenKernels.WGRAD}: {type(experts).__name__} has a layer for each expert, "
            "which skips the weight gradient of a frozen expert by itself; give the value off, or use "
            "--moe-grouped-gemm with Transformer Engine"
        )
    for linear in linears:
        SplitWeightGradients(linear)
    select(Backend.TRITON)
    _say_once("weight gradients of experts", str(Backend.TRITON))
    return experts


@functools.cache
def _say_once(what: str, backend: str) -> None:
    if torch.distributed.get_rank() == 0:
        reason = why_reference()
        running = f"the {backend} kernels" if reason is None else f"a reference version in torch, because {reason}"
        log.info(f"{what} run on {running}")


@functools.cache
def _classes() -> dict[Any, Any]:
    """Return the class that replaces each of Megatron's classes of experts, by Megatron's class."""
    from megatron.core.transformer.moe.experts import SequentialMLP, TEGroupedMLP

    class OnKernels:
        """Mixin that replaces the forward pass of Megatron's experts by this project's kernels."""

        def forward(
            self,
            permuted_local_hidden_states: torch.Tensor,
            tokens_per_expert: torch.Tensor,
            permuted_probs: torch.Tensor,
        ) -> tuple[torch.Tensor, None]:
            """Return the experts' outputs ``[tokens, hidden size]``, and no bias.

            Args:
                permuted_local_hidden_states: tokens ``[tokens, hidden size]``, sorted by local expert.
                tokens_per_expert: int64 ``[local experts]``.
                permuted_probs: probability of each token, ``[tokens]``.
            """
            w1, w2 = self.weights()  # type: ignore[attr-defined]
            if self.config.gradient_accumulation_fusion:  # type: ignore[attr-defined]
                for weight in (*w1, *w2):
                    weight.fuse_weight_gradient = True
            # Dispatchers without drops give counts on the host. Other counts are copied here, as in Megatron's experts.
            counts = tokens_per_expert.tolist()
            kind = activation_of(self.config)  # type: ignore[attr-defined]
            assert kind is not None
            return grouped_mlp(permuted_local_hidden_states, permuted_probs, counts, w1, w2, kind), None

    class SequentialOnKernels(OnKernels, SequentialMLP):
        """Megatron's sequential experts on the kernels; each expert is a separate module."""

        def weights(self) -> tuple[list[Any], list[Any]]:
            """Return the weights of each local expert: those of its first linear layer, and those of its second."""
            experts = self.local_experts
            return [expert.linear_fc1.weight for expert in experts], [expert.linear_fc2.weight for expert in experts]

    class GroupedOnKernels(OnKernels, TEGroupedMLP):
        """Transformer Engine's grouped experts on the kernels; the weights stay in the grouped linear layers."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            for linear in (self.linear_fc1, self.linear_fc2):
                linear.takes_mixed_experts = True

        def weights(self) -> tuple[list[Any], list[Any]]:
            """Return the weights of each local expert: those of its first linear layer, and those of its second."""
            numbers = range(self.num_local_experts)
            return (
                [getattr(self.linear_fc1, f"weight{number}") for number in numbers],
                [getattr(self.linear_fc2, f"weight{number}") for number in numbers],
            )

    return {SequentialMLP: SequentialOnKernels, TEGroupedMLP: GroupedOnKernels}
