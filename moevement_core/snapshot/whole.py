"""Digests of operators' whole live state, to compare a replayed state with (DESIGN: verify).

State in host memory is hashed by XXH3. State on a GPU is not brought to the host for that: two sums of all its words,
each multiplied by an odd number of its place, modulo 2^64, are made where it is, in one launch for each tensor. A
change of any one word changes both; changes of several go unnoticed with a chance of about 2^-64. Digests are compared
between devices of one kind only.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

import torch
import xxhash

from moevement_core import log

Finish = Callable[[], dict[str, str]]
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PIECE = 1 << 21
"""Words at a time in torch: five times eight bytes of device memory for each, which its allocator keeps."""
_MULTIPLIERS = (0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9)


def begin_whole(operators: Mapping[str, Sequence[torch.Tensor]]) -> Finish:
    """Begin to digest the tensors of each operator, in their order.

    With tensors on a GPU the work is issued on the current stream, and the answer waits for it. With host tensors it is
    all done by the answer, which may be called on another thread, before the tensors change.

    Returns:
        What gives the digest of each operator, by name.
    """
    sums = {name: _sums(tensors) for name, tensors in operators.items() if any(t.is_cuda for t in tensors)}

    def finish() -> dict[str, str]:
        return {
            name: f"sums:{_hexadecimal(sums[name])}" if name in sums else f"xxh3:{_xxh3(tensors)}"
            for name, tensors in operators.items()
        }

    return finish


def _xxh3(tensors: Sequence[torch.Tensor]) -> str:
    digest = xxhash.xxh3_128()
    for tensor in tensors:
        if tensor.numel():
            digest.update(tensor.detach().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def _sums(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Both sums of all words of ``tensors``, int64 ``[2]``, on their device; nothing waits for them."""
    total = torch.zeros(2, dtype=torch.int64, device=tensors[0].device)
    add = (_kernel() if total.is_cuda else None) or _add
    place = 1
    for tensor in tensors:
        words = tensor.detach().reshape(-1).view(_WORDS[tensor.element_size()])
        add(words.to(total.device), place, _MULTIPLIERS, total)
        place += words.numel()
    return total


def _add(words: torch.Tensor, place: int, multipliers: tuple[int, int], total: torch.Tensor) -> None:
    """Add both sums of ``words``, the first of which is at ``place``: what sums are."""
    for piece in words.split(_PIECE):
        places = torch.arange(place, place + piece.numel(), dtype=torch.int64, device=total.device)
        values = piece.to(torch.int64)
        for index, multiplier in enumerate(multipliers):
            total[index] += ((values + index + 1) * ((places * multiplier) | 1)).sum()
        place += piece.numel()


@functools.cache
def _kernel() -> Callable[[torch.Tensor, int, tuple[int, int], torch.Tensor], None] | None:
    """Return :func:`_add` as one launch, or None where Triton cannot compile it: sums are the same bits then."""
    try:
        from moevement_core.snapshot.triton_sums import add

        word, total = torch.zeros(1, dtype=torch.int32, device="cuda"), torch.zeros(2, dtype=torch.int64, device="cuda")
        add(word, 1, _MULTIPLIERS, total)
    except Exception as error:  # no Triton, no C compiler, a device that ptxas does not know: torch has the same sums
        log.warning(f"state is digested by torch, in many launches: Triton does not work here ({error})")
        return None
    return add


def _hexadecimal(sums: torch.Tensor) -> str:
    return "".join(f"{value & (2**64 - 1):016x}" for value in sums.tolist())
