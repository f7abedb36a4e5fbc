"""Weight gradients of a grouped linear layer match autograd for active experts, and frozen experts get none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from moevement_kernels import launch, reference
from moevement_kernels.linear import with_weight_gradients
from torch import Tensor

from tests.kernels.problems import COUNTS, SMALL, WIDE, first_names

ROWS, COLUMNS = 40, 24
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
MIXED = [True, False, False, True, True]
"""Active experts of the problem ``ragged``: one of them has no tokens, and so has one of the frozen ones."""


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def active_rows(x: Tensor, counts: list[int], active: list[bool]) -> Tensor:
    rows = zip(x.split(counts), active, strict=True)
    return torch.cat([x[:0], *(part for part, is_active in rows if is_active)])


@pytest.mark.parametrize(
    ("shape", "dtype"), first_names([("ragged", dtype) for dtype in DTYPES], sorted(COUNTS), DTYPES)
)
def test_the_kernel_has_the_numbers_of_the_reference(shape: str, dtype: torch.dtype) -> None:
    counts = COUNTS[shape]
    active = [number % 3 != 1 for number in range(len(counts))]
    tokens = sum(counts)
    x, dy = normal(tokens, COLUMNS, dtype=dtype, seed=1), normal(tokens, ROWS, dtype=dtype, seed=2)
    kept = active_rows(x, counts, active)
    expected = reference.linear_weight_gradient(dy, kept, counts, active)
    for accumulate in (False, True):
        into = [torch.full((ROWS, COLUMNS), 0.5) if is_active else None for is_active in active]
        launch.linear_weight_gradient(
            dy, kept, counts, into, accumulate=accumulate, tiles=WIDE if shape == "many" else SMALL
        )
        for target, gradient in zip(into, expected, strict=True):
            assert (target is None) == (gradient is None)
            if target is not None and gradient is not None:
                torch.testing.assert_close(target - 0.5 * accumulate, gradient, rtol=1e-5, atol=1e-4)


class Layer:
    """Grouped linear layer in torch, with one weight for each expert."""

    def __init__(self, counts: list[int], dtype: torch.dtype, active: list[bool], *, fuses: bool = False) -> None:
        self.counts = counts
        self.weights: list[Any] = [
            normal(ROWS, COLUMNS, dtype=dtype, seed=10 + number).requires_grad_(is_active)
            for number, is_active in enumerate(active)
        ]
        for weight in self.weights:
            weight.fuse_weight_gradient, weight.main_grad = fuses, torch.ones(ROWS, COLUMNS)
        self.x = normal(sum(counts), COLUMNS, dtype=dtype, seed=3).requires_grad_()
        self.dy = normal(sum(counts), ROWS, dtype=dtype, seed=4)

    def outputs(self, weights: list[Any]) -> Tensor:
        return torch.cat([x @ weight.T for x, weight in zip(self.x.split(self.counts), weights, strict=True)])

    def split(self) -> Tensor:
        """Return the outputs of the layer without weight gradients, with those of active experts added."""
        y = self.outputs([weight.detach() for weight in self.weights])
        return with_weight_gradients(y, self.x, self.counts, self.weights)


@pytest.mark.parametrize("active", [MIXED, [True] * 5, [False] * 5, [False, False, True, False, False]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_those_of_autograd_and_a_frozen_expert_has_none(dtype: torch.dtype, active: list[bool]) -> None:
    whole, split = (Layer(COUNTS["ragged"], dtype, active) for _ in range(2))
    whole.outputs(whole.weights).backward(whole.dy)
    y = split.split()
    assert torch.equal(y, whole.outputs(whole.weights))
    y.backward(split.dy)
    assert split.x.grad is not None
    assert whole.x.grad is not None
    assert torch.equal(split.x.grad, whole.x.grad)
    error = 2**-7 if dtype == torch.bfloat16 else 1e-5
    for number, is_active in enumerate(active):
        gradient, expected = split.weights[number].grad, whole.weights[number].grad
        assert (gradient is not None) == is_active
        if gradient is not None:
            assert gradient.dtype == dtype
            torch.testing.assert_close(gradient, expected, rtol=error, atol=error * 8)


@pytest.mark.parametrize("fuses", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mixed_experts_give_the_bits_of_all_active_ones(dtype: torch.dtype, fuses: bool) -> None:
    layers = [Layer(COUNTS["ragged"], dtype, active, fuses=fuses) for active in ([True] * 5, MIXED)]
    for layer in layers:
        layer.split().backward(layer.dy)
    together, mixed = layers
    assert torch.equal(mixed.x.grad, together.x.grad)  # type: ignore[arg-type]
    for number, is_active in enumerate(MIXED):
        weight, expected = mixed.weights[number], together.weights[number]
        assert (weight.grad is not None) == is_active
        assert getattr(weight, "grad_added_to_main_grad", False) == (fuses and is_active)
        if not is_active:
            assert bool((weight.main_grad == 1).all())
        elif fuses:
            assert torch.equal(weight.main_grad, expected.main_grad)
            assert COUNTS["ragged"][number] == 0 or not bool((weight.main_grad == 1).all())
        else:
            assert torch.equal(weight.grad, expected.grad)


def test_only_rows_of_active_experts_are_kept() -> None:
    saved: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    layer = Layer(COUNTS["ragged"], torch.float32, MIXED)
    y = layer.outputs([weight.detach() for weight in layer.weights])
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        with_weight_gradients(y, layer.x, layer.counts, layer.weights)
    inputs = [tensor for tensor in saved if tensor.shape[-1] == COLUMNS and tensor.shape[0] != ROWS]
    counted = sum(count for count, is_active in zip(layer.counts, MIXED, strict=True) if is_active)
    assert [tensor.shape[0] for tensor in inputs] == [counted]
    saved.clear()
    frozen = Layer(COUNTS["ragged"], torch.float32, [False] * 5)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        assert with_weight_gradients(y, frozen.x, frozen.counts, frozen.weights) is y
    assert not saved


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"dy": torch.ones(4, ROWS)}, r"\(4, 40\).*\[5, 0\]"),
        ({"dy": torch.ones(5, ROWS).double()}, r"\btorch\.float64\b.*\btorch\.float32\b"),
        ({"x": torch.ones(3, COLUMNS)}, r"\bx has 3 rows\b"),
        ({"into": [torch.ones(ROWS, 7), None]}, r"\bexpert 0\b.*\(40, 7\).*\(40, 24\)"),
    ],
)
def test_what_does_not_fit_is_said(change: dict[str, Any], named: str) -> None:
    args: dict[str, Any] = {
        "dy": torch.ones(5, ROWS), "x": torch.ones(5, COLUMNS), "counts": [5, 0],
        "into": [torch.ones(ROWS, COLUMNS), None],
    }  # fmt: skip
    with pytest.raises(ValueError, match=named):
        launch.linear_weight_gradient(**args | change, accumulate=False)
