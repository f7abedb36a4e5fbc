"""Matrices in FP8: their codes, and the scales that each recipe gives them.

The layout of MXFP8 follows OCP's Microscaling Formats (MX) v1.0. The choice of scales follows Transformer Engine's
documentation of the recipes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BLOCK = 128
"""Number of elements along each side of a block in the blockwise recipe."""
MX_BLOCK = 32
"""Number of elements in an MXFP8 block."""
_FLOAT_MAX = torch.finfo(torch.float32).max


@dataclass(frozen=True, slots=True)
class Form:
    """Matrix in FP8 with its inverse scales.

    Attributes:
        codes: ``[M, N]`` in an FP8 dtype.
        scale_inv: factor of the codes in each block, ``[1, 1]`` for a single block. The factors are FP32 numbers, or
            E8M0 exponents as ``uint8``.
        block: number of rows and columns of a block.
    """

    codes: torch.Tensor
    scale_inv: torch.Tensor
    block: tuple[int, int]

    def dequantised(self) -> torch.Tensor:
        """Return the matrix as FP32 ``[M, N]``."""
        scales = exponents_to_scales(self.scale_inv) if self.scale_inv.dtype == torch.uint8 else self.scale_inv
        return self.codes.float() * spread(scales, self.block, self.codes.shape)


@dataclass(frozen=True, slots=True)
class Quantised:
    """Matrix in the two forms that products need: with blocks along rows, and with blocks along columns.

    With square blocks or a single scale, both forms are the same object.
    """

    row: Form
    column: Form


def cast(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round values to the nearest number of an FP8 dtype, ties to even.

    A value beyond the range of the dtype becomes the largest number of the range, with the value's sign. Torch's own
    casts turn such values into infinity or NaN.
    """
    largest = torch.finfo(dtype).max
    return values.float().clamp(-largest, largest).to(dtype)


def scale_of(amax: torch.Tensor, dtype: torch.dtype, *, power_of_two: bool = False) -> torch.Tensor:
    """Return the scale that brings ``amax`` to the largest number of ``dtype``; 1 if ``amax`` is 0 or not finite.

    Args:
        amax: FP32, any shape.
        dtype: dtype of the codes.
        power_of_two: True to round the scale down to a power of two, so that scaling is exact.
    """
    scale = quotient(torch.finfo(dtype).max, amax)
    scale = torch.where(torch.isinf(scale), _FLOAT_MAX, scale)
    scale = torch.where((amax > 0) & torch.isfinite(amax), scale, 1.0)
    if power_of_two:
        scale = (scale.view(torch.int32) & 0x7F800000).view(torch.float32)
    return scale


def quotient(largest: float, amax: torch.Tensor) -> torch.Tensor:
    """Return ``largest / amax`` by one division.

    Torch's ``largest / amax`` rounds the reciprocal first, and then multiplies.
    """
    return torch.full_like(amax, largest) / amax


def by_scale(matrix: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> Quantised:
    """Quantise ``[M, N]`` with one given scale, a tensor of one element (delayed scaling)."""
    form = Form(cast(matrix.float() * scale, dtype), scale.reciprocal().view(1, 1), (matrix.shape[0], matrix.shape[1]))
    return Quantised(form, form)


def by_tensor(matrix: torch.Tensor, dtype: torch.dtype) -> Quantised:
    """Quantise with one scale, computed from the amax of this matrix (current scaling)."""
    return by_scale(matrix, scale_of(amax_of(matrix), dtype), dtype)


def by_rows_and_columns(matrix: torch.Tensor, dtype: torch.dtype) -> Quantised:
    """Quantise with a power-of-two scale for every 128 elements, by rows and by columns (blockwise activations)."""
    return Quantised(_in_blocks(matrix, dtype, (1, BLOCK)), _in_blocks(matrix, dtype, (BLOCK, 1)))


def by_squares(matrix: torch.Tensor, dtype: torch.dtype) -> Quantised:
    """Quantise with a power-of-two scale for every block of 128 x 128 elements (blockwise weights)."""
    form = _in_blocks(matrix, dtype, (BLOCK, BLOCK))
    return Quantised(form, form)


def by_exponents(matrix: torch.Tensor, dtype: torch.dtype) -> Quantised:
    """Quantise with an E8M0 exponent for every 32 elements, by rows and by columns (MXFP8)."""
    return Quantised(_in_mx_blocks(matrix, dtype, (1, MX_BLOCK)), _in_mx_blocks(matrix, dtype, (MX_BLOCK, 1)))


def amax_of(matrix: torch.Tensor) -> torch.Tensor:
    """Return the largest magnitude, in FP32; 0 for an empty matrix."""
    return matrix.abs().max().float() if matrix.numel() else torch.zeros((), device=matrix.device)


def exponents_to_scales(exponents: torch.Tensor) -> torch.Tensor:
    """Return FP32 scales for E8M0 exponents, which are ``uint8``."""
    return exponents.view(torch.float8_e8m0fnu).float()


def exponents_of(amax: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the E8M0 exponent of each block, ``uint8``.

    A block divided by its power of two fits into ``dtype``, and no smaller power of two has this property.
    """
    bits = (amax * (1.0 / torch.finfo(dtype).max)).view(torch.int32)
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    rounds_up = (mantissa > 0) & (exponent < 0xFE) & ~((exponent == 0) & (mantissa <= 0x400000))
    return (exponent + rounds_up).to(torch.uint8)


def _in_blocks(matrix: torch.Tensor, dtype: torch.dtype, block: tuple[int, int]) -> Form:
    scale = scale_of(amax_of_blocks(matrix, block), dtype, power_of_two=True)
    codes = cast(matrix.float() * spread(scale, block, matrix.shape), dtype)
    return Form(codes, scale.reciprocal(), block)


def _in_mx_blocks(matrix: torch.Tensor, dtype: torch.dtype, block: tuple[int, int]) -> Form:
    exponents = exponents_of(amax_of_blocks(matrix, block), dtype)
    divisor = spread(exponents_to_scales(exponents), block, matrix.shape)
    return Form(cast(matrix.float() / divisor, dtype), exponents, block)


def amax_of_blocks(matrix: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """Return the amax of each block, FP32 ``[blocks of rows, blocks of columns]``. Incomplete blocks are padded."""
    rows, columns = matrix.shape
    down, across = -(-rows // block[0]), -(-columns // block[1])
    padded = torch.nn.functional.pad(matrix.abs().float(), (0, across * block[1] - columns, 0, down * block[0] - rows))
    return padded.view(down, block[0], across, block[1]).amax(dim=(1, 3))


def spread(scales: torch.Tensor, block: tuple[int, int], shape: torch.Size) -> torch.Tensor:
    """Expand the scales of blocks to the elements of a matrix; return a single scale unchanged."""
    if scales.numel() == 1:
        return scales
    rows = scales.repeat_interleave(block[0], 0)[: shape[0]]
    return rows.repeat_interleave(block[1], 1)[:, : shape[1]]
