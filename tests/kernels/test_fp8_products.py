"""Frozen experts' backward pass with FP8 products: kernels match the reference, which matches dense products."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
from moevement_kernels import reference
from moevement_kernels.activations import Activation
from moevement_kernels.experimental import fp8_launch, fp8_reference
from moevement_kernels.experimental.fp8_reference import E4M3, E5M2, Codes, Quantiser, by_rows, cast, scale_of
from moevement_kernels.experimental.triton_fp8 import _cast
from moevement_kernels.tiles import Tiles
from moevement_kernels.weights import BLOCK, Weights
from triton import language as tl

from megatron.moevement.fp8 import formats
from tests.kernels.problems import COUNTS, close, first_names

SMALL = Tiles(rows=16, columns=32, inner=32, warps=4, stages=2)
BLOCKS = Tiles(rows=16, columns=128, inner=64, warps=4, stages=2)
MODES = ("delayed", "current", "by block")


def problem(mode: str, kind: Activation, counts: list[int], dtype: torch.dtype, seed: int = 3) -> tuple[Any, ...]:
    """Return arguments of ``input_gradient``: H 144 and F 128 if quantised by block, else H 48 and F 80."""
    draw = torch.Generator().manual_seed(seed)
    hidden, inner = (144, 128) if mode == "by block" else (48, 80)
    tokens, rows = sum(counts), inner * (2 if kind.is_gated else 1)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw)

    h = normal(tokens, rows).to(torch.bfloat16)
    p = torch.rand(tokens, generator=draw)
    dy = normal(tokens, hidden)
    w1, w2 = ([normal(*shape) / 4 for _ in counts] for shape in ((hidden, rows), (inner, hidden)))
    if mode == "by block":
        quantised = [[formats.by_squares(weight, E4M3).row for weight in weights] for weights in (w1, w2)]
        return by_rows(dy, dtype), h, p, counts, *map(weights_of, quantised), kind, Quantiser(dtype, is_by_block=True)
    scales = scale_of(fp8_reference.amaxes(dy, counts), dtype)
    quantised_dy = Quantiser(dtype, scales).of(dy, counts)
    of_dh = torch.linspace(0.5, 2.0, len(counts)) * 16 if mode == "delayed" else None
    quantised = [[formats.by_tensor(weight, E4M3).row for weight in weights] for weights in (w1, w2)]
    return quantised_dy, h, p, counts, *map(weights_of, quantised), kind, Quantiser(dtype, of_dh)


def launched(args: Any, mode: str) -> fp8_reference.FP8InputGradient:
    """Return the input gradient that the kernels compute."""
    dy, h, p, counts, w1, w2, kind, quantiser = args
    tiles = BLOCKS if mode == "by block" else SMALL
    return fp8_launch.input_gradient(dy, h, p, counts, w1, w2, kind, quantiser, tiles)


def weights_of(forms: list[formats.Form]) -> Weights:
    return Weights([form.codes.view(torch.uint8) for form in forms], [form.scale_inv.contiguous() for form in forms])


CASES: dict[str, tuple[Activation, torch.dtype]] = {
    "ragged": (Activation.SWIGLU, E5M2),
    "first and last empty": (Activation.GELU, E4M3),
    "one token": (Activation.SQUARED_RELU, E5M2),
}
"""Activation and FP8 type of each case, by its distribution of tokens."""


@pytest.mark.parametrize(("mode", "shape"), first_names(list(zip(MODES, CASES, strict=True)), MODES, CASES))
def test_kernels_compute_what_the_reference_does(mode: str, shape: str) -> None:
    kind, dtype = CASES[shape]
    args: Any = problem(mode, kind, COUNTS[shape], dtype)
    expected = fp8_reference.input_gradient(*args)
    actual = launched(args, mode)
    close(actual.dp, expected.dp)
    torch.testing.assert_close(actual.amax, expected.amax, rtol=2**-7, atol=0.0)  # BF16 may round up or down
    torch.testing.assert_close(actual.dh.inverse_scales, expected.dh.inverse_scales, rtol=2**-7, atol=0.0)
    counts = COUNTS[shape]
    dense, dense_expected = actual.dh.dense(counts), expected.dh.dense(counts)
    step = 2**-1 if dtype is E5M2 else 2**-2  # a dh between two codes may round up or down
    torch.testing.assert_close(dense, dense_expected, rtol=step, atol=1e-3 * float(dense_expected.abs().max()))
    assert (dense != dense_expected).float().mean() < 0.02
    error = (actual.dx.float() - expected.dx.float()).norm() / expected.dx.float().norm()
    assert error < 2**-6


@pytest.mark.parametrize("mode", MODES)
def test_where_sums_are_exact_so_are_the_bits(mode: str) -> None:
    """Use small whole numbers, whose sums FP32 holds exactly in any order."""
    draw = torch.Generator().manual_seed(9)
    counts, width = [5, 0, 19], 128

    def whole(*shape: int) -> torch.Tensor:
        return torch.randint(-2, 3, shape, generator=draw).float()

    by_block = mode == "by block"
    weights = [
        Weights([whole(width, width).to(E4M3).view(torch.uint8) for _ in counts], [torch.full((1, 1), 0.5)] * 3)
        for _ in range(2)
    ]
    dy = Codes(whole(24, width).to(E5M2), torch.ones(24, 1) if by_block else torch.ones(3))
    quantiser = Quantiser(E5M2, torch.full((3,), 0.25) if mode == "delayed" else None, by_block)
    args: Any = (dy, whole(24, width).to(torch.bfloat16), torch.ones(24), counts, *weights, Activation.RELU, quantiser)
    expected = fp8_reference.input_gradient(*args)
    actual = launched(args, mode)
    assert torch.equal(actual.dh.data.float(), expected.dh.data.float())  # the interpreter loses signs of zeros
    assert torch.equal(actual.dh.inverse_scales, expected.dh.inverse_scales)
    if mode == "current":  # its scale is no power of two
        close(actual.dx, expected.dx)
    else:
        assert torch.equal(actual.dx, expected.dx)
    assert torch.equal(actual.dp, expected.dp)
    assert torch.equal(actual.amax, expected.amax)


@pytest.mark.parametrize(
    ("mode", "wrong"), first_names([("delayed", "nan"), ("current", "inf"), ("by block", "inf")], MODES, ("nan", "inf"))
)
def test_what_is_no_number_stays_none(mode: str, wrong: str) -> None:
    """Check that an overflow stays visible in the results, and that an infinite block is not scaled."""
    args: Any = problem(mode, Activation.RELU, COUNTS["one expert"], E5M2)
    args[2][3] = float(wrong)
    actual, expected = launched(args, mode), fp8_reference.input_gradient(*args)
    assert actual.amax.isinf().all()
    assert expected.amax.isinf().all()
    assert torch.equal(actual.dh.data.float().isnan(), expected.dh.data.float().isnan())
    assert torch.equal(actual.dh.inverse_scales, expected.dh.inverse_scales)
    close(actual.dx[:3], expected.dx[:3])  # the interpreter multiplies FP8's NaN as if they were numbers


def test_frozen_experts_do_not_depend_on_each_other() -> None:
    """Check that an expert gives the same bits alone and beside others.

    A replay may route other experts' tokens differently.
    """
    counts = COUNTS["ragged"]
    dy, h, p, _, w1, w2, kind, quantiser = problem("current", Activation.SWIGLU, counts, E5M2)
    together = fp8_launch.input_gradient(dy, h, p, counts, w1, w2, kind, quantiser, SMALL)
    start = counts[0] + counts[1]
    rows = slice(start, start + counts[2])
    own1, own2 = (Weights(weights.data[2:3], weights.inverse_scales[2:3]) for weights in (w1, w2))
    own_dy = Codes(dy.data[rows], dy.inverse_scales[2:3])
    alone = fp8_launch.input_gradient(own_dy, h[rows], p[rows], [counts[2]], own1, own2, kind, quantiser, SMALL)
    assert torch.equal(alone.dx, together.dx[rows])
    assert torch.equal(alone.dp, together.dp[rows])


@pytest.mark.parametrize("mode", MODES)
def test_the_reference_is_the_dense_one_on_what_codes_stand_for(mode: str) -> None:
    """Compare with ``reference.py`` on dequantised values, up to the rounding of dh to FP8."""
    args: Any = problem(mode, Activation.SWIGLU, COUNTS["ragged"], E4M3)
    dy, h, p, counts, w1, w2, kind, _ = args
    plain1, plain2 = (Weights([weights.dense(e).T.contiguous() for e in range(len(counts))]) for weights in (w1, w2))
    expected = reference.input_gradient(dy.dense(counts), h, p, counts, plain1, plain2, kind)
    actual = fp8_reference.input_gradient(*args)
    close(actual.dp, expected.dp)
    assert (actual.dh.dense(counts) - expected.dh.float()).abs().max() <= 2**-4 * expected.dh.abs().max()
    assert (actual.dx.float() - expected.dx.float()).norm() <= 2**-4 * expected.dx.float().norm()


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_quantising_is_that_of_training_in_fp8(dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(1)
    matrix = torch.randn(9, 300, generator=draw) * torch.logspace(-12, 4, 9)[:, None]
    matrix[3, :BLOCK] = 0.0
    row_codes, trained = by_rows(matrix, dtype), formats.by_rows_and_columns(matrix, dtype).row
    assert torch.equal(row_codes.data.view(torch.uint8), trained.codes.view(torch.uint8))
    assert torch.equal(row_codes.inverse_scales, trained.scale_inv)
    codes = Quantiser(dtype).of(matrix, [9])
    of_tensor = formats.by_tensor(matrix, dtype).row
    assert torch.equal(codes.data.view(torch.uint8), of_tensor.codes.view(torch.uint8))
    assert torch.equal(codes.inverse_scales, of_tensor.scale_inv.view(1))


@triton.jit
def _cast_all(values, codes, LARGEST: tl.constexpr, DTYPE: tl.constexpr, SIZE: tl.constexpr):
    place = tl.arange(0, SIZE)
    tl.store(codes + place, _cast(tl.load(values + place), LARGEST, DTYPE).to(tl.uint8, bitcast=True))


@pytest.mark.parametrize(("dtype", "named"), [(E4M3, tl.float8e4nv), (E5M2, tl.float8e5)])
def test_kernels_round_to_fp8_as_torch_does(dtype: torch.dtype, named: Any) -> None:
    """Cast every code, the midpoints between codes, their neighbours, and values that are too large, of both signs."""
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(dtype).float()
    codes = codes[codes.isfinite()].sort().values
    middles = (codes[1:] + codes[:-1]) / 2
    near = torch.cat([torch.nextafter(middles, torch.tensor(side)) for side in (-1e30, 1e30)])
    values = torch.cat([codes, middles, near, torch.tensor([1e6, -1e6, 1e-30, -0.0])])
    padded = torch.zeros(2048)
    padded[: values.numel()] = values
    out = torch.empty(2048, dtype=torch.uint8)
    _cast_all[(1,)](padded, out, torch.finfo(dtype).max, named, 2048)
    wanted = cast(padded, dtype)
    assert torch.equal(out.view(dtype).float(), wanted.float())


@pytest.mark.parametrize(
    ("change", "named"),
    [({"hidden": 40}, r"\bH\b.*\b40\b.*\b16\b"), ({"format": True}, r"\bW1\b.*\bdy\b.*\(4, 1\)"),
     ({"dtype": True}, r"\bh\b.*\btorch\.float32\b"), ({"transposed": True}, r"\bW1\b.*\(160, 48\).*\(80, 96\)")],
)  # fmt: skip
def test_what_does_not_fit_is_said(change: dict[str, Any], named: str) -> None:
    dy, h, p, counts, w1, w2, kind, quantiser = problem("current", Activation.SWIGLU, [4], E5M2)
    if "hidden" in change:
        dy = Codes(dy.data[:, :40], dy.inverse_scales)
        w1 = Weights([w1.data[0][:40].contiguous()], w1.inverse_scales)
        w2 = Weights([w2.data[0][:, :40].contiguous()], w2.inverse_scales)
    if "format" in change:
        dy = Codes(dy.data, torch.ones(4, 1))
    if "dtype" in change:
        h = h.float()
    if "transposed" in change:
        w1, w2 = (Weights([weights.data[0].T.contiguous()], weights.inverse_scales) for weights in (w1, w2))
    with pytest.raises(ValueError, match=named):
        fp8_launch.input_gradient(dy, h, p, counts, w1, w2, kind, quantiser)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [((torch.float16,), r"\bdh\b.*\btorch\.float16\b"), ((E5M2, torch.ones(1), True), r"\bscales\b.*\bblock\b")],
)  # fmt: skip
def test_a_quantiser_that_cannot_be_is_refused(arguments: tuple[Any, ...], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        Quantiser(*arguments)
