"""Comparison of compute weights that several ranks hold alike, kept or replayed, after a recovery."""

from __future__ import annotations

from collections.abc import Sequence

from moevement_core.trainer.binding import Replicas


def unequal_replicas(per_rank: Sequence[Sequence[Replicas]]) -> list[str]:
    """Return in words the groups whose ranks hold different weights.

    Args:
        per_rank: result of ``Binding.replicas`` of every rank.
    """
    digests: dict[tuple[str, tuple[int, ...]], set[str]] = {}
    for reported in per_rank:
        for what, ranks, digest in reported:
            digests.setdefault((what, ranks), set()).add(digest)
    return [
        f"compute weights{f' of {what}' if what else ''} of ranks {', '.join(map(str, ranks))}, which have them alike"
        for (what, ranks), distinct in digests.items()
        if len(distinct) > 1
    ]
