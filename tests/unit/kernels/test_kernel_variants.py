"""A micro-batch with a new number of tokens compiles no kernel again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from moevement_kernels import launch, triton_dispatch, triton_kernels
from moevement_kernels.activations import Activation
from moevement_kernels.weights import Weights
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import create_function_from_signature

pytestmark = pytest.mark.builds

EXPERTS, HIDDEN, INNER = 4, 64, 128
TOKENS = [0, 1, 2, 3, 15, 16, 17, 127, 128, 129, *range(250, 2250, 50)]


class CountedVariants:
    """Stand-in for a Triton kernel that computes the key of the variant for each launch, as Triton does."""

    def __init__(self, kernel: Any) -> None:
        backend = make_backend(GPUTarget("cuda", 90, 32))
        self.bind = create_function_from_signature(kernel.signature, kernel.params, backend)
        self.keys: set[str] = set()

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return self.launch

    def launch(self, *args: Any, **kwargs: Any) -> None:
        _, specialization, options = self.bind(*args, **kwargs)
        self.keys.add(f"{specialization} {options}")


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> dict[str, CountedVariants]:
    """Replace all kernels by stand-ins that count variants, and return the stand-ins by module and name."""
    kernels = {}
    for module, names in (
        (triton_kernels, ("up_kernel", "product_kernel", "hidden_gradient_kernel", "weight_gradient_kernel")),
        (triton_dispatch, ("_to_slots",)),
    ):
        for name in names:
            kernel = CountedVariants(getattr(module, name))
            monkeypatch.setattr(module, name, kernel)
            kernels[f"{module.__name__.split('.')[-1]}.{name}"] = kernel
    monkeypatch.setattr(launch, "has_kernels", lambda _: True)
    return kernels


def split(tokens: int) -> list[int]:
    """Return uneven numbers of tokens for the experts."""
    counts = [tokens // 7, 0, tokens // 3]
    return [*counts, tokens - sum(counts)]


def numbers(*shape: int, dtype: torch.dtype = torch.bfloat16, begin: int = 0) -> torch.Tensor:
    """Return a tensor that begins ``begin`` elements after a multiple of 16 bytes."""
    size = torch.Size(shape).numel()
    return torch.zeros(size + begin, dtype=dtype)[begin:].view(shape)


def test_variants_of_fifty_token_counts(counted: dict[str, CountedVariants]) -> None:
    assert len(set(TOKENS)) == 50
    w1, w2 = Weights([numbers(2 * INNER, HIDDEN)] * EXPERTS), Weights([numbers(HIDDEN, INNER)] * EXPERTS)
    active, kind = [True, True, False, True], Activation.SWIGLU
    into: Any = tuple(
        [torch.zeros_like(w.data[0], dtype=torch.float32) if on else None for on in active] for w in (w1, w2)
    )
    for tokens in TOKENS:
        counts = split(tokens)
        p = numbers(tokens, dtype=torch.float32, begin=tokens % 3)  # a dispatcher's may begin anywhere in a tensor
        x, dy = numbers(tokens, HIDDEN), numbers(tokens, HIDDEN)
        _, h = launch.forward(x, p, counts, w1, w2, kind)
        _, _, dh, a = launch.input_gradient(dy, h, p, counts, w1, w2, kind, active)
        launch.weight_gradient(dy, dh, x[: a.shape[0]], a, counts, into, True)
        slots = torch.arange(EXPERTS)
        triton_dispatch.to_slots_kernel(torch.zeros(tokens, EXPERTS, dtype=torch.bool), slots, slots, slots)
    assert {name: len(kernel.keys) for name, kernel in counted.items()} == {
        "triton_kernels.up_kernel": 1,
        "triton_kernels.product_kernel": 2,  # transposed and not
        "triton_kernels.hidden_gradient_kernel": 1,
        "triton_kernels.weight_gradient_kernel": 1,
        "triton_dispatch._to_slots": 1,
    }
