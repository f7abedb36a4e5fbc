"""Every new group is used once, in an order in which ranks never wait for each other in a circle."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from moevement_core.restart.communicators import make_communicators, neighbours
from tests.harness import run_ranks


@pytest.mark.parametrize(
    ("ranks", "wanted"),
    [
        (1, []),
        (2, [(0, 1)]),
        (3, [(0, 1), (1, 2), (0, 2)]),
        (4, [(0, 1), (2, 3), (1, 2), (0, 3)]),
        (5, [(0, 1), (2, 3), (1, 2), (3, 4), (0, 4)]),
    ],
)
def test_pairs_of_a_ring(ranks: int, wanted: list[tuple[int, int]]) -> None:
    assert neighbours(ranks) == wanted


def _make() -> int:
    rank = dist.get_rank()
    groups = [dist.new_group(ranks) for ranks in ([1, 2], [0, 3], [2, 3], [0, 1], [0, 1, 2, 3], [rank])]
    return make_communicators([groups[4]])


def test_groups_that_overlap_and_neighbours_in_a_pipeline() -> None:
    """Count the default group, two pairs, the pipeline and two neighbours per rank; a group of one connects nothing."""
    assert [rank.result for rank in run_ranks(_make, 4)] == [1 + 2 + 1 + 2] * 4
