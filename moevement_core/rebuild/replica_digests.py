"""Comparison, after a recovery, of compute weights that must be equal on several ranks."""

from __future__ import annotations

from collections.abc import Sequence

from moevement_core.trainer.binding import Replicas


def unequal_replicas(per_rank: Sequence[Sequence[Replicas]]) -> list[str]:
    """Return a description of each group of ranks whose weights differ although they must be equal.

    Args:
        per_rank: result of ``Binding.replicas`` of every rank.
    """
    digests: dict[tuple[str, tuple[int, ...]], set[str]] = {}
    for reported in per_rank:
        for what, ranks, digest in reported:
            digests.setdefault((what, ranks), set()).add(digest)
    return [
        f"compute weights{f' of {what}' if what else ''} differ between ranks {', '.join(map(str, ranks))}"
        for (what, ranks), distinct in digests.items()
        if len(distinct) > 1
    ]
