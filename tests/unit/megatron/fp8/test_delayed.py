"""Delayed scaling follows recorded amaxes, and recomputed forward passes change nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatron.moevement.fp8 import autocast
from megatron.moevement.fp8.delayed import DelayedScales, set_scales
from megatron.moevement.fp8.linear import _Product, _quantised_weight
from megatron.moevement.fp8.recipe import Recipe, Role


@pytest.mark.parametrize("takes_max", [False, True])
@pytest.mark.parametrize(("history", "margin"), [(1, 0), (4, 0), (3, 2)])
def test_scales_follow_what_was_seen(history: int, margin: int, takes_max: bool) -> None:
    layer = DelayedScales(Recipe("delayed", True, margin, history, takes_max))
    seen: list[float] = []
    scale = 1.0
    for amax in (2.0, 0.0, 7.0, 0.5, float("inf"), 3.0, 0.0, 0.0, 0.0, 1.0):
        for value in (amax, amax / 2):  # two matrices of one role
            layer.record(Role.GRADIENT, torch.full((2, 2), value, dtype=torch.bfloat16))
        set_scales([layer], (Role.GRADIENT,), None)
        seen.append(amax)
        chosen = max(seen[-history:]) if takes_max else amax
        if 0.0 < chosen < float("inf"):
            scale = 57344.0 / chosen / 2.0**margin
        assert float(layer.scale[Role.GRADIENT]) == pytest.approx(scale, rel=1e-6)
    assert layer.scale[Role.INPUT] == layer.scale[Role.WEIGHT] == 1.0, "nothing was seen there"


def test_it_is_moved_with_a_model_and_never_converted() -> None:
    linear, scales = torch.nn.Linear(2, 2), DelayedScales(Recipe("delayed", True))
    scales.scale.fill_(1 / 3)
    torch.nn.Sequential(linear, scales).bfloat16()
    assert linear.weight.dtype == torch.bfloat16
    assert scales.scale.dtype == torch.float32
    assert float(scales.scale[0]) == float(torch.tensor(1 / 3))


class Layer(torch.nn.Module):
    """Linear layer that computes in FP8 as this project's layers for Megatron do."""

    def __init__(self, recipe: Recipe, seed: int) -> None:
        super().__init__()
        self.recipe = recipe
        values = torch.randn(32, 32, generator=torch.Generator().manual_seed(seed)) / 4
        self.weight = torch.nn.Parameter(values)
        self.fp8 = DelayedScales(recipe) if recipe.is_delayed else None
        self.fp8_weight: Any = None
        self.is_first_microbatch = True

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        region = autocast.current()
        assert region is not None
        call = region.call(self.fp8)
        return torch.tanh(_Product.apply(tokens, self.weight, _quantised_weight(self, call, self.weight), call))


def pairs(layers: list[Layer], tokens: torch.Tensor) -> torch.Tensor:
    """Run the layers in two parts. The backward pass recomputes each part."""
    for pair in (layers[:2], layers[2:]):
        tokens = autocast.checkpoint(lambda x, pair=pair: pair[1](pair[0](x)), False, None, None, tokens)
    return tokens


def nested(layers: list[Layer], tokens: torch.Tensor) -> torch.Tensor:
    """Run the layers in one part that the backward pass recomputes. It contains another such part."""

    def all_of_it(x: torch.Tensor) -> torch.Tensor:
        x = layers[0](x)
        x = autocast.checkpoint(lambda y: layers[2](layers[1](y)), False, None, None, x)
        return layers[3](x)

    return autocast.checkpoint(all_of_it, False, None, None, tokens)


def with_a_region_inside(layers: list[Layer], tokens: torch.Tensor) -> torch.Tensor:
    """Run the layers in one recomputed part that enters FP8 again, as multi-token prediction does."""

    def all_of_it(x: torch.Tensor) -> torch.Tensor:
        x = layers[1](layers[0](x))
        with autocast.autocast(layers[0].recipe, None):
            return layers[3](layers[2](x))

    return autocast.checkpoint(all_of_it, False, None, None, tokens)


@pytest.mark.parametrize("recomputed_forward", [pairs, nested, with_a_region_inside])
@pytest.mark.parametrize("name", ["delayed", "tensorwise", "blockwise", "mxfp8"])
def test_a_forward_pass_that_is_run_again_changes_nothing(
    name: str, recomputed_forward: Callable[[list[Layer], torch.Tensor], torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compare weights, scales and histories with and without recomputation, after iterations of two microbatches."""
    from megatron.core import tensor_parallel

    monkeypatch.setattr(
        tensor_parallel, "checkpoint",
        lambda function, distribute, *args: torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=True),
    )  # fmt: skip
    recipe = Recipe(name, True, 0, 3, True)

    def trained(recomputes: bool) -> list[Any]:
        layers = [Layer(recipe, seed) for seed in range(4)]
        generator = torch.Generator().manual_seed(9)
        for _ in range(3):
            for layer in layers:
                layer.is_first_microbatch = True
            losses = []
            for _ in range(2):  # both forward passes before the first backward pass, as pipelines do
                tokens = torch.randn(8, 32, generator=generator, requires_grad=True)
                with autocast.autocast(recipe, None):
                    if recomputes:
                        tokens = recomputed_forward(layers, tokens)
                    else:
                        for layer in layers:
                            tokens = layer(tokens)
                losses.append(tokens.square().mean())
            for loss in losses:
                loss.backward()
            with torch.no_grad():
                for layer in layers:
                    assert layer.weight.grad is not None
                    layer.weight.sub_(layer.weight.grad)
        return [tensor.clone() for layer in layers for tensor in (*layer.parameters(), *layer.buffers())]

    for first, second in zip(trained(False), trained(True), strict=True):
        assert torch.equal(first, second)
    assert autocast.current() is None


def test_an_evaluation_moves_nothing() -> None:
    layer = Layer(Recipe("delayed", True), 0)
    assert layer.fp8 is not None
    with torch.no_grad(), autocast.autocast(Recipe("delayed", True), None):
        layer(torch.randn(4, 32))
    assert torch.equal(layer.fp8.scale, torch.ones(3))
    assert not layer.fp8.amax_history.any()
    assert autocast.current() is None
