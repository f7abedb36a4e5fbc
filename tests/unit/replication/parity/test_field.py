"""GF(256) and the erasure code over it agree with the library galois."""

from __future__ import annotations

import itertools

import galois
import numpy as np
import pytest

from moevement_core.errors import ConfigError
from moevement_core.replication.parity.code import coefficients, recover
from moevement_core.replication.parity.field import add_product, inverse, product, solve

GF = galois.GF(2**8, irreducible_poly=0x11D)


def test_products_and_inverses_are_those_of_the_field() -> None:
    all_values = np.arange(256)
    for left in range(256):
        assert [product(left, right) for right in range(256)] == (GF(left) * GF(all_values)).tolist()
    assert [inverse(value) for value in range(1, 256)] == (GF(1) / GF(all_values[1:])).tolist()
    with pytest.raises(ZeroDivisionError):
        inverse(0)


@pytest.mark.parametrize("length", [0, 1, 2, 7, 4096, (1 << 20) + 3])
@pytest.mark.parametrize("coefficient", [0, 1, 2, 90, 255])
def test_what_is_added_is_the_product(length: int, coefficient: int) -> None:
    random = np.random.default_rng(length)
    values, total = (random.integers(256, size=length, dtype=np.uint8) for _ in range(2))
    expected = np.asarray(GF(total) + GF(coefficient) * GF(values))
    add_product(total, coefficient, values)
    assert np.array_equal(total, expected)


def test_memory_that_may_not_be_written_is_read() -> None:
    values, total = np.frombuffer(bytes(range(64)), dtype=np.uint8), np.zeros(64, dtype=np.uint8)
    add_product(total, 7, values)
    assert np.array_equal(total, np.asarray(GF(7) * GF(values)))


@pytest.mark.parametrize(("members", "parities"), [(2, 1), (4, 1), (3, 2), (8, 2), (6, 4)])
def test_any_members_follow_from_as_many_blocks(members: int, parities: int) -> None:
    random = np.random.default_rng(members)
    data = random.integers(256, size=(members, 50), dtype=np.uint8)
    matrix = coefficients(members, parities)
    assert set(matrix[0]) == {1}, "one block of parity is XOR"
    blocks = np.zeros((parities, 50), dtype=np.uint8)
    for number, place in itertools.product(range(parities), range(members)):
        add_product(blocks[number], matrix[number][place], data[place])
    for count in range(1, min(parities, members) + 1):
        for lost in itertools.combinations(range(members), count):
            for numbers in itertools.combinations(range(parities), count):
                known = [place for place in range(members) if place not in lost]
                for place, (from_members, from_blocks) in recover(lost, known, numbers, (members, parities)).items():
                    rebuilt = np.zeros(50, dtype=np.uint8)
                    for member, coefficient in from_members.items():
                        add_product(rebuilt, coefficient, data[member])
                    for number, coefficient in from_blocks.items():
                        add_product(rebuilt, coefficient, blocks[number])
                    assert np.array_equal(rebuilt, data[place])


def test_matrices_are_inverted_as_galois_inverts_them() -> None:
    for seed in range(20):
        matrix = GF.Random((4, 4), seed=seed)
        if np.linalg.det(matrix) != 0:
            assert solve(matrix.tolist()) == np.linalg.inv(matrix).tolist()
    with pytest.raises(ZeroDivisionError):
        solve([[1, 2], [1, 2]])


@pytest.mark.parametrize(("members", "parities"), [(0, 1), (1, 0), (100, 29)])
def test_what_the_field_is_too_small_for_is_refused(members: int, parities: int) -> None:
    with pytest.raises(ConfigError, match=rf"\bparity\b.*\b{members} ranks\b.*\b{parities} blocks\b"):
        coefficients(members, parities)
