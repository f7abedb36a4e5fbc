"""Number of replicas of each expert: in proportion to its tokens, but at least a minimum (Lazarus, equation 1).

A running job changes these numbers only if the change clearly reduces the tokens of the most loaded replica (section
4.1).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from moevement_core.errors import ConfigError

Replicas = npt.NDArray[np.int64]

GAIN = 0.1
"""Least share by which a new allocation must reduce the tokens of the most loaded replica to be worth a migration."""


def allocate(tokens: Sequence[int] | npt.NDArray[np.integer], slots: int, floor: int) -> Replicas:
    """Return the number of replicas of each expert, int64 ``[E]``; their sum is ``slots``.

    The function takes the experts in ascending order of load. Each expert gets its share of the remaining slots,
    rounded down, and at least ``floor`` slots. So an expert with more load never has fewer replicas than one with less
    load. The slots that rounding leaves over go to the experts with the most tokens. The minimum has a reason: if each
    expert is on ``floor`` nodes, the loss of any ``floor - 1`` nodes leaves a replica of every expert.

    Args:
        tokens: tokens routed to each expert of a layer, ``[E]``. Experts with equal loads are taken in the order of
            their numbers.
        slots: number of replicas in one layer that all ranks together have space for.
        floor: f, least number of replicas of each expert. If there are too few slots for it, the function uses the
            largest number for which the slots suffice.

    Raises:
        ConfigError: there are fewer slots than experts, or an argument is out of range.
    """
    loads = np.asarray(tokens, dtype=np.int64)
    if loads.ndim != 1 or not loads.size or loads.min() < 0:
        raise ConfigError(f"tokens {loads.tolist()}; needs a number of tokens, 0 or more, for each expert")
    if slots < loads.size or floor < 1:
        raise ConfigError(
            f"{slots} slots for {loads.size} experts, with at least {floor} for each; needs as many slots as experts "
            "or more, and at least 1 for each"
        )
    floor = min(floor, slots // loads.size)
    replicas = np.zeros(loads.size, dtype=np.int64)
    tokens_left, slots_left = int(loads.sum()), slots
    for place, expert in enumerate(np.argsort(loads, kind="stable")):
        after = loads.size - place - 1
        share = int(loads[expert]) * slots_left // tokens_left if tokens_left else slots_left // (after + 1)
        replicas[expert] = max(share, floor)
        tokens_left -= int(loads[expert])
        slots_left -= int(replicas[expert])
    return replicas


def slowest_share(tokens: Sequence[int] | npt.NDArray[np.integer], replicas: Replicas) -> float:
    """Return the tokens of the most loaded replica, divided by the mean over all replicas; 1.0 is perfect balance."""
    loads = np.asarray(tokens, dtype=np.float64)
    mean = loads.sum() / replicas.sum()
    return float((loads / replicas).max() / mean) if mean else 1.0


def better_allocation(
    tokens: Sequence[int] | npt.NDArray[np.integer], replicas: Replicas, floor: int, gain: float = GAIN
) -> Replicas | None:
    """Return new numbers of replicas, int64 ``[E]``, with the sum of ``replicas``; None if not worth a migration.

    Args:
        tokens: recent tokens of each expert of a layer, summed over all ranks, ``[E]``.
        replicas: present number of replicas of each expert, int64 ``[E]``.
        floor: least number of replicas of each expert.
        gain: least share by which the new numbers must reduce the tokens of the most loaded replica. It keeps a job
            from migrating at every fluctuation of its routing.
    """
    better = allocate(tokens, int(replicas.sum()), floor)
    is_worth_it = slowest_share(tokens, better) <= (1.0 - gain) * slowest_share(tokens, replicas)
    return better if is_worth_it and not np.array_equal(better, replicas) else None
