"""The two layers of the benchmark on uneven loads compute the same, on two real ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.papers.imbalance import RATIOS, Kind, MeasuredLayer, Shape
from tests.harness import run_ranks

SMALL = Shape(hidden=32, inner=48, tokens=96)


def computed(ratio: int) -> dict[str, Any]:
    """Run both layers once on this rank, and return outputs and gradients: of tokens, and of experts by number."""
    result: dict[str, Any] = {}
    for kind in Kind:
        layer = MeasuredLayer(SMALL, ratio, kind)
        passes = layer.run()
        with torch.no_grad():
            output, _ = layer.layer(layer.tokens)
        experts: dict[int, list[np.ndarray]] = {}
        for expert, parameters in zip(layer.table[torch.distributed.get_rank()], layer.parameters(), strict=True):
            experts[expert] = [parameter.grad.numpy() for parameter in parameters]
        assert layer.tokens.grad is not None
        result[kind] = output.numpy(), layer.tokens.grad.numpy(), experts, min(passes)
    return result


@pytest.mark.parametrize("ratio", [pytest.param(ratio, marks=pytest.mark.full) for ratio in RATIOS[:2]] + [*RATIOS[2:]])
def test_both_layers_compute_the_same(ratio: int) -> None:
    """Compare outputs, gradients of tokens, and gradients of experts, which slots sum over replicas."""
    ranks = [outcome.result for outcome in run_ranks(computed, 2, ratio)]
    whole: dict[int, list[np.ndarray]] = {}
    for rank in ranks:
        whole |= rank[Kind.PLAIN][2]
    assert sorted(whole) == list(range(SMALL.experts))
    for rank in ranks:
        plain, slots = rank[Kind.PLAIN], rank[Kind.SLOTS]
        assert np.abs(plain[0]).max() > 0
        assert all(seconds >= 0 for seconds in (plain[3], slots[3]))
        # Batches of an expert are cut differently, so sums are rounded in another order.
        for value, other in zip(plain[:2], slots[:2], strict=True):
            np.testing.assert_allclose(value, other, rtol=1e-4, atol=1e-9)
        for expert, gradients in slots[2].items():
            for value, other in zip(whole[expert], gradients, strict=True):
                np.testing.assert_allclose(value, other, rtol=1e-4, atol=1e-8)
