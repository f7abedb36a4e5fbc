"""Comparison of compute weights that must be equal on several ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import xxhash


@dataclass(frozen=True)
class ReplicaDigest:
    """Digest of compute weights on one rank, in the form that the rank sends to all others.

    A digest stands for the ranks on which the weights must be equal: a list of them would make the exchange O(N^2).
    """

    operator: str
    """Name of the operator; empty if the digest covers all weights that must be equal on these ranks."""
    ranks: str
    """Digest of the ranks on which the weights must be equal."""
    digest: str


def compact(replicas: Iterable[tuple[str, tuple[int, ...], str]]) -> list[ReplicaDigest]:
    """Return what a rank sends of the result of ``Binding.replicas``."""
    return [
        ReplicaDigest(name, xxhash.xxh3_64_hexdigest(repr(tuple(ranks)).encode()), digest)
        for name, ranks, digest in replicas
    ]


def unequal_replicas(per_rank: Sequence[Sequence[ReplicaDigest]]) -> list[str]:
    """Return a description of each group of ranks whose weights differ although they must be equal.

    Args:
        per_rank: digests of every rank.
    """
    ranks: dict[tuple[str, str], list[int]] = {}
    digests: dict[tuple[str, str], set[str]] = {}
    for rank, reported in enumerate(per_rank):
        for replica in reported:
            key = replica.operator, replica.ranks
            ranks.setdefault(key, []).append(rank)
            digests.setdefault(key, set()).add(replica.digest)
    return [
        f"compute weights{f' of {key[0]}' if key[0] else ''} differ between ranks {', '.join(map(str, ranks[key]))}"
        for key, distinct in digests.items()
        if len(distinct) > 1
    ]
