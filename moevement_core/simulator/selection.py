"""Two selections of experts in each snapshot, simulated (MoEtion, section 4.3, Algorithm 1, lines 18 and 19).

The own host keeps the experts with the most tokens since the host last saved them. Peers get a part of these: the
experts with the most tokens since peers last got them. What a failure loses depends on where a rank's state survives.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from moevement_core.policy.tokens_at_risk import shares

TOKENS = 1_000_000
"""Tokens of a layer in a simulated iteration; shares of tokens are rounded to this precision."""

_Tokens = npt.NDArray[np.int64]
_Mask = npt.NDArray[np.bool_]


class Selected(NamedTuple):
    """Means over many simulated snapshots."""

    host_risk: float
    """Updates that a failure loses if the state comes from the own host, in iterations: the sum over iterations of the
    share of tokens whose updates the host does not have."""
    peer_risk: float
    """Updates that a failure loses if the state comes from peers, in iterations."""
    repeated: float
    """Share of the experts sent to peers that were sent with the snapshot before too, 0 to 1."""


def simulate(popularity: npt.NDArray[np.float64], host: int, peers: int, interval: int = 1) -> Selected:
    """Select experts for some snapshots, and return the means of the second half of them.

    Args:
        popularity: share of a layer's tokens that each expert gets, ``[layers, experts]``.
        host: S_local, mean number of experts of a layer that the own host saves.
        peers: S_remote, mean number of experts of a layer that peers get, at most ``host``.
        interval: iterations between snapshots.
    """
    layers, experts = popularity.shape
    tokens = np.rint(popularity * TOKENS * interval).astype(np.int64)
    at_host, at_peers, sent = np.zeros_like(tokens), np.zeros_like(tokens), np.zeros(tokens.shape, dtype=bool)
    snapshots, seen = 4 * experts, []
    for snapshot in range(snapshots):
        at_host += tokens
        at_peers += tokens
        saved = select(at_host, np.ones_like(sent), host * layers)
        before, sent = sent, select(at_peers, saved, peers * layers)
        at_host[saved] = 0
        at_peers[sent] = 0
        if snapshot >= snapshots // 2:
            seen.append((at_host.sum(), at_peers.sum(), TOKENS * layers * (before & sent).sum() / sent.sum()))
    means = np.mean(seen, axis=0) / (TOKENS * layers)
    return Selected(*(float(mean) for mean in means))


def select(risk: _Tokens, candidates: _Mask, total: int) -> _Mask:
    """Return a mask of the experts with the most tokens at risk, bool ``[layers, experts]`` (``SelectExperts``).

    Layers share ``total`` in proportion to their tokens at risk. The order of the experts breaks ties.

    Args:
        risk: tokens of each expert since it was saved, int64 ``[layers, experts]``.
        candidates: mask of the experts that may be selected.
        total: S_total, number of selected experts, all layers together.
    """
    of_layer = {layer: int(own[candidates[layer]].sum()) for layer, own in enumerate(risk)}
    wanted = shares(of_layer, {layer: int(own.sum()) for layer, own in enumerate(candidates)}, total)
    chosen = np.zeros_like(candidates)
    for layer, count in wanted.items():
        order = np.argsort(-np.where(candidates[layer], risk[layer], -1), kind="stable")
        chosen[layer, order[:count]] = True
    return chosen
