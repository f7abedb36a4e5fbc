"""Tables that kernels read are copied to the device once: addresses for the whole job, rows for each micro-batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from moevement_kernels import tiles
from moevement_kernels.activations import Activation
from moevement_kernels.op import grouped_mlp
from numpy.typing import NDArray

HIDDEN, INNER = 16, 8


class Layer:
    """Experts whose gradients are added to ``main_grad``, as Megatron's are."""

    def __init__(self, active: list[bool]) -> None:
        self.weights: list[list[Any]] = [
            [torch.randn(shape).requires_grad_(is_active) for is_active in active]
            for shape in ((2 * INNER, HIDDEN), (HIDDEN, INNER))
        ]
        for weight in (*self.weights[0], *self.weights[1]):
            weight.fuse_weight_gradient, weight.main_grad = True, torch.zeros_like(weight, requires_grad=False)

    def forward(self, counts: list[int]) -> torch.Tensor:
        x, p = torch.randn(sum(counts), HIDDEN, requires_grad=True), torch.rand(sum(counts))
        return grouped_mlp(x, p, counts, self.weights[0], self.weights[1], Activation.SWIGLU)


def train(layer: Layer, batches: list[list[int]]) -> None:
    """Run all forward passes, then all backward passes; each micro-batch is a list of tokens per expert."""
    for output in [layer.forward(counts) for counts in batches]:
        output.sum().backward()


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Return a list to which every table that is copied from now on is added."""
    tables: list[list[int]] = []
    original = tiles.to_device

    def counted(table: NDArray[Any], device: torch.device) -> torch.Tensor:
        tables.append(table.tolist())
        return original(table, device)

    monkeypatch.setattr(tiles, "to_device", counted)
    for cached in (tiles._row_tiles, tiles._numbers):
        cached.cache_clear()
    return tables


# All micro-batches differ, and each has tokens for the expert that is frozen.
FIRST = [[3, 1, 4], [5, 5, 0]]
SECOND = [[2, 2, 2], [9, 1, 0]]


@pytest.mark.parametrize(
    ("active", "row_tables"), [([True] * 3, 2), ([True, False, True], 3)], ids=["all active", "mixed"]
)
def test_copies_to_the_device(copied: list[list[int]], active: list[bool], row_tables: int) -> None:
    """Count copies to the device. With frozen experts, the rows of active experts need one more table."""
    layer = Layer(active)
    train(layer, FIRST)
    address_tables = 4  # both weights and both gradients
    assert len(copied) == address_tables + len(FIRST) * row_tables
    copied.clear()
    train(layer, SECOND)
    assert len(copied) == len(SECOND) * row_tables
    copied.clear()
    train(layer, SECOND)
    assert copied == []


def test_weights_that_move_have_other_addresses(copied: list[list[int]]) -> None:
    layer = Layer([True] * 3)
    train(layer, [[3, 0, 4]])
    kept = [weight.data for weight in layer.weights[0]]
    for weight in layer.weights[0]:
        weight.data = weight.data.clone()
    copied.clear()
    train(layer, [[3, 0, 4]])
    assert copied == [[weight.data_ptr() for weight in layer.weights[0]]]
    assert all(old.data_ptr() != weight.data_ptr() for old, weight in zip(kept, layer.weights[0], strict=True))


def test_a_table_is_what_was_asked(copied: list[list[int]]) -> None:
    cpu = torch.device("cpu")
    assert tiles.offsets([2, 0, 3], cpu).tolist() == [0, 2, 2, 5]
    weight = torch.zeros(4, 4)
    assert tiles.addresses("weight", [weight, None], cpu).tolist() == [weight.data_ptr(), 0]
    with pytest.raises(ValueError, match=rf"\bexpert 1\b.*{weight.data_ptr() + 4:#x}.*\b16\b"):
        tiles.addresses("gradient", [weight, weight.view(-1)[1:]], cpu)
