"""Digest of state. It does not depend on which ranks hold the state, so a migration does not change the digest.

The digest is a sum, modulo 2^64, over the elements of a tensor. Each element is first mixed with a number derived from
the tensor's name and the element's index. So the digests of disjoint ranges add up to the digest of the whole tensor.
The digest detects lost, duplicated, moved and changed elements. It gives no protection against an attacker.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

_MASK = (1 << 64) - 1
_CHUNK = 1 << 20


def of_range(name: str, begin: int, elements: npt.NDArray[np.generic]) -> int:
    """Return the digest of a range of a state tensor, from 0 to 2^64 - 1.

    Args:
        name: name of the tensor, the same in any layout.
        begin: index of the first element in the flat tensor.
        elements: elements of the range, flat and contiguous, 1, 2, 4 or 8 bytes each. The function digests their bits,
            so -0.0 and 0.0 differ.
    """
    bits = elements.reshape(-1).view(f"u{elements.dtype.itemsize}")
    seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
    total = 0
    # Digest in chunks, because the derived numbers take eight bytes for each element.
    for start in range(0, bits.size, _CHUNK):
        part = bits[start : start + _CHUNK].astype(np.uint64)
        drawn = _drawn(seed, np.arange(begin + start, begin + start + part.size, dtype=np.uint64))
        # The index is part of the mix, so even an element that is zero changes the digest.
        total += int((_mixed(part ^ drawn)).sum(dtype=np.uint64))
    return total & _MASK


def together(digests: Iterable[int]) -> int:
    """Return the digest of the union of disjoint ranges, from the digests of the ranges."""
    return sum(digests) & _MASK


def _drawn(seed: int, places: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    with np.errstate(over="ignore"):
        return _mixed(places * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed))


def _mixed(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Mix 64-bit values with SplitMix64's finalizer (Steele, Lea and Flood, OOPSLA '14)."""
    with np.errstate(over="ignore"):
        values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return values ^ (values >> np.uint64(31))
