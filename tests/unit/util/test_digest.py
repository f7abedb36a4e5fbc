"""The state digest depends on values and on nothing else."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moevement_core.util.digest import digest


def test_equal_states_have_equal_digests_in_whatever_order_they_were_filled() -> None:
    a = {"x": torch.arange(5), "y": [1, 2.5, None, "s", b"b", True]}
    b = {"y": [1, 2.5, None, "s", b"b", True], "x": torch.arange(5).clone()}
    assert digest(a) == digest(b)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (torch.zeros(4), torch.zeros(4, dtype=torch.bfloat16)),
        (torch.zeros(4), torch.zeros(2, 2)),
        (torch.zeros(4), -torch.zeros(4)),
        (torch.tensor([1.0]), torch.tensor([1.0 + 2.0**-23])),
        ({"a": 1}, {"b": 1}),
        ({"a": 1}, {1: 1}),
        (["ab", "c"], ["a", "bc"]),
        ([1, [2, 3]], [1, 2, 3]),
        (1, 1.0),
        (1, True),
        (0.0, -0.0),
        (None, "None"),
        (np.zeros(3), np.zeros(3, dtype=np.float32)),
    ],
)
def test_any_difference_changes_the_digest(a: object, b: object) -> None:
    assert digest(a) != digest(b)


@given(st.integers(0, 63), st.integers(0, 31))
def test_a_single_flipped_bit_is_seen(element: int, bit: int) -> None:
    tensor = torch.arange(64, dtype=torch.int32)
    before = digest(tensor)
    tensor[element] ^= 1 << bit if bit < 31 else -(1 << 31)
    assert digest(tensor) != before


def test_layout_in_memory_does_not_enter() -> None:
    tensor = torch.arange(12, dtype=torch.bfloat16).view(3, 4)
    assert digest(tensor.t()) == digest(tensor.t().contiguous())
    assert digest(torch.empty(0)) == digest(torch.empty(0))


def test_what_has_no_value_is_refused_by_place() -> None:
    with pytest.raises(TypeError, match=r"state\['hooks'\]\[0\].*\bfunction\b"):
        digest({"hooks": [lambda: None]})
