"""Phases in which a rank leaves a generation: how long each takes, and when the coordinator gets reports."""

from __future__ import annotations

from moevement_core.restart.leaving import Leaving, LeavingPhase


class Clock:
    """Clock that advances only by :meth:`passes`."""

    now = 100.0

    def __call__(self) -> float:
        return self.now

    def passes(self, seconds: float) -> None:
        self.now += seconds


def test_phases_that_begin_late_are_reported_and_all_are_counted() -> None:
    clock, reported = Clock(), list[LeavingPhase]()
    leaving = Leaving(10.0, reported.append, clock)
    for phase, seconds in zip(LeavingPhase, (0.5, 5.0, 90.0, 1.0, 2.0), strict=True):
        leaving.begin(phase)
        clock.passes(seconds)
    leaving.end()
    assert leaving.seconds == dict(zip(map(str, LeavingPhase), (0.5, 5.0, 90.0, 1.0, 2.0), strict=True))
    assert reported == [LeavingPhase.UNWIND, LeavingPhase.COLLECT]


def test_a_report_that_fails_does_not_keep_a_rank_from_leaving() -> None:
    clock = Clock()

    def fail(phase: LeavingPhase) -> None:
        raise RuntimeError("the store is gone")

    leaving = Leaving(1.0, fail, clock)
    leaving.begin(LeavingPhase.SHUT_DOWN)
    clock.passes(2.0)
    leaving.begin(LeavingPhase.DRAIN)
    leaving.end()
    assert leaving.seconds == {"shut_down": 2.0, "drain": 0.0}
