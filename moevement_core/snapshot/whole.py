"""Digests of operators' whole live state, with which a recovery compares the replayed state (docs/verification.md).

State in host memory is hashed with XXH3. State on a GPU stays on the GPU: for each tensor, one kernel launch computes
two sums over the tensor's words, modulo 2^64. Each word is multiplied by an odd number that depends on the word's
index. A change of one word changes both sums. Changes of several words stay undetected with a probability of about
2^-64. A digest of host memory never equals a digest of a GPU, so only digests of the same kind may be compared.
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
"""Words that torch adds at a time. A word needs 40 bytes of device memory, which torch's allocator keeps afterwards."""
_MULTIPLIERS = (0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9)


def begin_whole(operators: Mapping[str, Sequence[torch.Tensor]]) -> Finish:
    """Begin to compute a digest of each operator over its tensors in order.

    For tensors on a GPU, this call issues the work on the current stream, and the returned function waits for its end.
    For host tensors, the returned function does all the work. Any thread may call the returned function. It must do so
    before the tensors change.

    Returns:
        Function that returns the digest of each operator, by name.
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
    """Return the two sums that are the digest of ``tensors``, int64 ``[2]``, on their device, without waiting."""
    total = torch.zeros(2, dtype=torch.int64, device=tensors[0].device)
    add = (_kernel() if total.is_cuda else None) or _add
    place = 1
    for tensor in tensors:
        words = tensor.detach().reshape(-1).view(_WORDS[tensor.element_size()])
        add(words.to(total.device), place, _MULTIPLIERS, total)
        place += words.numel()
    return total


def _add(words: torch.Tensor, place: int, multipliers: tuple[int, int], total: torch.Tensor) -> None:
    """Add the two index-weighted sums of ``words`` to ``total``.

    This function defines the digest; kernels have to compute the same sums.

    Args:
        words: integers as wide as a tensor's elements, ``[n]``.
        place: index of the first word, counted from 1 over all tensors.
        multipliers: for each of the two sums, the number by which the indices of words are multiplied.
        total: int64 ``[2]``.
    """
    for piece in words.split(_PIECE):
        places = torch.arange(place, place + piece.numel(), dtype=torch.int64, device=total.device)
        values = piece.to(torch.int64)
        for index, multiplier in enumerate(multipliers):
            total[index] += ((values + index + 1) * ((places * multiplier) | 1)).sum()
        place += piece.numel()


@functools.cache
def _kernel() -> Callable[[torch.Tensor, int, tuple[int, int], torch.Tensor], None] | None:
    """Return a kernel that computes the sums of :func:`_add` in one launch; None if Triton cannot compile it."""
    try:
        from moevement_core.snapshot.triton_sums import add

        word, total = torch.zeros(1, dtype=torch.int32, device="cuda"), torch.zeros(2, dtype=torch.int64, device="cuda")
        add(word, 1, _MULTIPLIERS, total)
    except Exception as error:  # no Triton, no C compiler, or a device unknown to ptxas: _add computes the same sums
        log.warning(f"Triton does not work here ({error}); torch computes digests of GPU state, with more launches")
        return None
    return add


def _hexadecimal(sums: torch.Tensor) -> str:
    return "".join(f"{value & (2**64 - 1):016x}" for value in sums.tolist())
