"""Compute weights that several ranks have alike: after a recovery they are compared, kept ones and replayed ones."""

from __future__ import annotations

from collections.abc import Sequence

from moevement_core.session.binding import Replicas


def unequal_replicas(everyones: Sequence[Sequence[Replicas]]) -> list[str]:
    """In words, the groups whose ranks do not have the same.

    Args:
        everyones: what ``Binding.replicas`` gave, of every rank.
    """
    digests: dict[tuple[int, ...], set[str]] = {}
    for its in everyones:
        for ranks, digest in its:
            digests.setdefault(ranks, set()).add(digest)
    return [
        f"compute weights of ranks {', '.join(map(str, ranks))}, which have the same ones"
        for ranks, distinct in digests.items()
        if len(distinct) > 1
    ]
