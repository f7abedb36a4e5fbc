"""Codes and scales of FP8 agree with torchao's quantisers, and with loops over plain numbers."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchao.float8.float8_utils import tensor_to_scale, to_fp8_saturated
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import to_mx

from megatron.moevement.fp8 import formats
from megatron.moevement.fp8.formats import E4M3, E5M2

SHAPES = [(1, 1), (3, 5), (16, 32), (130, 257), (0, 64)]


def matrix(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    """Return a BF16 matrix of many magnitudes, with a row and a column of zeros."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, columns, generator=generator)
    values *= torch.exp2(torch.randint(-12, 12, (rows, columns), generator=generator).float())
    values[rows // 2 :][:1] = 0.0
    values[:, columns // 2 :][:, :1] = 0.0
    return values.bfloat16()


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("shape", SHAPES[:-1])
def test_one_scale_is_torchaos(shape: tuple[int, int], dtype: torch.dtype) -> None:
    values = matrix(*shape) if shape != (1, 1) else torch.tensor([[0.7]], dtype=torch.bfloat16)
    scale = tensor_to_scale(values, dtype).view(1, 1)
    quantised = formats.by_tensor(values, dtype)
    assert torch.allclose(quantised.row.scale_inv, scale.reciprocal(), rtol=2**-22, atol=0.0), "it divides in FP64"
    assert torch.equal(
        formats.by_scale(values, scale, dtype).row.codes.view(torch.uint8),
        to_fp8_saturated(values.float() * scale, dtype).view(torch.uint8),
    )
    assert quantised.column is quantised.row


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("shape", [(16, 32), (64, 128), (5, 96)])
def test_exponents_are_torchaos(shape: tuple[int, int], dtype: torch.dtype) -> None:
    values = matrix(*shape, seed=1)
    exponents, codes = to_mx(values, dtype, formats.MX_BLOCK, ScaleCalculationMode.RCEIL)
    row = formats.by_exponents(values, dtype).row
    assert torch.equal(row.scale_inv, exponents.view(torch.uint8))
    assert torch.equal(row.codes.view(torch.uint8), codes.view(torch.uint8))
    turned = formats.by_exponents(values.T.contiguous(), dtype).column
    assert torch.equal(turned.codes.view(torch.uint8), row.codes.view(torch.uint8).T)
    assert torch.equal(turned.scale_inv, row.scale_inv.T)


@pytest.mark.parametrize("shape", [(3, 5), (130, 257), (128, 256)])
def test_blocks_one_by_one(shape: tuple[int, int]) -> None:
    """Check in plain Python that each block's scale is the largest power of two with which the block fits."""
    values = matrix(*shape, seed=2)
    for form, block in (
        (formats.by_squares(values, E4M3).row, (128, 128)),
        (formats.by_rows_and_columns(values, E4M3).row, (1, 128)),
        (formats.by_rows_and_columns(values, E4M3).column, (128, 1)),
    ):
        dequantised = form.dequantised()
        for down in range(form.scale_inv.shape[0]):
            for across in range(form.scale_inv.shape[1]):
                rows = slice(down * block[0], (down + 1) * block[0])
                columns = slice(across * block[1], (across + 1) * block[1])
                amax = float(values[rows, columns].abs().max())
                wanted = 2.0 ** math.floor(math.log2(448.0 / amax)) if amax else 1.0
                assert 1.0 / float(form.scale_inv[down, across]) == wanted
                codes = (values[rows, columns].float() * wanted).to(E4M3)
                assert torch.equal(codes.view(torch.uint8), form.codes[rows, columns].view(torch.uint8))
                assert torch.equal(dequantised[rows, columns], codes.float() / wanted)


@pytest.mark.parametrize("quantiser", [formats.by_tensor, formats.by_squares, formats.by_exponents])
@pytest.mark.parametrize("shape", SHAPES)
def test_numbers_stay_near(quantiser: object, shape: tuple[int, int]) -> None:
    values = torch.rand(shape, generator=torch.Generator().manual_seed(3)).bfloat16() + 0.5
    for form in (quantiser(values, E4M3).row, quantiser(values, E4M3).column):  # type: ignore[operator]
        assert form.dequantised().shape == values.shape
        assert torch.allclose(form.dequantised(), values.float(), rtol=2**-4, atol=0.0), "three bits of mantissa"


@pytest.mark.parametrize("quantiser", [formats.by_tensor, formats.by_squares])
@pytest.mark.parametrize("seed", range(5))
def test_one_form_quantises_to_itself(quantiser: object, seed: int) -> None:
    values = torch.randn(256, 384, generator=torch.Generator().manual_seed(seed)).bfloat16()
    first = quantiser(values, E4M3).row  # type: ignore[operator]
    again = quantiser(first.dequantised().bfloat16(), E4M3).row  # type: ignore[operator]
    assert torch.equal(again.codes.view(torch.uint8), first.codes.view(torch.uint8))
    assert torch.equal(again.scale_inv, first.scale_inv)


def test_neither_form_of_mxfp8_can_be_made_from_the_other() -> None:
    """Check that quantising dequantised MXFP8 changes 3.6% of the codes, so snapshots must keep the BF16 weights.

    Most changed codes stand for the same number with another exponent, but not all do.
    """
    values = torch.randn(1024, 1024, generator=torch.Generator().manual_seed(4)).bfloat16()
    quantised = formats.by_exponents(values, E4M3)
    again = formats.by_exponents(quantised.row.dequantised().bfloat16(), E4M3)
    share = (again.row.codes.view(torch.uint8) != quantised.row.codes.view(torch.uint8)).float().mean()
    assert 0.03 < float(share) < 0.05
    assert (again.column.dequantised() != quantised.column.dequantised()).any()


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_what_is_too_large_becomes_the_largest(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    values = torch.tensor([[largest * 4, -largest * 4, float("inf"), float("-inf"), float("nan"), 0.0]])
    codes = formats.cast(values, dtype).float()
    assert codes[0, :4].tolist() == [largest, -largest, largest, -largest]
    assert torch.isnan(codes[0, 4])
    assert codes[0, 5] == 0.0


@given(st.floats(min_value=0.0, max_value=2.0**127, width=32), st.booleans())
def test_a_scale_is_finite_and_positive(amax: float, power_of_two: bool) -> None:
    scale = formats.scale_of(torch.tensor(amax), E4M3, power_of_two=power_of_two)
    assert torch.isfinite(scale)
    assert scale > 0
    if power_of_two:
        assert math.frexp(float(scale))[0] == 0.5
    if amax > 1e-30:
        assert float(scale) * amax <= 448.0 * (1 + 2**-23)


@given(st.floats(min_value=0.0, max_value=2.0**127, width=32))
def test_an_exponent_is_the_smallest_that_suffices(amax: float) -> None:
    exponent = int(formats.exponents_of(torch.tensor(amax), E4M3))
    if amax > 1e-30:
        limit = float(torch.tensor(amax) * (1.0 / 448.0))
        assert 2.0 ** (exponent - 127) >= limit > 2.0 ** (exponent - 128)
