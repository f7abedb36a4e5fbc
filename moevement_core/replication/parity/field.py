"""Arithmetic in GF(256) for Reed-Solomon codes: addition, multiplication and division of bytes.

A block of parity is a sum over the members of a group: the bytes of each member times a coefficient. This module
computes such sums itself, two bytes at a time with a lookup table. Existing libraries do not fit: the bytes arrive one
member after the other, from different hosts, but zfec and liberasurecode need the bytes of all members at once. And
galois is slower (``benchmarks/parity_rates.md``). ``tests/unit/replication/parity/test_field.py`` compares all results
with galois.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

_POLYNOMIAL = 0x11D
"""Polynomial x^8 + x^4 + x^3 + x^2 + 1 that defines the field; 2 is a primitive element of this field."""
_PIECE = 1 << 19
"""Number of two-byte words that are multiplied at a time. This number fits into the processor's cache."""


def _tables() -> tuple[list[int], list[int]]:
    powers, logarithms, value = [0] * 510, [0] * 256, 1
    for exponent in range(255):
        powers[exponent] = powers[exponent + 255] = value
        logarithms[value] = exponent
        value <<= 1
        if value & 0x100:
            value ^= _POLYNOMIAL
    return powers, logarithms


_POWERS, _LOGARITHMS = _tables()


def product(left: int, right: int) -> int:
    """Return the product of two elements of the field."""
    return _POWERS[_LOGARITHMS[left] + _LOGARITHMS[right]] if left and right else 0


def inverse(element: int) -> int:
    """Return the inverse of ``element`` in the field; ``element`` is not 0."""
    if not element:
        raise ZeroDivisionError("0 has no inverse in GF(256)")
    return _POWERS[255 - _LOGARITHMS[element]]


@lru_cache(maxsize=32)
def _products_of_words(coefficient: int) -> npt.NDArray[np.uint16]:
    """Return a lookup table: the product of ``coefficient`` with each possible pair of bytes, uint16 ``[65536]``."""
    products = np.array([product(coefficient, value) for value in range(256)], dtype=np.uint16)
    words = np.arange(1 << 16)
    return (products[words >> 8] << np.uint16(8)) | products[words & 255]


def add_product(total: Bytes, coefficient: int, values: Bytes) -> None:
    """Add ``coefficient * values`` to ``total`` in place; both are contiguous uint8 arrays of the same length."""
    if coefficient == 0 or not len(values):
        return
    if coefficient == 1:
        np.bitwise_xor(total, values, out=total)
        return
    even = len(values) & ~1
    table = _products_of_words(coefficient)
    words, sums = _words(values[:even]), _words(total[:even])
    piece_products = np.empty(min(_PIECE, len(words)), dtype=np.uint16)
    for at in range(0, len(words), _PIECE):
        piece = words[at : at + _PIECE]
        np.take(table, piece, out=piece_products[: len(piece)], mode="clip")
        sums[at : at + _PIECE] ^= piece_products[: len(piece)]
    if even < len(values):
        total[even] ^= product(coefficient, int(values[even]))


def _words(values: Bytes) -> npt.NDArray[np.uint16]:
    return np.frombuffer(values, dtype=np.uint16) if not values.flags.writeable else values.view(np.uint16)


def solve(matrix: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return the inverse of a square matrix, by Gauss-Jordan elimination.

    Raises:
        ZeroDivisionError: the matrix has no inverse.
    """
    size = len(matrix)
    rows = [[*row, *(int(at == place) for place in range(size))] for at, row in enumerate(matrix)]
    for column in range(size):
        pivot = next((at for at in range(column, size) if rows[at][column]), None)
        if pivot is None:
            raise ZeroDivisionError("the matrix has no inverse")
        rows[column], rows[pivot] = rows[pivot], rows[column]
        factor = inverse(rows[column][column])
        rows[column] = [product(factor, value) for value in rows[column]]
        for at in range(size):
            if at != column and (factor := rows[at][column]):
                rows[at] = [value ^ product(factor, other) for value, other in zip(rows[at], rows[column], strict=True)]
    return [row[size:] for row in rows]
