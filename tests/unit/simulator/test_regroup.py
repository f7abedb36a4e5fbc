"""Seconds of detection and regrouping: known values, growth with the number of ranks, and the live tree."""

from __future__ import annotations

import math

import pytest

from moevement_core.comms import tree
from moevement_core.simulator.regroup import FAN_OUT, Constants, Notice, depth, detection_s, regroup

FREE = Constants(fixed_s=0.0, exchanges=0, question_s=0.0, group_s=0.0, connect_s=0.0)


def test_detection_is_the_mean_over_the_kinds_of_notice() -> None:
    assert [detection_s({notice: 1}) for notice in Notice] == [0.1, 1.0, 10.0]
    assert detection_s({Notice.SUPERVISOR: 30, Notice.LEASE: 10}) == pytest.approx((30 * 0.1 + 10 * 10) / 40)


@pytest.mark.parametrize(("ranks", "steps"), [(1, 0), (2, 1), (5, 1), (6, 2), (21, 2), (22, 3), (16_384, 7)])
def test_depth_of_the_tree(ranks: int, steps: int) -> None:
    assert depth(ranks) == steps


def test_the_tree_is_that_of_a_live_job() -> None:
    assert FAN_OUT == tree.FAN_OUT
    for ranks in (1, 7, 100):
        place, steps = ranks - 1, 0
        while (above := tree.neighbours(place, ranks)[0]) is not None:
            place, steps = above, steps + 1
        assert depth(ranks) == steps


def test_parts_grow_as_the_model_says() -> None:
    small, large = regroup(1000), regroup(4000)
    assert large.fixed_s == small.fixed_s
    for part in ("coordinator_s", "groups_s", "connect_s"):
        assert getattr(large, part) == pytest.approx(4 * getattr(small, part))
    assert large.total_s < 4 * small.total_s
    # Without bytes, four times the ranks take a step more in each direction.
    hops = Constants(entry_bytes=0, exchanges=1, hop_s=1.0)
    assert regroup(4 * 1365 + 1, hops).exchange_s - regroup(1365, hops).exchange_s == 2.0


def test_measured_and_published_constants_come_back() -> None:
    assert regroup(16_384).groups_s == pytest.approx(2.34)
    assert regroup(96_000).connect_s == pytest.approx(265)
    assert regroup(4096, FREE).total_s == 0
    assert math.isclose(regroup(4).total_s, 0.3, abs_tol=0.02)
