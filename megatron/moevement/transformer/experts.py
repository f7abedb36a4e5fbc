"""Megatron's experts, run by our kernels: the same modules, parameters and checkpoints, another forward pass.

The kernels run normal training too: a replay with some experts frozen has to give the bits of a run in which all are
active, and these kernels do (``moevement_kernels.op``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from moevement_kernels.backend import Backend, select, why_reference
from moevement_kernels.cuda import grouped_product
from moevement_kernels.op import grouped_mlp

from megatron.moevement.transformer.kernel_choice import activation_of, backend_of
from moevement_core import log
from moevement_core.errors import ConfigError


def experts_with_kernels(original: Callable[..., Any]) -> Callable[..., Any]:
    """``grouped_mlp_modules`` of a spec provider, whose experts run our kernels if the flags say so."""

    @functools.wraps(original)
    def grouped_mlp_modules(*args: Any, **kwargs: Any) -> Any:
        built = original(*args, **kwargs)
        return partial(_build, built) if isinstance(built, partial) else built

    return grouped_mlp_modules


def _build(built: Any, *args: Any, **kwargs: Any) -> Any:
    """The experts module, once its configuration is known."""
    from megatron.training import global_vars

    cls, arguments = _classes().get(built.func), global_vars._GLOBAL_ARGS
    if cls is None or arguments is None:  # a model that is described and never run has no arguments
        return built(*args, **kwargs)
    backend = backend_of(arguments, kwargs["config"] if "config" in kwargs else args[1])
    if backend is None:
        return built(*args, **kwargs)
    if backend is Backend.CUDA and torch.cuda.is_available():
        try:
            grouped_product.prepare()
        except grouped_product.CudaKernelError as error:
            raise ConfigError(f"--moevement-frozen-kernels cuda: {error}") from error
    select(backend)
    _say_once(str(backend))
    return cls(*args, **{**built.keywords, **kwargs})


@functools.cache
def _say_once(backend: str) -> None:
    if torch.distributed.get_rank() == 0:
        reason = why_reference()
        running = f"the {backend} kernels" if reason is None else f"the kernels' reference in torch, as {reason}"
        log.info(f"experts run on {running}")


@functools.cache
def _classes() -> dict[Any, Any]:
    """Return, for each experts module of Megatron that can be replaced, the class that replaces it."""
    from megatron.core.transformer.moe.experts import SequentialMLP, TEGroupedMLP

    class OnKernels:
        """Takes the place of Megatron's forward pass."""

        def forward(
            self,
            permuted_local_hidden_states: torch.Tensor,
            tokens_per_expert: torch.Tensor,
            permuted_probs: torch.Tensor,
        ) -> tuple[torch.Tensor, None]:
            """Tokens ``[T, H]`` sorted by local expert, int64 ``[local experts]``, ``[T]``."""
            w1, w2 = self.weights()  # type: ignore[attr-defined]
            if self.config.gradient_accumulation_fusion:  # type: ignore[attr-defined]
                for weight in (*w1, *w2):
                    weight.fuse_weight_gradient = True
            # On the host already with dropless dispatchers; Megatron's own experts ask for it here too.
            counts = tokens_per_expert.tolist()
            kind = activation_of(self.config)  # type: ignore[attr-defined]
            assert kind is not None
            return grouped_mlp(permuted_local_hidden_states, permuted_probs, counts, w1, w2, kind), None

    class SequentialOnKernels(OnKernels, SequentialMLP):
        """Experts that are modules of their own."""

        def weights(self) -> tuple[list[Any], list[Any]]:
            """Return the weights of each local expert: ``[G, H]`` and ``[H, F]``."""
            experts = self.local_experts
            return [one.linear_fc1.weight for one in experts], [one.linear_fc2.weight for one in experts]

    class GroupedOnKernels(OnKernels, TEGroupedMLP):
        """Transformer Engine's grouped linears, of which we take the weights."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            for linear in (self.linear_fc1, self.linear_fc2):
                linear.takes_mixed_experts = True

        def weights(self) -> tuple[list[Any], list[Any]]:
            """Return the weights of each local expert: ``[G, H]`` and ``[H, F]``."""
            numbers = range(self.num_local_experts)
            return (
                [getattr(self.linear_fc1, f"weight{number}") for number in numbers],
                [getattr(self.linear_fc2, f"weight{number}") for number in numbers],
            )

    return {SequentialMLP: SequentialOnKernels, TEGroupedMLP: GroupedOnKernels}
