"""Tests of the report on a recovery that an operator reads, and of its timeline."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from moevement_core.run.account import PARTS, Account, trace_events
from moevement_core.run.outcome import Recovery
from moevement_core.session.failure_report import _effective

RECOVERY = Recovery(
    6, 8, 2, 8, 8, 9, 4, 0.0, None, 2, {"memory": 2, "peer": 1, "file": 0}, {"0": 0, "1": 2}, 0, {}, 0.0, 0.0,
    [2, 3], 2_000_000, 0.1,
    0.5, 0.4,
)  # fmt: skip
ACCOUNT = Account(
    generation=3, failures=["rank 1 (pid 7) was killed by signal 9"], noticed_by="the launcher saw the process end",
    failed_at=100.0, interrupted_at=100.1, left_at=100.3, formed_at=100.4, usable_at=101.0, prepared_at=102.0,
    replay_at=102.2, resumed_at=103.0, scope="stage 1 of 2 lost its state; only it rolled back",
    recovery=RECOVERY.as_dict(), effective=0.91234, kept="2 ranks kept their state", spares=1, copies="complete",
    survivors="2 of 2 checked",
)  # fmt: skip


def texts_of(account: Account, *, is_verbose: bool = False) -> dict[str, str]:
    """Return the lines of the report, by the label that each line begins with."""
    return {line[2:11].strip(): line[11:].strip() for line in account.lines(is_verbose=is_verbose)[1:]}


def test_the_parts_are_in_order_and_add_up() -> None:
    parts = ACCOUNT.parts()
    assert list(parts) == list(PARTS[1:])
    assert sum(parts.values()) == pytest.approx(ACCOUNT.total_s) == pytest.approx(3.0)


def test_the_block_says_everything_once() -> None:
    texts = texts_of(ACCOUNT)
    assert list(texts) == [
        "failed", "noticed", "scope", "restored", "replayed", "seconds", "", "verified", "survivors", "copies",
        "spares", "ETTR",
    ]  # fmt: skip
    assert (texts["failed"], texts["scope"]) == (*ACCOUNT.failures, ACCOUNT.scope)
    assert re.findall(r"\w*memory|peer|\d+", texts["restored"]) == ["8", "6", "2", "memory", "1", "peer"]
    assert re.findall(r"\d+", texts["replayed"]) == ["2", "2", "1"]
    assert re.findall(r"[\d.]+", texts[""]) == ["3.00"]
    assert re.findall(r"\d+", texts["verified"]) == ["13", "9", "4", "2"]
    assert (texts["survivors"], texts["copies"]) == (ACCOUNT.survivors, ACCOUNT.copies)
    assert texts["spares"] == "1 ready"
    assert texts["ETTR"].split()[0] == "91.2%"


def test_ettr_counts_from_the_beginning_of_the_first_iteration() -> None:
    assert _effective(10, 2.0, 120.0, first_committed_at=100.0) == pytest.approx(20 / 22)
    assert _effective(11, 2.0, 120.0, first_committed_at=100.0) == 1.0
    assert _effective(12, 2.0, 120.0, first_committed_at=100.5) == 1.0, "the coordinator hears of a commit later"
    assert [_effective(0, 2.0, 120.0, 100.0), _effective(9, 0.0, 120.0, 100.0), _effective(9, 2.0, 120.0, None)] == [
        None, None, None,
    ]  # fmt: skip


def test_spares_that_start_are_counted() -> None:
    assert texts_of(replace(ACCOUNT, spares=0, starting=1))["spares"] == "0 ready, 1 starting"


def test_details_are_told_where_they_are_asked_for() -> None:
    left = replace(ACCOUNT, leaving={"shut_down": 0.021, "abort": 41.5}, free_bytes=31_400_000_000)
    texts = texts_of(left, is_verbose=True)
    assert re.findall(r"\d+\.\d+", texts["leaving"]) == ["0.02", "41.50", "31.4"]
    assert (texts["survivors"], texts["fed"].split()[0]) == (ACCOUNT.kept, "2.0")
    assert (left.as_dict()["leaving"]["abort"], left.as_dict()["free_bytes"]) == (41.5, 31_400_000_000)
    assert not texts_of(left).keys() & {"leaving", "fed"}


def test_what_the_state_is_known_by_is_named() -> None:
    def verified(**fields: Any) -> str:
        return texts_of(replace(ACCOUNT, recovery=replace(RECOVERY, **fields).as_dict()))["verified"]

    assert "1.0e-07" in verified(largest_difference=1e-7)
    assert "bits" not in verified(largest_difference=1e-7)
    assert verified(verified_until=7).endswith("iteration 7")
    assert "bits" in verified()


def test_what_is_not_known_is_not_claimed() -> None:
    unverified = replace(RECOVERY, verified_until=None).as_dict()
    texts = texts_of(replace(ACCOUNT, recovery=unverified, effective=None))
    assert "not verified" in texts["verified"]
    assert "ETTR" not in texts
    assert re.search(r"^\D+$", texts_of(replace(ACCOUNT, recovery=None))["verified"])


def test_recoveries_that_were_interrupted_are_part_of_the_one_that_was_not() -> None:
    both = replace(ACCOUNT, earlier=["rank 0 (pid 5) was killed by signal 9"], first_failed_at=96.0)
    assert list(both.parts())[:2] == ["interrupted recoveries", "detect"]
    assert both.parts()["interrupted recoveries"] == pytest.approx(4.0)
    assert sum(both.parts().values()) == pytest.approx(both.total_s) == pytest.approx(7.0)
    assert both.earlier[0] in texts_of(both)["before"]
    events: list[dict[str, Any]] = [{"event": "failure", "time": 103.0, **both.as_dict()}]
    whole, *parts = (event for event in trace_events(events)["traceEvents"] if event["ph"] == "X")
    assert whole["dur"] == pytest.approx(sum(part["dur"] for part in parts)) == pytest.approx(7e6)
    assert len(whole["args"]["failures"]) == 2


def test_clocks_that_disagree_give_no_negative_seconds() -> None:
    assert min(replace(ACCOUNT, interrupted_at=99.0).parts().values()) == 0.0


def test_the_timeline_has_a_slice_for_each_part() -> None:
    events: list[dict[str, Any]] = [
        {"event": "start", "time": 90.0}, {"event": "failure", "time": 103.0, **ACCOUNT.as_dict()},
    ]  # fmt: skip
    shown = trace_events(events)["traceEvents"]
    replayed = next(event for event in shown if event["name"] == "replay")
    assert (replayed["ph"], replayed["ts"], replayed["dur"]) == ("X", pytest.approx(12.2e6), pytest.approx(0.8e6))
    assert [event["name"] for event in shown if event["ph"] == "i"] == ["start"]


def test_windows_have_a_row_of_the_timeline_to_themselves() -> None:
    events: list[dict[str, Any]] = [
        {"event": "start", "time": 90.0}, {"event": "window", "time": 91.0},
        {"event": "failure", "time": 103.0, **ACCOUNT.as_dict()},
    ]  # fmt: skip
    shown = trace_events(events)["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in shown if event["ph"] == "M"}
    rows = [(event["name"], names[event["tid"]]) for event in shown if event["ph"] != "M"]
    assert [name for name, row in rows if row == "windows"] == ["window"]
    assert len(names) == len(set(names.values())) == 4
