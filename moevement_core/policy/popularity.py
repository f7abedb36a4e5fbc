"""Popularity of experts, and the order in which operators are saved for it (MoEvement section 3.5, appendices B and E).

An operator that is saved late in a window stays frozen long in a replay, and a frozen operator costs no weight gradient
and no optimizer step. So the experts with the most tokens come last. Behind them come the operators that serve every
token: gates, non-experts, embedding and head. Operators with equal scores keep the order of the table.
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
    """Rule by which operators are ordered."""

    HARD_COUNT = "hard"
    """Tokens routed to the expert, over the run (section 3.5)."""
    SOFT_COUNT = "soft"
    """Sum of its gate probabilities, over the run (appendix B)."""
    TIME_DECAYED = "decayed"
    """An exponential moving average of tokens per iteration (appendix B)."""
    CAPACITY = "capacity"
    """Tokens over the expert's capacity (appendix B)."""
    BACK_TO_FRONT = "back-to-front"
    """Order from the head to the embedding, whatever the counts (appendix E; default of a model without experts)."""


@dataclass(frozen=True, slots=True)
class OrderingConfig:
    """Configuration of how popularity is measured."""

    ordering: Ordering = Ordering.HARD_COUNT
    alpha: float = 0.9
    """Weight of the past in the moving average, at least 0 and below 1; only for ``decayed``."""

    def __post_init__(self) -> None:
        if self.ordering not in tuple(Ordering):
            raise ConfigError(f"ordering {self.ordering!r}; needs one of {', '.join(Ordering)}")
        if not 0.0 <= self.alpha < 1.0:
            raise ConfigError(f"alpha of {self.alpha}; needs at least 0 and less than 1, such as 0.9")


class Popularity:
    """Popularity of the experts of one table, accumulated over the run.

    Every rank that holds one of the operators must observe the same counts (summed over the ranks that hold replicas),
    so that all of them derive the same order. A recovery restores :attr:`scores`, which is the whole state.

    Args:
        table: operators; only its experts are counted.
        config: rule of the order.
        capacity: tokens that each operator can take in a batch, float64 ``[operators]``; only ``capacity`` needs it.
    """

    def __init__(self, table: OperatorTable, config: OrderingConfig, capacity: Scores | None = None) -> None:
        if (config.ordering is Ordering.CAPACITY) != (capacity is not None):
            raise PopularityError(
                f"ordering {config.ordering} with {'no capacity' if capacity is None else 'a capacity'}; the capacity "
                "of each operator belongs to the ordering 'capacity' and to no other"
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
            counts: tokens per expert, or sums of gate probabilities for ``soft``, float64 ``[operators]``; zero for an
                operator that is no expert.

        Raises:
            PopularityError: counts are NaN, infinite or negative, or not one for each operator. The scores stay
                unchanged.
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
        """Return the order in which a window saves the operators now: positions in the table, first saved first."""
        return order_operators(self.table, self.scores, self.config.ordering)


def order_operators(table: OperatorTable, scores: Scores, ordering: Ordering = Ordering.HARD_COUNT) -> Order:
    """Return the order of ``OrderOperators()`` of the paper's Algorithm 1.

    Experts come by ascending score, and after them the operators that serve every token. The operators of each rank are
    in this order. Operators of several ranks are interleaved, so that each rank has saved about the same share of its
    bytes at every position.

    Args:
        table: operators.
        scores: popularity, float64 ``[operators]``; scores of operators that are no experts are ignored.
        ordering: only ``back-to-front`` makes a difference here, because scores already follow the other rules.

    Returns:
        Positions in the table, first saved first. The permutation is the same for the same input on every machine.

    Raises:
        PopularityError: scores are NaN, infinite or negative, or not one for each operator.
    """
    scores = checked(table, scores, "score")
    if ordering is Ordering.BACK_TO_FRONT:
        return np.argsort(-table.depth, kind="stable")
    # A stable sort keeps the order of the table among equals.
    return _evened(np.argsort(np.where(table.is_expert, scores, np.inf), kind="stable"), table)


def _evened(order: Order, table: OperatorTable) -> Order:
    """Return an order in which every rank reaches the same share of its own bytes at the same position.

    The experts of one rank may all be less popular than those of another rank, and before any count their numbers are
    all lower. In one order of all experts, the slots of one rank would then be full while those of others are empty.
    The copy of an iteration takes as long as the fullest slot. The order within each rank stays unchanged.
    """
    held = table.full[:, order]
    reached = np.cumsum(held, axis=1) / np.maximum(held.sum(axis=1, keepdims=True), 1)
    latest = np.where(held > 0, reached, 0.0).max(axis=0)
    return order[np.argsort(latest, kind="stable")]


def counts_of(table: OperatorTable, counts: Mapping[str, float], what: str = "count") -> Scores:
    """Return counts by operator name as an array, float64 ``[operators]``.

    Raises:
        PopularityError: a name is no expert of the table, or an expert has no count.
    """
    array = np.zeros(len(table))
    for name, value in counts.items():
        index = table.index_of.get(name)
        if index is None:
            raise PopularityError(
                f"{what} of {name!r}, which is no operator here; known are {first_names(table.names)}"
            )
        if not table.is_expert[index]:
            raise PopularityError(f"{what} of {name}, which is of kind {table.kinds[index]}; only experts are counted")
        array[index] = value
    if len(counts) < np.count_nonzero(table.is_expert):
        missing = next(table.names[i] for i in np.flatnonzero(table.is_expert) if table.names[i] not in counts)
        raise PopularityError(f"no {what} of expert {missing}; give one for every expert, 0 if no token reached it")
    return checked(table, array, what)


def checked(table: OperatorTable, values: Scores, what: str) -> Scores:
    """Return ``values`` as float64 ``[operators]``.

    Raises:
        PopularityError: a value cannot be a popularity; the message names its operator.
    """
    array = np.asarray(values, dtype=np.float64)
    if array.shape != (len(table),):
        raise PopularityError(f"{what}s of shape {list(array.shape)}; needs one for each of the {len(table)} operators")
    wrong = np.flatnonzero(~(np.isfinite(array) & (array >= 0)))
    if len(wrong):
        raise PopularityError(
            f"{what} of {table.names[wrong[0]]} is {array[wrong[0]]}; needs a finite number that is not negative"
        )
    return array


def first_names(names: tuple[str, ...], count: int = 3) -> str:
    """Return the first ``count`` names as text for a message, and how many more there are."""
    return ", ".join(names[:count]) + (f" and {len(names) - count} more" if len(names) > count else "")
