"""Assignment of an expert's tokens to its replicas (Lazarus, algorithm 1), in whole tokens.

All replicas of an expert compute the same number of tokens, to one token. Replicas compute tokens of their own rank
first. The remaining tokens are divided in proportion to the remaining capacities, as in the paper, and rounded down.
What rounding leaves over fills what it leaves of the capacities, both in order of ranks.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Counts = npt.NDArray[np.int64]


def schedule(tokens: Counts, replicas: Counts) -> Counts:
    """Return the tokens of each expert that each rank sends to each rank, int64 ``[E, from, to]``.

    The result is the same on every rank.

    Args:
        tokens: tokens routed to each expert on each rank, ``[E, N]``.
        replicas: replicas of each expert on each rank, ``[E, N]``; an expert with tokens has at least one.

    Raises:
        ValueError: an expert has tokens and no replica.
    """
    unserved = np.flatnonzero((tokens.sum(1) > 0) & (replicas.sum(1) == 0))
    if unserved.size:
        raise ValueError(f"experts {unserved.tolist()} have tokens and no replica; needs one of each")
    capacity = capacities(tokens.sum(1), replicas)
    own = np.minimum(capacity, tokens)
    left, free = tokens - own, capacity - own
    sent = left[:, :, None] * free[:, None, :] // np.maximum(left.sum(1), 1)[:, None, None]
    sent += _overlaps(left - sent.sum(2), free - sent.sum(1))
    ranks = np.arange(tokens.shape[1])
    sent[:, ranks, ranks] += own
    return sent


def capacities(tokens: Counts, replicas: Counts) -> Counts:
    """Return the tokens of each expert that each rank computes, ``[E, N]``. The first replicas get the remainder."""
    ends = replicas.cumsum(1)
    count = np.maximum(ends[:, -1:], 1)
    least, remainder = tokens[:, None] // count, tokens[:, None] % count
    return least * replicas + np.minimum(ends, remainder) - np.minimum(ends - replicas, remainder)


def _overlaps(left: Counts, capacity: Counts) -> Counts:
    """Return the overlap of each part of a row with each part of another row of the same length, ``[E, N, N]``."""
    left_ends, capacity_ends = left.cumsum(1), capacity.cumsum(1)
    ends = np.minimum(left_ends[:, :, None], capacity_ends[:, None, :])
    begins = np.maximum((left_ends - left)[:, :, None], (capacity_ends - capacity)[:, None, :])
    return np.maximum(ends - begins, 0)
