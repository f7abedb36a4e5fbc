"""Digests of whole operators differ if a bit, a place or a dtype differs, on every kind of device."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from triton.runtime.errors import PTXASError

from moevement_core.snapshot import whole
from moevement_core.snapshot.whole import _hexadecimal, _sums, begin_whole


def host(tensors: list[torch.Tensor]) -> str:
    return begin_whole({"o": tensors})()["o"]


def device(tensors: list[torch.Tensor]) -> str:
    """Compute on the CPU the digest that a GPU computes."""
    return _hexadecimal(_sums(tensors))


@pytest.mark.parametrize("digest", [host, device])
def test_any_change_is_another_digest(digest: Callable[[list[torch.Tensor]], str]) -> None:
    tensors = [torch.randn(1000), torch.randn(3, 7).bfloat16(), torch.tensor(3.0), torch.arange(9, dtype=torch.uint8)]
    digests = {digest(tensors)}
    for tensor in tensors:
        bits = tensor.view(-1).view(torch.uint8)
        for place in {0, len(bits) // 2, len(bits) - 1}:
            bits[place] ^= 1
            digests.add(digest(tensors))
            bits[place] ^= 1
    assert digest(tensors) in digests
    assert len(digests) == 1 + 3 * 4 - 0
    digests.add(digest([tensors[0].flip(0), *tensors[1:]]))
    assert len(digests) == 14, "the same words in another order"
    assert digest(tensors) == digest([tensor.clone() for tensor in tensors])


def test_nan_and_zero_are_told_apart_by_their_bits() -> None:
    assert host([torch.tensor([0.0])]) != host([torch.tensor([-0.0])])
    assert device([torch.tensor([float("nan")])]) == device([torch.tensor([float("nan")])])


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton works here")
def test_where_triton_does_not_work_torch_sums() -> None:
    assert whole._kernel.__wrapped__() is None


def test_a_compiler_that_fails_leaves_sums_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise an error of Triton's own, which is no RuntimeError."""

    class Failing(ModuleType):
        def __getattr__(self, name: str) -> None:
            raise PTXASError("unknown architecture")

    monkeypatch.setitem(sys.modules, "moevement_core.snapshot.triton_sums", Failing("triton_sums"))
    assert whole._kernel.__wrapped__() is None


def test_large_tensors_are_taken_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [torch.randn(257), torch.randn(64).half()]
    at_once = device(tensors)
    monkeypatch.setattr("moevement_core.snapshot.whole._PIECE", 50)
    assert device(tensors) == at_once
