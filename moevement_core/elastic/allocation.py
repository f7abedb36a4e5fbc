"""How many replicas each expert gets: by its share of tokens, and never fewer than a floor (Lazarus, equation 1)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from moevement_core.errors import ConfigError

Replicas = npt.NDArray[np.int64]


def allocate(tokens: Sequence[int] | npt.NDArray[np.integer], slots: int, floor: int) -> Replicas:
    """Replicas of each expert, int64 ``[E]``; together as many as there are slots.

    In ascending order of load, each expert gets its share, rounded down, of the slots that are left for it and those
    after it, and the floor if that is more. So the order of loads is that of replicas, and what rounding leaves goes
    to the experts with the most tokens. With ``floor`` replicas on nodes of their own, any ``floor - 1`` nodes may be
    lost.

    Args:
        tokens: routed to each expert of a layer, ``[E]``; of equal loads the lower number comes first.
        slots: that all nodes have together, N * c.
        floor: f, replicas that each expert has at least. Where slots are too few it is as large as they allow.

    Raises:
        ConfigError: fewer slots than experts.
    """
    loads = np.asarray(tokens, dtype=np.int64)
    if loads.ndim != 1 or not loads.size or loads.min() < 0:
        raise ConfigError(f"tokens {loads.tolist()}; needs a number of tokens, 0 or more, for each expert")
    if slots < loads.size or floor < 1:
        raise ConfigError(
            f"{slots} slots and a floor of {floor} for {loads.size} experts; needs a slot for each expert, and a floor "
            "of 1 or more"
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
    """Tokens of a replica of the most loaded expert over those of a replica if all were equal; 1.0 is perfect."""
    loads = np.asarray(tokens, dtype=np.float64)
    mean = loads.sum() / replicas.sum()
    return float((loads / replicas).max() / mean) if mean else 1.0
