"""Skewness follows the paper's definition, and popularities can be drawn with a wanted skewness."""

from __future__ import annotations

import numpy as np
import pytest

from moevement_core.errors import PopularityError
from moevement_core.policy.skew import dirichlet_alpha, sample_shares, skewness


def test_even_and_all_at_one_are_the_ends() -> None:
    assert skewness([5, 5, 5, 5]) == 0.0
    assert skewness([0, 9, 0, 0]) == 1.0
    assert skewness([1, 1, 2]) == pytest.approx((6 / 16 - 1 / 3) / (1 - 1 / 3))
    np.testing.assert_allclose(skewness([[1, 1], [0, 3]]), [0, 1])


@pytest.mark.parametrize(("wanted", "alpha"), [(0.25, 0.0469), (0.5, 0.0156), (0.75, 0.0052), (0.99, 0.000158)])
def test_the_parameters_are_those_of_appendix_d(wanted: float, alpha: float) -> None:
    assert dirichlet_alpha(wanted, 64) == pytest.approx(alpha, rel=0.01)


@pytest.mark.parametrize("wanted", [0.0, 0.05, 0.25, 0.5, 0.75, 0.99, 1.0])
@pytest.mark.parametrize("experts", [2, 64])
def test_samples_are_shares_of_the_wanted_skewness(wanted: float, experts: int) -> None:
    shares = sample_shares(wanted, experts, np.random.default_rng(7), size=4000)
    assert shares.shape == (4000, experts)
    np.testing.assert_allclose(shares.sum(axis=1), 1.0)
    measured = skewness(shares)
    assert measured.mean() == pytest.approx(wanted, abs=4 * measured.std() / 4000**0.5 + 1e-9)


def test_what_cannot_be_is_refused() -> None:
    for call, pattern in (
        (lambda: skewness([1.0]), r"\b1 experts?\b.*\b2\b"),
        (lambda: skewness([1.0, np.nan]), r"\bcount\b.*\bnan\b"),
        (lambda: skewness([1.0, -1.0]), r"\bcount\b.*-1\.0\b"),
        (lambda: skewness(3.0), r"\bcounts\b.*\[\]"),
        (lambda: dirichlet_alpha(1.5, 8), r"\bskewness\b.*\b1\.5\b"),
        (lambda: dirichlet_alpha(0.5, 1), r"\b1 experts?\b.*\b2\b"),
    ):
        with pytest.raises(PopularityError, match=pattern):
            call()
