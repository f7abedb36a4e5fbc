"""Checks of kernels on this GPU: results against references, and equal bits with and without frozen experts."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from moevement_kernels import launch, reference
from moevement_kernels.activations import Activation
from moevement_kernels.backend import Backend, select
from moevement_kernels.op import grouped_mlp
from moevement_kernels.weights import Weights

COUNTS = [130, 0, 1, 1517, 64, 300]
HIDDEN, INNER = 328, 456
"""Sizes that are no multiples of a tile, and that need every stage of a kernel's pipeline more than once."""


def run(backends: list[Backend]) -> Iterator[tuple[str, bool]]:
    """Yield the name of each check, and True if it held."""
    for backend in backends:
        select(backend)
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            for kind in Activation:
                yield f"{backend} {kind} {dtype}: outputs and gradients", _is_near(kind, dtype)
        for dtype in (torch.bfloat16, torch.float32):
            yield f"{backend} {dtype}: mixed experts have the bits of all-active ones", _is_equal_mixed(dtype)
    select(Backend.TRITON)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        yield f"{dtype}: weight gradients of one linear layer", _is_near_linear(dtype)
    yield "more than 2^31 elements", _is_right_beyond_32_bits()


def _draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to("cuda", dtype)


def _problem(kind: Activation, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    tokens, rows = sum(COUNTS), INNER * (2 if kind.is_gated else 1)
    w1 = torch.stack([_draw(rows, HIDDEN, dtype=dtype, seed=number) / 8 for number in range(len(COUNTS))])
    w2 = torch.stack([_draw(HIDDEN, INNER, dtype=dtype, seed=9 + number) / 8 for number in range(len(COUNTS))])
    x, dy = _draw(tokens, HIDDEN, dtype=dtype, seed=20), _draw(tokens, HIDDEN, dtype=dtype, seed=21)
    return x, dy, _draw(tokens, seed=22).sigmoid(), w1, w2


def _near(actual: torch.Tensor, wanted: torch.Tensor) -> bool:
    error = {torch.bfloat16: 2**-6, torch.float16: 2**-9}.get(actual.dtype, 1e-4)
    return bool((actual.float() - wanted.float()).abs().max() <= error * wanted.float().abs().max())


def _is_near(kind: Activation, dtype: torch.dtype) -> bool:
    x, dy, p, w1, w2 = _problem(kind, dtype)
    weights = Weights(list(w1)), Weights(list(w2))
    wanted = reference.forward(x, p, COUNTS, *weights, kind)
    outputs = launch.forward(x, p, COUNTS, *weights, kind)
    all_active = [True] * len(COUNTS)
    back = reference.input_gradient(dy, wanted.h, p, COUNTS, *weights, kind, all_active)
    gradients_in = launch.input_gradient(dy, wanted.h, p, COUNTS, *weights, kind, all_active)
    gradients = reference.weight_gradient(dy, back.dh, x, back.a, COUNTS, all_active)
    into = (torch.zeros_like(w1, dtype=torch.float32), torch.zeros_like(w2, dtype=torch.float32))
    launch.weight_gradient(dy, back.dh, x, back.a, COUNTS, (list(into[0]), list(into[1])), True)
    wanted_gradients = [torch.stack([gradient for gradient in part if gradient is not None]) for part in gradients]
    pairs = [*zip(outputs, wanted, strict=True), *zip(gradients_in, back, strict=True)]
    return all(_near(*pair) for pair in pairs) and all(
        bool((sums - wanted_sums).abs().max() <= 2**-6 * wanted_sums.abs().max())
        for sums, wanted_sums in zip(into, wanted_gradients, strict=True)
    )


def _is_equal_mixed(dtype: torch.dtype) -> bool:
    def gradients(active: list[bool]) -> dict[str, torch.Tensor]:
        x, dy, p, w1, w2 = _problem(Activation.SWIGLU, dtype)
        x.requires_grad_()
        p.requires_grad_()
        weights = [
            [weight.clone().requires_grad_(is_active) for weight, is_active in zip(part_weights, active, strict=True)]
            for part_weights in (w1, w2)
        ]
        y = grouped_mlp(x, p, COUNTS, weights[0], weights[1], Activation.SWIGLU)
        y.backward(dy)
        named = {f"{part}.{number}": weight.grad for part in (0, 1) for number, weight in enumerate(weights[part])}
        every = {"y": y.detach(), "x": x.grad, "p": p.grad, **named}
        return {name: gradient for name, gradient in every.items() if gradient is not None}

    all_active = gradients([True] * len(COUNTS))
    for active in ([False] * len(COUNTS), [True, False, True, False, False, True]):
        mixed = gradients(active)
        if not all(torch.equal(gradient, all_active[name]) for name, gradient in mixed.items()):
            return False
    return True


def _is_near_linear(dtype: torch.dtype) -> bool:
    active = [number % 2 == 0 for number in range(len(COUNTS))]
    kept = sum(count for count, is_active in zip(COUNTS, active, strict=True) if is_active)
    dy, x = _draw(sum(COUNTS), INNER, dtype=dtype, seed=24), _draw(kept, HIDDEN, dtype=dtype, seed=25)
    into = [torch.zeros(INNER, HIDDEN, device="cuda") if is_active else None for is_active in active]
    launch.linear_weight_gradient(dy, x, COUNTS, into, accumulate=True)
    wanted = reference.linear_weight_gradient(dy, x, COUNTS, active)
    pairs = zip(into, wanted, strict=True)
    return all(a is None if b is None else a is not None and _near(a, b) for a, b in pairs)


def _is_right_beyond_32_bits() -> bool:
    tokens, width = 2**21 + 37, 1024 + 8
    x = torch.zeros(tokens, width, dtype=torch.bfloat16, device="cuda")
    x[-37:] = _draw(37, width, dtype=torch.bfloat16)
    w1, w2 = (Weights([_draw(width, width, dtype=torch.bfloat16, seed=3) / 32] * 2) for _ in range(2))
    p = torch.ones(tokens, device="cuda")
    y, _ = launch.forward(x, p, [tokens - 37, 37], w1, w2, Activation.RELU)
    last = Weights(w1.data[:1]), Weights(w2.data[:1])
    wanted = reference.forward(x[-37:], p[-37:], [37], *last, Activation.RELU)
    return x.numel() > 2**31 and _near(y[-37:], wanted.y)
