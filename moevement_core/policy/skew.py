"""Skew of expert popularity, and random popularities with a wanted skew (MoEvement appendix D)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from moevement_core.errors import PopularityError

Shares = npt.NDArray[np.float64]


def shares_of(counts: npt.ArrayLike) -> Shares:
    """Convert token counts ``[..., experts]`` to shares of their sum, ``[..., experts]``; shares of a sum of 0 are 0.

    Raises:
        PopularityError: counts are NaN, infinite or negative, or there is no expert.
    """
    array = np.asarray(counts, dtype=np.float64)
    if array.ndim == 0 or array.shape[-1] < 1:
        raise PopularityError(f"counts have shape {list(array.shape)}; needs at least one expert in the last dimension")
    if not np.isfinite(array).all() or (array < 0).any():
        wrong = array[~(np.isfinite(array) & (array >= 0))][0]
        raise PopularityError(f"a count is {wrong}; needs finite numbers that are not negative")
    totals = array.sum(axis=-1, keepdims=True)
    return np.divide(array, totals, out=np.zeros_like(array), where=totals > 0)


def skewness(counts: npt.ArrayLike) -> Shares:
    """Return the normalised skewness S of token counts ``[..., experts]``, as an array ``[...]``.

    S is 0 if all experts have equal counts, and 1 if one expert has all tokens.

    Raises:
        PopularityError: there are fewer than two experts, for which S is not defined.
    """
    shares = shares_of(counts)
    experts = shares.shape[-1]
    _at_least_two(experts)
    return ((shares**2).sum(axis=-1) - 1 / experts) / (1 - 1 / experts)


def dirichlet_alpha(wanted: float, experts: int) -> float:
    """Return the parameter a of the symmetric Dirichlet distribution whose mean skewness S is ``wanted``.

    For n experts, appendix D gives (a + 1) / (a n + 1) as the mean of the Herfindahl-Hirschman index. So the mean of S
    is 1 / (a n + 1). The result is infinite if ``wanted`` is 0, and zero if ``wanted`` is 1.
    """
    _at_least_two(experts)
    if not 0.0 <= wanted <= 1.0:
        raise PopularityError(f"skewness is {wanted}; needs 0 (even) to 1 (one expert has all tokens)")
    return np.inf if wanted == 0.0 else (1.0 / wanted - 1.0) / experts


def sample_shares(wanted: float, experts: int, generator: np.random.Generator, size: int = 1) -> Shares:
    """Return ``size`` random popularities, float64 ``[size, experts]``, whose skewness is ``wanted`` on average."""
    alpha = dirichlet_alpha(wanted, experts)
    if np.isinf(alpha):
        return np.full((size, experts), 1.0 / experts)
    if alpha == 0.0:
        return np.eye(experts)[generator.integers(experts, size=size)]
    return generator.dirichlet(np.full(experts, alpha), size=size)


def _at_least_two(experts: int) -> None:
    if experts < 2:
        raise PopularityError(f"{experts} experts; skewness needs at least 2")
