"""Popularity of experts, and the order of operators that follows from it (MoEvement section 3.5, appendices B and E).

An operator that is saved late in a window stays frozen for most of a replay. A frozen operator needs no weight gradient
and no optimizer step. The more tokens an expert processes, the more work this spares. So experts with more tokens come
later. After all experts come the operators that process every token: gates, non-experts, embedding and head. Operators
with equal scores keep the order of the table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from moevement_core.errors import ConfigError, PopularityError
from moevement_core.operators import OperatorTable

Scores = npt.NDArray[np.float64]
Order = npt.NDArray[np.intp]


class Ordering(StrEnum):
    """Rule for the order of operators. All rules but the last one order experts by a score."""

    HARD_COUNT = "hard"
    """Number of tokens routed to the expert since training began (section 3.5)."""
    SOFT_COUNT = "soft"
    """Sum of the expert's gate probabilities since training began (appendix B)."""
    TIME_DECAYED = "decayed"
    """Exponential moving average of the expert's tokens per iteration (appendix B)."""
    CAPACITY = "capacity"
    """Number of tokens routed to the expert, divided by the expert's capacity (appendix B)."""
    BACK_TO_FRONT = "back-to-front"
    """Order from the head to the embedding without any score (appendix E; default of a model without experts)."""


@dataclass(frozen=True, slots=True)
class OrderingConfig:
    """Rule for the order of operators, with its parameter."""

    ordering: Ordering = Ordering.HARD_COUNT
    alpha: float = 0.9
    """Weight of earlier iterations in the moving average, at least 0 and below 1; only for ``decayed``."""

    def __post_init__(self) -> None:
        if self.ordering not in tuple(Ordering):
            raise ConfigError(f"unknown ordering {self.ordering!r}; needs one of {', '.join(Ordering)}")
        if not 0.0 <= self.alpha < 1.0:
            raise ConfigError(f"alpha is {self.alpha}; needs at least 0 and less than 1, such as 0.9")


class Popularity:
    """Popularity of the experts of one table, accumulated since training began.

    All ranks that hold operators of the table must observe the same counts, so that they derive the same order. The
    counts are sums over replicas. A recovery restores :attr:`scores`, which is the whole state of this object.

    Args:
        table: operators; only experts are counted.
        config: rule of the order.
        capacity: most tokens of a batch that each operator accepts, float64 ``[operators]``. None unless the rule is
            :attr:`Ordering.CAPACITY`.
    """

    def __init__(self, table: OperatorTable, config: OrderingConfig, capacity: Scores | None = None) -> None:
        if (config.ordering is Ordering.CAPACITY) != (capacity is not None):
            raise PopularityError(
                f"ordering {config.ordering} has {'no capacity' if capacity is None else 'a capacity'}; give the "
                "capacity of each operator with ordering 'capacity', and only with that ordering"
            )
        if capacity is not None:
            capacity = checked(table, capacity, "capacity")
            if (capacity[table.is_expert] <= 0).any():
                name = table.names[int(np.flatnonzero(table.is_expert & (capacity <= 0))[0])]
                raise PopularityError(f"capacity of expert {name} is 0; needs at least one token")
        self.table = table
        self.config = config
        self._capacity = np.ones(len(table)) if capacity is None else np.where(table.is_expert, capacity, 1.0)
        self.scores: Scores = np.zeros(len(table))
        """Popularity of each operator so far, float64 ``[operators]``."""

    def observe(self, counts: Scores) -> None:
        """Add the counts of one iteration.

        Args:
            counts: tokens of each expert, or sums of gate probabilities for ``soft``, float64 ``[operators]``; zero for
                an operator that is no expert.

        Raises:
            PopularityError: a count is NaN, infinite or negative, or the number of counts differs from the number of
                operators. The scores stay unchanged.
        """
        counts = checked(self.table, counts, "count")
        match self.config.ordering:
            case Ordering.TIME_DECAYED:
                alpha = self.config.alpha
                self.scores = alpha * self.scores + (1.0 - alpha) * counts
            case Ordering.CAPACITY:
                self.scores = self.scores + counts / self._capacity
            case _:
                self.scores = self.scores + counts

    def order(self) -> Order:
        """Return the order in which a new window saves the operators, as positions in the table."""
        return order_operators(self.table, self.scores, self.config.ordering)


def order_operators(table: OperatorTable, scores: Scores, ordering: Ordering = Ordering.HARD_COUNT) -> Order:
    """Return the order in which a window saves the operators (``OrderOperators()`` of the paper's Algorithm 1).

    On each rank, experts come by ascending score, and after them the operators that process every token. Operators of
    different ranks are interleaved, so that all ranks reach about the same share of their bytes at every position.

    Args:
        table: operators.
        scores: popularity, float64 ``[operators]``; scores of operators that are no experts are ignored.
        ordering: rule of the order. With ``back-to-front`` the scores do not matter. All other rules differ only in how
            the scores were counted, so this function treats them alike.

    Returns:
        Positions in the table, in the order of saving. Equal input gives equal results on every machine.

    Raises:
        PopularityError: a score is NaN, infinite or negative, or the number of scores differs from the number of
            operators.
    """
    scores = checked(table, scores, "score")
    if ordering is Ordering.BACK_TO_FRONT:
        return np.argsort(-table.depth, kind="stable")
    # A stable sort keeps the order of the table among equal scores.
    return _evened(np.argsort(np.where(table.is_expert, scores, np.inf), kind="stable"), table)


def _evened(order: Order, table: OperatorTable) -> Order:
    """Return an order in which all ranks reach about the same share of their bytes at every position.

    The experts of one rank may all be less popular than those of another rank. Before the first iteration all scores
    are equal, and the experts of the first rank come first. In both cases, ``order`` alone would leave some slots full
    on one rank and empty on others. The fullest slot determines how long the copy of an iteration takes. The order
    within each rank stays unchanged.
    """
    held = table.full[:, order]
    reached = np.cumsum(held, axis=1) / np.maximum(held.sum(axis=1, keepdims=True), 1)
    latest = np.where(held > 0, reached, 0.0).max(axis=0)
    return order[np.argsort(latest, kind="stable")]


def counts_of(table: OperatorTable, counts: Mapping[str, float], what: str = "count") -> Scores:
    """Convert counts by operator name to an array, float64 ``[operators]``.

    Raises:
        PopularityError: a name is no expert of the table, an expert has no count, or a count is invalid.
    """
    array = np.zeros(len(table))
    for name, value in counts.items():
        index = table.index_of.get(name)
        if index is None:
            raise PopularityError(
                f"got a {what} of {name!r}, but no operator has that name; known are {first_names(table.names)}"
            )
        if not table.is_expert[index]:
            raise PopularityError(f"got a {what} of {name}, which is no expert but of kind {table.kinds[index]}")
        array[index] = value
    if len(counts) < np.count_nonzero(table.is_expert):
        missing = next(table.names[i] for i in np.flatnonzero(table.is_expert) if table.names[i] not in counts)
        raise PopularityError(f"got no {what} of expert {missing}; give one for every expert, 0 if no token reached it")
    return checked(table, array, what)


def checked(table: OperatorTable, values: Scores, what: str) -> Scores:
    """Return ``values`` as float64 ``[operators]``, after a check.

    Raises:
        PopularityError: a value is NaN, infinite or negative, or the number of values differs from the number of
            operators. The message names the operator with the wrong value.
    """
    array = np.asarray(values, dtype=np.float64)
    if array.shape != (len(table),):
        raise PopularityError(f"{what}s have shape {list(array.shape)}; needs one for each of {len(table)} operators")
    wrong = np.flatnonzero(~(np.isfinite(array) & (array >= 0)))
    if len(wrong):
        raise PopularityError(
            f"{what} of {table.names[wrong[0]]} is {array[wrong[0]]}; needs a finite number that is not negative"
        )
    return array


def first_names(names: tuple[str, ...], count: int = 3) -> str:
    """Return a text with the first ``count`` names and the number of the others, for a message."""
    return ", ".join(names[:count]) + (f" and {len(names) - count} more" if len(names) > count else "")
