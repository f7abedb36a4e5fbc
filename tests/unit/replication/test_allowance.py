"""Host memory for copies is one allowance, which all ranks whose copies a host keeps share in any proportion."""

from __future__ import annotations

import math

from moevement_core.replication.allowance import Allowance


def test_a_heavy_source_may_have_what_a_light_one_leaves() -> None:
    allowance = Allowance(1000)
    assert allowance.take(1, 900)
    assert not allowance.take(2, 101)
    assert allowance.take(2, 100), "to the last byte"


def test_a_source_that_asks_again_gives_back_what_it_had_and_keeps_it_if_refused() -> None:
    allowance = Allowance(1000)
    assert allowance.take(1, 600)
    assert allowance.take(1, 800)
    assert not allowance.take(1, 1001)
    assert allowance.left_for(2) == 200
    allowance.keep(1, 300)
    assert allowance.left_for(2) == 700


def test_without_a_cap_everything_is_allowed() -> None:
    assert Allowance(math.inf).take(1, 1 << 60)
