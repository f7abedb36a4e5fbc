"""Simulation of MoEtion's two selections of experts in each snapshot (section 4.3, Algorithm 1, lines 18 and 19).

A rank's own host saves the experts that had most tokens since the host saved them last. Of these, peers get the
experts that had most tokens since peers got them last. So a failure loses more updates if the state of a rank survives
only at peers.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from moevement_core.policy.tokens_at_risk import shares

TOKENS = 1_000_000
"""Tokens of a layer in a simulated iteration; each expert's share of them is rounded to whole tokens."""

_Tokens = npt.NDArray[np.int64]
_Mask = npt.NDArray[np.bool_]


class Selected(NamedTuple):
    """Losses and repetitions that MoEtion's two selections of experts lead to: means over many snapshots."""

    host_risk: float
    """Updates that a failure loses if a rank's own host restores the state, in iterations: the sum over iterations of
    the share of tokens whose updates the host does not have."""
    peer_risk: float
    """Updates that a failure loses if a peer restores the state, in iterations."""
    repeated: float
    """Among the experts that peers get with a snapshot: share of those that they got with the previous snapshot too."""


def simulate(popularity: npt.NDArray[np.float64], host: int, peers: int, interval: int = 1) -> Selected:
    """Simulate a series of snapshots by MoEtion. Return means over the second half, when the selections have settled.

    Args:
        popularity: share of a layer's tokens that each expert gets, ``[layers, experts]``.
        host: S_local, mean number of experts of a layer that a rank's own host saves in a snapshot.
        peers: S_remote, mean number of experts of a layer that peers get in a snapshot, at most ``host``.
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

    Tokens at risk are those that an expert had since it was last saved. Each layer gets a part of ``total`` in
    proportion to its tokens at risk. Of experts with equal numbers of tokens, the first is selected first.

    Args:
        risk: tokens at risk of each expert, int64 ``[layers, experts]``.
        candidates: mask of the experts that may be selected, bool ``[layers, experts]``.
        total: S_total, number of experts to select in all layers together.
    """
    of_layer = {layer: int(own[candidates[layer]].sum()) for layer, own in enumerate(risk)}
    wanted = shares(of_layer, {layer: int(own.sum()) for layer, own in enumerate(candidates)}, total)
    chosen = np.zeros_like(candidates)
    for layer, count in wanted.items():
        order = np.argsort(-np.where(candidates[layer], risk[layer], -1), kind="stable")
        chosen[layer, order[:count]] = True
    return chosen
