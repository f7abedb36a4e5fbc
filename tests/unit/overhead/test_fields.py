"""Fields of the overhead in a metrics line have the measured values."""

from __future__ import annotations

from dataclasses import replace

from moevement_core.overhead.estimate import Overhead, OverheadEstimate, Timed
from moevement_core.overhead.fields import FIRST_MEASURED, PARTS, overhead_fields, recorded_overhead
from moevement_core.overhead.quiet import is_quiet

MEASURED = Overhead(0.02, 0.01, 0.03, 0.004, 0.003, 0.01, 0.001, 0.002, 1.0, 7)


def test_what_is_written_is_read() -> None:
    recorded = recorded_overhead({"iteration": 9, **overhead_fields(MEASURED)})
    assert recorded is not None
    assert (recorded.share, recorded.low, recorded.high) == (0.02, 0.01, 0.03)
    assert recorded.parts == {"copy": 0.004, "digest": 0.003, "send": 0.01, "policy": 0.001, "stall": 0.002}
    assert tuple(recorded.parts) == PARTS
    assert recorded.allowed is None
    assert recorded_overhead(overhead_fields(MEASURED, allowed=0.04)) == replace(recorded, allowed=0.04)


def test_an_interval_that_is_not_known_and_an_overhead_that_is_not() -> None:
    recorded = recorded_overhead(overhead_fields(replace(MEASURED, low=None, high=None)))
    assert recorded is not None
    assert (recorded.low, recorded.high) == (None, None)
    assert recorded_overhead({"iteration": 3, **overhead_fields(None)}) is None


def test_the_first_iteration_that_can_have_one() -> None:
    for began_at in (0, 500):
        estimate = OverheadEstimate()
        for age in range(1, FIRST_MEASURED + 1):
            assert estimate.measured() is None
            iteration = began_at + age
            estimate.add(Timed(iteration, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, is_quiet(iteration, began_at)))
        assert estimate.measured() is not None
