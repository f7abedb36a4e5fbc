"""Triton's sums for the digests of whole operators have the bits of torch's."""

from __future__ import annotations

import pytest
import torch

from moevement_core.snapshot import triton_sums, whole
from tests.kernels.problems import first_names

AT_ONCE = triton_sums.BLOCK * triton_sums.BLOCKS


DTYPES = (torch.uint8, torch.int16, torch.int32, torch.int64)
LARGE = AT_ONCE + 1
QUICK = [(torch.uint8, 0, 1), (torch.int16, 1, 1), (torch.int32, 1000, 1), (torch.int64, LARGE, 2**33 + 5)]


@pytest.mark.parametrize(("dtype", "size", "place"), first_names(QUICK, DTYPES, (0, 1, 1000, LARGE), (1, 2**33 + 5)))
def test_sums_are_those_of_torch(dtype: torch.dtype, size: int, place: int) -> None:
    draw = torch.Generator().manual_seed(size)
    data = torch.randint(0, 256, (size * dtype.itemsize,), dtype=torch.uint8, generator=draw)
    words = data.view(dtype)
    expected, actual = torch.tensor([3, -4]), torch.tensor([3, -4])
    whole._add(words, place, whole._MULTIPLIERS, expected)
    triton_sums.add(words, place, whole._MULTIPLIERS, actual)
    assert actual.tolist() == expected.tolist()
