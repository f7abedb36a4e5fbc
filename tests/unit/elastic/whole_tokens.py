"""Which of an expert's replicas computes which tokens (Lazarus, algorithm 1), in whole tokens.

Every replica of an expert gets as many, to one token. A rank's own tokens go to its own replicas first. What is left
of all ranks, in their order, fills what is left of all replicas, in theirs. The paper spreads what is left in
proportion, in fractions; whole tokens that fill exactly need another rule, and this one has few messages.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Counts = npt.NDArray[np.int64]


def schedule(tokens: Counts, replicas: Counts) -> Counts:
    """Tokens of each expert that each rank sends to each rank, int64 ``[E, from, to]``; the same on every rank.

    Args:
        tokens: routed to each expert on each rank, ``[E, N]``.
        replicas: of each expert on each rank, ``[E, N]``; of an expert with tokens there is one.

    Raises:
        ValueError: an expert has tokens and no replica.
    """
    homeless = np.flatnonzero((tokens.sum(1) > 0) & (replicas.sum(1) == 0))
    if homeless.size:
        raise ValueError(f"experts {homeless.tolist()} have tokens and no replica; needs one of each")
    room = capacities(tokens.sum(1), replicas)
    own = np.minimum(room, tokens)
    sent = _overlaps(tokens - own, room - own)
    ranks = np.arange(tokens.shape[1])
    sent[:, ranks, ranks] += own
    return sent


def capacities(tokens: Counts, replicas: Counts) -> Counts:
    """Tokens that each rank computes of each expert, ``[E, N]``: the first replicas have one more where they differ."""
    ends = replicas.cumsum(1)
    every = np.maximum(ends[:, -1:], 1)
    each, more = tokens[:, None] // every, tokens[:, None] % every
    return each * replicas + np.minimum(ends, more) - np.minimum(ends - replicas, more)


def _overlaps(left: Counts, room: Counts) -> Counts:
    """What stands in a row beside what stands in another of the same length, ``[E, N, N]``."""
    left_ends, room_ends = left.cumsum(1), room.cumsum(1)
    ends = np.minimum(left_ends[:, :, None], room_ends[:, None, :])
    begins = np.maximum((left_ends - left)[:, :, None], (room_ends - room)[:, None, :])
    return np.maximum(ends - begins, 0)
