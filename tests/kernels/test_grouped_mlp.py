"""The grouped expert MLP's kernels match the reference, which matches autograd; mixed experts match all-active ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from moevement_kernels import launch, reference, triton_kernels
from moevement_kernels.activations import Activation, activate
from moevement_kernels.op import _forward, grouped_mlp, saved_bytes
from moevement_kernels.reference import InputGradient
from moevement_kernels.tiles import Tiles, row_tiles
from moevement_kernels.weights import Weights
from triton import language as tl

from tests.kernels.problems import COUNTS, SMALL, WIDE, Problem, close, first_names


def compare(problem: Problem, tiles: Tiles = SMALL) -> None:
    forward = reference.forward(problem.x, problem.p, problem.counts, *problem.weights, problem.kind)
    for actual, expected in zip(
        launch.forward(problem.x, problem.p, problem.counts, *problem.weights, problem.kind, SMALL),
        forward,
        strict=True,
    ):
        close(actual, expected)
    active = [number % 2 == 0 for number in range(len(problem.counts))]
    args = (problem.dy, forward.h, problem.p, problem.counts, *problem.weights, problem.kind, active)
    backward = reference.input_gradient(*args)
    for actual, expected in zip(launch.input_gradient(*args, tiles), backward, strict=True):
        close(actual, expected)
    compare_weight_gradients(problem, backward, active, tiles)


def compare_weight_gradients(problem: Problem, backward: InputGradient, active: list[bool], tiles: Tiles) -> None:
    parts = zip(problem.x.split(problem.counts), active, strict=True)
    x = torch.cat([problem.x[:0], *(rows for rows, is_active in parts if is_active)])
    args = (problem.dy, backward.dh, x, backward.a, problem.counts)
    expected = reference.weight_gradient(*args, active)
    for accumulate in (False, True):
        into: Any = tuple(
            [torch.full_like(weight, 0.5, dtype=torch.float32) if is_active else None
             for weight, is_active in zip(weights, active, strict=True)]
            for weights in (problem.w1, problem.w2)
        )  # fmt: skip
        launch.weight_gradient(*args, into, accumulate, tiles)
        for targets, gradients in zip(into, expected, strict=True):
            for target, gradient in zip(targets, gradients, strict=True):
                assert (target is None) == (gradient is None)
                if target is not None and gradient is not None:
                    scale = float(gradient.abs().max()) if gradient.numel() else 0.0
                    torch.testing.assert_close(target - 0.5 * accumulate, gradient, rtol=1e-5, atol=1e-5 * scale + 1e-6)


DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EACH_ONCE = [*((kind, torch.float32) for kind in Activation), *((Activation.SWIGLU, dtype) for dtype in DTYPES)]
"""Cases with every activation in FP32, and with every dtype for one activation."""


@pytest.mark.parametrize(("kind", "dtype"), first_names(EACH_ONCE, list(Activation), DTYPES))
def test_activations_and_dtypes(kind: Activation, dtype: torch.dtype) -> None:
    if dtype == torch.float16:
        problem = Problem(kind, COUNTS["ragged"], dtype)
        actual = launch.forward(problem.x, problem.p, problem.counts, *problem.weights, kind, SMALL)
        expected = reference.forward(problem.x, problem.p, problem.counts, *problem.weights, kind)
        torch.testing.assert_close(actual.y, expected.y, rtol=2e-3, atol=2e-3)
    else:
        compare(Problem(kind, COUNTS["ragged"], dtype))


@pytest.mark.parametrize(
    ("kind", "dtype"),
    first_names(
        [(Activation.SWIGLU, torch.bfloat16), (Activation.SQUARED_RELU, torch.float32)], list(Activation), DTYPES[:2]
    ),
)
def test_activations_of_the_backward_pass_have_the_bits_of_the_forward_pass(
    kind: Activation, dtype: torch.dtype
) -> None:
    """Use the identity as W2, so that y is a."""
    problem = Problem(kind, COUNTS["ragged"], dtype)
    problem.inner = problem.hidden
    problem.__post_init__()
    identity = Weights([torch.eye(problem.hidden).to(dtype)] * len(problem.counts))
    args = (problem.p, problem.counts, problem.weights[0], identity, kind)
    y, h = launch.forward(problem.x, *args, SMALL)
    active = [True, True, False, False, True]
    backward = launch.input_gradient(problem.dy, h, *args, active, SMALL)
    kept = [rows for rows, is_active in zip(y.split(problem.counts), active, strict=True) if is_active]
    assert torch.equal(backward.a, torch.cat(kept))
    if kind in (Activation.RELU, Activation.SQUARED_RELU):  # for others, Triton's and torch's last bits differ
        assert torch.equal(backward.a, reference.input_gradient(problem.dy, h, *args, active).a)
    assert launch.input_gradient(problem.dy, h, *args, tiles=SMALL).a.shape == (0, problem.inner)


@pytest.mark.parametrize("shape", [name for name in COUNTS if name != "ragged"])
def test_odd_distributions_of_tokens(shape: str) -> None:
    compare(Problem(Activation.SWIGLU, COUNTS[shape]), WIDE if shape == "many" else SMALL)


def test_a_worked_example() -> None:
    """Check numbers computed by hand: two tokens on one expert with one inner feature."""
    x, p = torch.tensor([[1.0, 2.0], [3.0, -1.0]]), torch.tensor([0.5, 1.0])
    w1, w2 = Weights([torch.tensor([[1.0, 1.0]])]), Weights([torch.tensor([[2.0], [-1.0]])])
    y, h = reference.forward(x, p, [2], w1, w2, Activation.SQUARED_RELU)
    assert h.tolist() == [[3.0], [2.0]]
    assert y.tolist() == [[9.0, -4.5], [8.0, -4.0]]  # a = 9 * 0.5 and 4 * 1
    back = reference.input_gradient(torch.ones(2, 2), h, p, [2], w1, w2, Activation.SQUARED_RELU)
    assert back.dp.tolist() == [9.0, 4.0]  # da = 1 for both
    assert back.dh.tolist() == [[3.0], [4.0]]  # da * p * 2h
    assert back.dx.tolist() == [[3.0, 3.0], [4.0, 4.0]]


@pytest.mark.parametrize("kind", list(Activation))
def test_all_gradients_are_those_of_autograd(kind: Activation) -> None:
    problem = Problem(kind, COUNTS["ragged"], seed=8)
    leaves = [tensor.double().requires_grad_() for tensor in (problem.x, problem.p, *problem.w1, *problem.w2)]
    x, p, w1, w2 = leaves[0], leaves[1], leaves[2:7], leaves[7:]
    rows = []
    for expert, (x_, p_) in enumerate(zip(x.split(problem.counts), p.split(problem.counts), strict=True)):
        h = x_ @ w1[expert].T
        gate, linear = h.chunk(2, -1) if kind.is_gated else (h, torch.ones(()))
        rows.append((activate(kind, gate) * linear * p_[:, None]) @ w2[expert].T)
    all_expected = torch.autograd.grad(torch.cat(rows), leaves, problem.dy.double())
    inputs = [tensor.clone().requires_grad_() for tensor in (problem.x, problem.p, *problem.w1, *problem.w2)]
    y = grouped_mlp(inputs[0], inputs[1], problem.counts, inputs[2:7], inputs[7:], kind)
    for gradient, expected in zip(torch.autograd.grad(y, inputs, problem.dy), all_expected, strict=True):
        torch.testing.assert_close(gradient.double(), expected, rtol=1e-4, atol=1e-5)


def gradients(problem: Problem, active: list[bool], fuses: bool) -> dict[str, torch.Tensor]:
    x, p = problem.x.clone().requires_grad_(), problem.p.clone().requires_grad_()
    weights: list[Any] = []
    for group in (problem.w1, problem.w2):
        weights.append(
            [weight.clone().requires_grad_(is_active) for weight, is_active in zip(group, active, strict=True)]
        )
        for weight in weights[-1]:
            weight.fuse_weight_gradient, weight.main_grad = fuses, torch.ones_like(weight, dtype=torch.float32)
    y = grouped_mlp(x, p, problem.counts, weights[0], weights[1], problem.kind)
    y.backward(problem.dy)
    assert x.grad is not None
    assert p.grad is not None
    results = {"y": y.detach(), "x": x.grad, "p": p.grad}
    for name, experts in zip(("w1", "w2"), weights, strict=True):
        for expert, weight in enumerate(experts):
            if active[expert]:
                assert weight.grad is not None
                results[f"{name}.{expert}"] = weight.main_grad if fuses else weight.grad
                assert getattr(weight, "grad_added_to_main_grad", False) == fuses
            else:
                assert weight.grad is None
                assert bool((weight.main_grad == 1).all())
    return results


@pytest.mark.parametrize("fuses", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mixed_experts_give_the_bits_of_all_active_ones(dtype: torch.dtype, fuses: bool) -> None:
    problem = Problem(Activation.SWIGLU, COUNTS["ragged"], dtype)
    all_active = gradients(problem, [True] * 5, fuses)
    for active in ([True, False, False, True, True], [False] * 5, [False, False, True, False, False]):
        mixed = gradients(problem, active, fuses)
        assert mixed.keys() <= all_active.keys()
        for name, gradient in mixed.items():
            assert torch.equal(gradient, all_active[name]), name


def test_gradients_reduced_in_16_bits_are_not_written_as_fp32() -> None:
    problem = Problem(Activation.SWIGLU, [4], torch.bfloat16)
    weights = [[tensor.clone().requires_grad_() for tensor in group] for group in (problem.w1, problem.w2)]
    for weight in (*weights[0], *weights[1]):
        weight.fuse_weight_gradient, weight.main_grad = True, torch.ones_like(weight)  # type: ignore[attr-defined]
    grouped_mlp(problem.x, problem.p, [4], weights[0], weights[1], problem.kind).backward(problem.dy)
    for weight in (*weights[0], *weights[1]):
        assert bool((weight.main_grad == 1).all())  # type: ignore[attr-defined]
        assert weight.grad is not None
        assert not hasattr(weight, "grad_added_to_main_grad")
    args = (problem.dy, problem.dy[:, :1].repeat(1, 48), problem.x, problem.dy[:, :24].contiguous(), [4])
    with pytest.raises(ValueError, match=r"\bW1\b.*\bexpert 0\b.*\btorch\.bfloat16\b.*\bfloat32\b"):
        launch.weight_gradient(*args, ([torch.ones(48, 40).bfloat16()], [torch.ones(40, 24)]), True)
    with pytest.raises(ValueError, match=r"\ba has 3 rows\b.*\[4\]"):
        launch.weight_gradient(*args[:3], args[3][:3], [4], ([torch.ones(48, 40)], [torch.ones(40, 24)]), True)


def test_an_expert_frozen_by_half_is_refused() -> None:
    problem = Problem(Activation.GELU, [3])
    with pytest.raises(ValueError, match=r"\bexperts \[0\]"):
        grouped_mlp(problem.x, problem.p, [3], [problem.w1[0].requires_grad_()], problem.w2, problem.kind)


def test_rows_are_indexed_in_64_bits() -> None:
    """Compute only the last rows of tensors of more than 2^31 elements; untouched memory is never allocated."""
    width, tokens = 16, 2**27 + 8
    left, out = torch.empty(tokens, width), torch.empty(tokens, width)
    draw = torch.Generator().manual_seed(3)
    left[-5:] = torch.randn(5, width, generator=draw)
    weight = torch.randn(width, width, generator=draw)
    counts = [tokens - 5, 5]
    last = row_tiles(counts, 16, left.device)
    addresses = torch.tensor([0, weight.data_ptr()])
    triton_kernels.product_kernel[(1,)](
        left, addresses, out, last.expert[-1:], last.begin[-1:], last.end[-1:], 1, width, width, width,
        TRANSPOSED=False, DTYPE=tl.float32, BM=16, BN=16, BK=16, GROUP=8,
    )  # fmt: skip
    assert left.numel() > 2**31
    torch.testing.assert_close(out[-5:], left[-5:] @ weight)


def test_tiles_hold_rows_of_one_expert() -> None:
    tiles = row_tiles([5, 0, 3], 4, torch.device("cpu"))
    assert tiles.expert.tolist() == [0, 0, 2]
    assert tiles.begin.tolist() == [0, 4, 5]
    assert tiles.end.tolist() == [5, 5, 8]


def test_the_operator_is_one_that_torch_can_trace() -> None:
    problem = Problem(Activation.SWIGLU, [4, 3])
    args = (problem.x, problem.p, problem.counts, problem.w1, problem.w2, "swiglu")
    torch.library.opcheck(_forward, args)


def test_what_frozen_experts_save() -> None:
    """Compare the bytes that active and frozen experts of DeepSeek-MoE (hidden 2048, inner 1408) save."""
    active = saved_bytes(1000, 1000, 2048, 1408, Activation.SWIGLU, 2)
    frozen = saved_bytes(1000, 0, 2048, 1408, Activation.SWIGLU, 2)
    assert (active, frozen) == (9_728_000, 5_632_000)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"counts": [4]}, r"\btokens \(5, 40\).*\b4\b"),
        ({"p": torch.ones(3)}, r"\bprobabilities \(3,\)"),
        ({"x": torch.ones(5, 40, dtype=torch.float64)}, r"\btokens\b.*\btorch\.float64\b.*\btorch\.float32\b"),
        ({"kind": Activation.GELU}, r"\bgelu\b"),
        ({"w1": Weights([torch.ones(48, 41)])}, r"\bW1\b.*\(48, 41\).*\(48, 40\)"),
        ({"w2": Weights([torch.ones(40, 24).bfloat16()])}, r"\bW2\b.*\btorch\.bfloat16\b.*\btorch\.float32\b"),
    ],
)
def test_what_does_not_fit_is_said(change: dict[str, Any], named: str) -> None:
    problem = Problem(Activation.SWIGLU, [5])
    args: dict[str, Any] = {
        "x": problem.x, "p": problem.p, "counts": problem.counts, "w1": problem.weights[0], "w2": problem.weights[1],
        "kind": problem.kind,
    }  # fmt: skip
    with pytest.raises(ValueError, match=named):
        launch.forward(**args | change)


def test_weights_that_do_not_fit_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match="expert 1"):
        Weights([torch.ones(2, 2), torch.ones(2, 3)])
    with pytest.raises(ValueError, match=r"\bexpert 0\b.*\bcontiguous\b"):
        Weights([torch.ones(2, 3).T])
