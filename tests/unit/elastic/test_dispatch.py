"""Algorithm 1 of Lazarus in whole tokens computes each token once, loads replicas evenly and keeps own tokens local."""

from __future__ import annotations

import numpy as np
import pytest

from tests.unit.elastic.whole_tokens import schedule


def test_a_worked_example() -> None:
    """Check one expert on three ranks: 1, 0 and 2 replicas; 2, 5 and 3 tokens. Replicas compute 4, 3 and 3 tokens."""
    sent = schedule(np.array([[2, 5, 3]]), np.array([[1, 0, 2]]))
    assert sent[0].tolist() == [[2, 0, 0], [2, 0, 3], [0, 0, 3]]


@pytest.mark.parametrize("seed", range(100))
def test_every_token_is_computed_once_and_replicas_alike(seed: int) -> None:
    draw = np.random.default_rng(seed)
    experts, ranks = int(draw.integers(1, 9)), int(draw.integers(1, 7))
    tokens = draw.integers(0, 40, (experts, ranks)) * draw.integers(0, 2, (experts, ranks))
    replicas = draw.integers(0, 3, (experts, ranks))
    replicas[np.arange(experts), draw.integers(0, ranks, experts)] += 1
    sent = schedule(tokens, replicas)
    assert sent.min() >= 0
    assert (sent.sum(2) == tokens).all()
    computed, even = sent.sum(1), tokens.sum(1) / replicas.sum(1)
    assert (np.abs(computed - even[:, None] * replicas) < replicas + (replicas == 0)).all()
    assert (computed[replicas == 0] == 0).all()
    own = np.einsum("eii->ei", sent)
    assert (own == np.minimum(tokens, computed)).all(), "nothing is sent away that could be computed here"
    left, free = tokens - own, computed - own
    proportional = left[:, :, None] * free[:, None, :] / np.maximum(left.sum(1), 1)[:, None, None]
    others = sent.copy()
    np.einsum("eii->ei", others)[...] = 0
    assert (np.abs(others - proportional) < ranks).all(), "the rest is sent in proportion to what ranks can take"


def test_tokens_without_a_replica_are_an_error() -> None:
    with pytest.raises(ValueError, match=r"\bexperts \[1\].*\breplica\b"):
        schedule(np.array([[0, 0], [0, 3]]), np.array([[0, 0], [0, 0]]))
