"""Compute weights that several ranks have alike: after a recovery they are compared, kept ones and replayed ones."""

from __future__ import annotations

from collections.abc import Sequence

from moevement_core.trainer.binding import Replicas


def unequal_replicas(everyones: Sequence[Sequence[Replicas]]) -> list[str]:
    """Return in words the groups whose ranks hold different weights.

    Args:
        everyones: what ``Binding.replicas`` gave, of every rank.
    """
    digests: dict[tuple[str, tuple[int, ...]], set[str]] = {}
    for reported in everyones:
        for what, ranks, digest in reported:
            digests.setdefault((what, ranks), set()).add(digest)
    return [
        f"compute weights{f' of {what}' if what else ''} of ranks {', '.join(map(str, ranks))}, which have them alike"
        for (what, ranks), distinct in digests.items()
        if len(distinct) > 1
    ]
