"""What an operator is told."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from moevement_core.recovery.account import Account, trace_events
from moevement_core.recovery.outcome import Recovery

RECOVERY = Recovery(
    6, 8, 2, 8, 8, 9, 4, None, 2, {"memory": 2, "peer": 1, "file": 0}, {"0": 0, "1": 2}, 0, {}, 0.0,
    [2, 3], 2_000_000, 0.1,
    0.5, 0.4,
)  # fmt: skip
ACCOUNT = Account(
    generation=3, failures=["rank 1 (pid 7) was killed by signal 9"], noticed_by="the launcher saw the process end",
    failed_at=100.0, interrupted_at=100.1, left_at=100.3, formed_at=100.4, usable_at=101.0, prepared_at=102.0,
    replay_at=102.2, resumed_at=103.0, scope="stage 1 of 2 lost its state; only it rolled back",
    recovery=RECOVERY.as_dict(), effective=0.91234, kept="2 ranks kept their state", spares=1, copies="all are there",
)  # fmt: skip


def test_the_parts_are_in_order_and_add_up() -> None:
    parts = ACCOUNT.parts()
    assert list(parts) == ["detect", "abort", "regroup", "set up and fetch", "enter the loop", "replay"]
    assert sum(parts.values()) == pytest.approx(ACCOUNT.total_s) == pytest.approx(3.0)


def test_the_block_says_everything_once() -> None:
    text = "\n".join(ACCOUNT.lines())
    for what in (
        "recovery 3", "rank 1 (pid 7) was killed by signal 9", "stage 1 of 2", "iteration 6 on (2 from memory, 1 from "
        "peer) to iteration 8", "stage 0: 0, 1: 2; 2.0 MB fed", "= 3.00",
        "up to iteration 8 (9 operators recomputed and compared, 4 restored from checked bytes; what 2 iterations sent",
        "kept      2 ranks kept their state", "ratio 0.912; 1 spares",
    ):  # fmt: skip
        assert text.count(what) == 1, what


def test_what_is_not_known_is_not_claimed() -> None:
    unverified = replace(RECOVERY, verified_until=None).as_dict()
    text = "\n".join(replace(ACCOUNT, recovery=unverified, effective=None).lines())
    assert "not verified" in text
    assert "ratio not known yet" in text
    assert "nothing was replayed" in "\n".join(replace(ACCOUNT, recovery=None).lines())


def test_recoveries_that_were_interrupted_are_part_of_the_one_that_was_not() -> None:
    both = replace(ACCOUNT, earlier=["rank 0 (pid 5) was killed by signal 9"], first_failed_at=96.0)
    assert list(both.parts())[:2] == ["interrupted recoveries", "detect"]
    assert both.parts()["interrupted recoveries"] == pytest.approx(4.0)
    assert sum(both.parts().values()) == pytest.approx(both.total_s) == pytest.approx(7.0)
    text = "\n".join(both.lines())
    assert "before    rank 0 (pid 5) was killed by signal 9; interrupted the recovery from that" in text
    events: list[dict[str, Any]] = [{"event": "failure", "time": 103.0, **both.as_dict()}]
    whole, *parts = trace_events(events)["traceEvents"]
    assert whole["dur"] == pytest.approx(sum(part["dur"] for part in parts)) == pytest.approx(7e6)
    assert len(whole["args"]["failures"]) == 2


def test_clocks_that_disagree_give_no_negative_seconds() -> None:
    assert min(replace(ACCOUNT, interrupted_at=99.0).parts().values()) == 0.0


def test_the_timeline_has_a_slice_for_each_part() -> None:
    events: list[dict[str, Any]] = [
        {"event": "start", "time": 90.0}, {"event": "failure", "time": 103.0, **ACCOUNT.as_dict()},
    ]  # fmt: skip
    shown = trace_events(events)["traceEvents"]
    replayed = next(one for one in shown if one["name"] == "replay")
    assert (replayed["ph"], replayed["ts"], replayed["dur"]) == ("X", pytest.approx(12.2e6), pytest.approx(0.8e6))
    assert [one["name"] for one in shown if one["ph"] == "i"] == ["start"]
