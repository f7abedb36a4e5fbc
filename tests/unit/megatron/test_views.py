"""Quantised weights are saved as raw bytes and scales, and the range of a weight is a view."""

from __future__ import annotations

import pytest
import torch

from megatron.moevement.optimizer.views import _stored
from moevement_core.errors import OperatorError


def test_a_plain_weight_is_a_view_of_its_range() -> None:
    parameter = torch.nn.Parameter(torch.arange(12.0).view(3, 4))
    ((kind, view),) = _stored(parameter, 2, 7)
    assert (kind, view.tolist()) == ("weight", [2, 3, 4, 5, 6])
    parameter.data[0, 2] = 9
    assert view[0] == 9


@pytest.mark.parametrize(("raw", "scale"), [("_data", "_scale_inv"), ("_rowwise_data", "_rowwise_scale_inv")])
def test_a_quantised_weight_is_its_raw_bytes_and_its_scales(raw: str, scale: str) -> None:
    # Transformer Engine's quantised tensors hold their storage under these names; creating one needs a GPU.
    parameter = torch.nn.Parameter(torch.zeros(2, 3))
    setattr(parameter, raw, torch.arange(6, dtype=torch.uint8).view(2, 3))
    setattr(parameter, scale, torch.tensor([0.5]))
    stored = dict(_stored(parameter, 1, 4))
    assert stored["weight"].tolist() == [1, 2, 3]
    assert stored["scale"].tolist() == [0.5]


def test_a_weight_without_a_flat_range_is_refused() -> None:
    with pytest.raises(OperatorError, match=r"\[4, 2\].*\bcontiguous\b"):
        list(_stored(torch.nn.Parameter(torch.zeros(4, 4).t()[:, :2]), 0, 3))
