"""The table in docs/events.md is up to date, and every kind of event is unique."""

from __future__ import annotations

import json
from pathlib import Path

from moevement_core.run import events
from moevement_core.run.account import Account
from moevement_core.run.outcome import Recovery
from moevement_core.run.run_record import RunRecord
from scripts import events_table


def test_the_table_of_events_is_up_to_date() -> None:
    assert events_table.OUTPUT.read_text(encoding="utf-8") == events_table.table(), (
        "run: python scripts/events_table.py"
    )


def test_every_kind_is_another() -> None:
    kinds = [kind.kind for kind in (*events.PLAIN, Recovery, Account)]
    assert len(set(kinds)) == len(kinds)


def test_every_event_has_a_section() -> None:
    classes = {
        kind for kind in vars(events).values() if isinstance(kind, type) and isinstance(vars(kind).get("kind"), str)
    }
    assert classes == set(events.PLAIN)


def test_a_record_has_kind_time_and_fields(tmp_path: Path) -> None:
    record = RunRecord(tmp_path)
    record.begin({}, first_iteration=1)
    record.event(events.Evaluated("validation", 3, 1.5))
    (line,) = [json.loads(text) for text in record.events_path.read_text().splitlines()]
    assert line.pop("time") > 0
    assert line == {"event": "evaluation", "set": "validation", "iteration": 3, "loss": 1.5}
