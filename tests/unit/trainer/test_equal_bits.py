"""A replay is refused if its result differs from the lost state, unless different processors explain the difference."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from moevement_core.audit.replicas import compact
from moevement_core.errors import RecoveryError
from moevement_core.policy.partial_experts import LostTokens
from moevement_core.rebuild import verdict
from moevement_core.rebuild.verdict import RankVerdict
from moevement_core.recovery.check import relative_difference
from moevement_core.recovery.plan import RecoveryPlan, Report
from moevement_core.rendezvous.roster import digest_of
from moevement_core.run.outcome import Recovery
from moevement_core.storage.manifest import Manifest
from moevement_core.trainer import equal_bits
from moevement_core.trainer.equal_bits import (
    PlacementHistory,
    arithmetic_of_all,
    why_replay_may_differ,
    why_window_may_differ,
)

DIFFERS = ["state of experts.0 at iteration 5"]
AT_RANK_1 = rf"\brank 1\b.*{re.escape(DIFFERS[0])}"


def recovery() -> Recovery:
    values: dict[str, Any] = {field.name: 0 for field in fields(Recovery)}
    return Recovery(**values | {"sources": {}, "replayed_by_stage": {}, "lost_tokens": {}, "ranks": ()})


PART = RankVerdict(recovery(), LostTokens(), [], False, [])


def agree(monkeypatch: pytest.MonkeyPatch, parts: list[RankVerdict], window: str = "") -> Recovery:
    monkeypatch.setattr(verdict, "all_gather_objects", lambda part, kind: parts)
    monkeypatch.setattr(verdict.dist, "get_rank", lambda: 0)
    return verdict.agree(parts[0], window)


@pytest.mark.parametrize(
    ("parts", "window", "pattern"),
    [
        ([PART, replace(PART, differences=DIFFERS)], "", AT_RANK_1),
        ([PART, replace(PART, differences=DIFFERS, differ_as_loaded=True)], "elsewhere", AT_RANK_1),
        (
            [replace(PART, replicas=compact([("", (0, 1), digest)])) for digest in "xy"], "elsewhere",
            r"\branks 0, 1\b",
        ),
    ],
)  # fmt: skip
def test_what_nothing_explains_is_refused(
    parts: list[RankVerdict], window: str, pattern: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RecoveryError, match=pattern):
        agree(monkeypatch, parts, window)


def test_what_other_processors_explain_is_reported_with_the_largest_difference(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    other = replace(PART, differences=DIFFERS, recovery=replace(recovery(), largest_difference=2.5e-7))
    assert agree(monkeypatch, [PART, other], "window_5 on B").largest_difference == 2.5e-7
    (line,) = caplog.messages
    assert "window_5 on B" in line
    assert f"rank 1: {DIFFERS[0]}" in line
    assert "2.5e-07" in line
    caplog.clear()
    agree(monkeypatch, [PART, PART], "window_5 on B")
    assert not caplog.messages, "they came to the same bits"


@pytest.mark.parametrize(
    ("then", "here", "named"),
    [
        (("A",), ["A", "A", "A"], None),
        (("A", "B"), ["A", "B"], None),
        (("A", "B"), ["B", "A"], ["A", "B"]),
        (("A",), ["A", "B"], ["A", "A", "B"]),
        ((), ["A", "A"], []),
    ],
)
def test_windows_say_where_they_were_written(
    then: tuple[str, ...], here: list[str], named: list[str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(equal_bits, "all_gather_objects", lambda local, kind: here)
    manifest = Manifest("abcd", 3, 5, 5, {"iteration": 5}, {}, then)
    reason = why_window_may_differ(manifest, arithmetic_of_all())
    assert (manifest.name in reason) == bool(reason) == (named is not None)
    assert re.findall(r"\b[AB]\b", reason) == (named or [])


PLAN = RecoveryPlan(first=4, dense_at=6, until=8, begins=4, runs={}, fetches=())
REPORT = Report(0, 0, (), arithmetic="A", placed_since=0)


@pytest.mark.parametrize(
    ("reports", "plan", "is_exact"),
    [
        ([REPORT, REPORT], PLAN, True),
        ([REPORT, replace(REPORT, placed_since=None)], PLAN, True),
        ([REPORT, replace(REPORT, placed_since=4)], PLAN, True),
        ([REPORT, replace(REPORT, placed_since=5)], PLAN, False),
        ([REPORT, replace(REPORT, arithmetic="B")], PLAN, False),
        ([REPORT, replace(REPORT, is_repeatable=False)], PLAN, False),
        ([REPORT, replace(REPORT, is_repeatable=False, placed_since=8)], replace(PLAN, redone_until=8), True),
        ([REPORT, replace(REPORT, placed_since=6)], replace(PLAN, redone_until=6), True),
        ([REPORT, replace(REPORT, placed_since=7)], replace(PLAN, redone_until=6), False),
    ],
)
def test_a_replay_is_exact_on_the_same_processors_in_the_same_places(
    reports: list[Report], plan: RecoveryPlan, is_exact: bool
) -> None:
    assert (why_replay_may_differ(reports, [plan]) == "") is is_exact


def test_placements_are_known_as_far_back_as_they_are_needed() -> None:
    history = PlacementHistory()
    assert history.unchanged_since("x") is None
    history.note(0, "x")
    history.note(10, "x")
    assert history.unchanged_since("x") == 0
    history.note(20, "y")
    assert history.unchanged_since("y") == 20
    assert (history.unchanged_since("x") or 0) > 10**9, "nothing since was computed where ranks are now"
    history.note(15, "z")  # the job resumed an earlier iteration
    history.forget_before(14)
    assert history.unchanged_since("z") == 15
    history.forget_before(15)
    assert len(history._placements) == 1


def test_a_replacement_learns_since_when_ranks_are_where_they_are() -> None:
    """Check that a replacement learns the age of the placement.

    Otherwise the next recovery would assume that earlier iterations were computed elsewhere.
    """
    history = PlacementHistory()
    history.note(14, "x", since=0)
    assert history.unchanged_since("x") == 0
    moved = PlacementHistory()
    moved.note(14, "y", since=10**12)
    assert moved.unchanged_since("y") == 14, "nobody has seen this placement before"
    fresh = PlacementHistory()
    fresh.note(3, "x")
    assert fresh.unchanged_since("x") == 3


def test_a_placement_is_which_rank_has_which_device_of_which_node() -> None:
    nodes, devices = {0: "a", 1: "a", 2: "b"}, {0: "GPU-1", 1: "GPU-2", 2: "GPU-3"}
    same = digest_of(dict(reversed(nodes.items())), devices)
    assert same == digest_of(nodes, devices)
    assert digest_of(nodes | {2: "c"}, devices) != same
    assert digest_of(nodes, devices | {0: "GPU-2", 1: "GPU-1"}) != same


@pytest.mark.parametrize(
    ("actual", "wanted", "difference"),
    [
        ([1.0, -4.0], [1.0, -4.0], 0.0),
        ([1.0, -4.0], [1.5, -4.0], 0.125),
        ([0.0, 0.0], [0.0, 0.0], 0.0),
        ([0.0], [3.0], 1.0),
        ([-3.0], [3.0], 2.0),
        ([float("nan"), 1.0], [float("nan"), 1.0], 0.0),
        ([float("nan"), 1.0], [2.0, 1.0], 2.0),
        ([float("inf"), 1.0], [float("inf"), 2.0], 0.5),
        ([float("inf")], [1.0], 2.0),
        ([], [], 0.0),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_differences_are_relative_to_the_largest_magnitude(
    actual: list[float], wanted: list[float], difference: float, dtype: torch.dtype
) -> None:
    tensors = (torch.tensor(values, dtype=dtype) for values in (actual, wanted))
    assert relative_difference(*tensors) == difference
