"""Job with Megatron's grouped experts, on grouped linear layers in torch in place of Transformer Engine's."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest.mock import patch

from megatron.moevement.activate import process
from megatron.moevement.worker import run_rank


def trained_on_grouped_layers(argv: list[str]) -> set[tuple[int, int]]:
    """Train, and return the numbers of active and of all experts in the layers whose weight gradients were computed."""
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.transformer.moe.experts import GroupedMLPSubmodules, TEGroupedMLP
    from moevement_kernels import launch

    from megatron.moevement.transformer.experts import experts_with_kernels
    from tests.grouped_layer import GroupedLinear

    def grouped(*_: Any) -> Any:
        submodules: Any = GroupedMLPSubmodules(linear_fc1=GroupedLinear, linear_fc2=GroupedLinear)
        return partial(TEGroupedMLP, submodules=submodules)

    computed: set[tuple[int, int]] = set()
    original = launch.linear_weight_gradient

    def noted(dy: Any, x: Any, counts: Any, into: Any, **options: Any) -> None:
        computed.add((sum(target is not None for target in into), len(into)))
        original(dy, x, counts, into, **options)

    experts = patch.object(
        LocalSpecProvider, "grouped_mlp_modules", partial(experts_with_kernels, lambda: process().args, grouped)
    )
    with experts, patch.object(launch, "linear_weight_gradient", noted):
        run_rank(argv)
    return computed
