"""What an operator is told."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from moevement_core.recovery.account import PARTS, Account, trace_events
from moevement_core.recovery.outcome import Recovery

RECOVERY = Recovery(
    6, 8, 2, 8, 8, 9, 4, 0.0, None, 2, {"memory": 2, "peer": 1, "file": 0}, {"0": 0, "1": 2}, 0, {}, 0.0,
    [2, 3], 2_000_000, 0.1,
    0.5, 0.4,
)  # fmt: skip
ACCOUNT = Account(
    generation=3, failures=["rank 1 (pid 7) was killed by signal 9"], noticed_by="the launcher saw the process end",
    failed_at=100.0, interrupted_at=100.1, left_at=100.3, formed_at=100.4, usable_at=101.0, prepared_at=102.0,
    replay_at=102.2, resumed_at=103.0, scope="stage 1 of 2 lost its state; only it rolled back",
    recovery=RECOVERY.as_dict(), effective=0.91234, kept="2 ranks kept their state", spares=1, copies="all are there",
)  # fmt: skip


def texts_of(account: Account) -> dict[str, str]:
    """The lines of the block, by the name that each one begins with."""
    return {line[2:11].strip(): line[11:].strip() for line in account.lines()[1:]}


def test_the_parts_are_in_order_and_add_up() -> None:
    parts = ACCOUNT.parts()
    assert list(parts) == list(PARTS[1:])
    assert sum(parts.values()) == pytest.approx(ACCOUNT.total_s) == pytest.approx(3.0)


def test_the_block_says_everything_once() -> None:
    text = "\n".join(ACCOUNT.lines())
    for what in (
        r"\brecovery 3\b", re.escape(ACCOUNT.failures[0]), re.escape(ACCOUNT.scope), re.escape(ACCOUNT.kept),
        r"\biteration 6\b.*?\b2\b.*?\bmemory\b.*?\b1\b.*?\bpeer\b.*?\biteration 8\b",
        r"\bstage 0: 0, 1: 2\b.*?\b2\.0 MB\b",
        r"= 3\.00\b", r"\biteration 8\b.*?\b9 operators\b.*?\b4\b.*?\b2 iterations\b", r"\b0\.912\b.*?\b1 spares?\b",
    ):  # fmt: skip
        assert len(re.findall(what, text)) == 1, what
    assert texts_of(ACCOUNT)["kept"] == ACCOUNT.kept


def test_how_ranks_left_is_told_where_it_is_known() -> None:
    left = replace(ACCOUNT, leaving={"shut_down": 0.021, "abort": 41.5}, free_bytes=31_400_000_000)
    assert re.findall(r"\d+\.\d+", texts_of(left)["left"]) == ["0.02", "41.50", "31.4"]
    assert (left.as_dict()["leaving"]["abort"], left.as_dict()["free_bytes"]) == (41.5, 31_400_000_000)
    assert "left" not in texts_of(ACCOUNT)


def test_what_is_not_known_is_not_claimed() -> None:
    unverified = replace(RECOVERY, verified_until=None).as_dict()
    texts = texts_of(replace(ACCOUNT, recovery=unverified, effective=None))
    assert "not verified" in texts["verified"]
    assert re.findall(r"\d+", texts["so far"]) == [str(ACCOUNT.spares)]
    assert re.search(r"^\D+$", texts_of(replace(ACCOUNT, recovery=None))["verified"])


def test_recoveries_that_were_interrupted_are_part_of_the_one_that_was_not() -> None:
    both = replace(ACCOUNT, earlier=["rank 0 (pid 5) was killed by signal 9"], first_failed_at=96.0)
    assert list(both.parts())[:2] == ["interrupted recoveries", "detect"]
    assert both.parts()["interrupted recoveries"] == pytest.approx(4.0)
    assert sum(both.parts().values()) == pytest.approx(both.total_s) == pytest.approx(7.0)
    assert both.earlier[0] in texts_of(both)["before"]
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
