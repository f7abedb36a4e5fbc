"""Readers of finished and of growing run directories name each damaged file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from moevement_core.errors import RunRecordError
from moevement_core.monitoring.watched_run import WatchedRun
from moevement_core.run.run_record import RunRecord
from tests.bad_input.command import unnamed, within
from tests.bad_input.damages import CONFIG, DAMAGES, EVENTS, JOB, METRICS, RANKS, STRANGERS, SUMMARY, Damage
from tests.unit.monitoring.runs import recovered_run

LIMIT_S = 20
Read = Callable[[RunRecord], object]


def watch(run: RunRecord) -> object:
    """Read what ``moevement top`` and the metrics endpoint read."""
    watched = WatchedRun(run.folder)
    watched.update()
    return watched.train_iterations


WHOLE: dict[str, Read] = {
    METRICS: RunRecord.metrics, EVENTS: RunRecord.events, SUMMARY: RunRecord.summary, CONFIG: RunRecord.config,
    JOB: RunRecord.job
}  # fmt: skip
WATCHED: dict[str, Read] = dict.fromkeys((METRICS, EVENTS, RANKS, STRANGERS, CONFIG, JOB), watch)
CASES = [(read[damage.file], damage) for read in (WHOLE, WATCHED) for damage in DAMAGES if damage.file in read]


@pytest.mark.parametrize(("read", "damage"), CASES, ids=lambda value: getattr(value, "__name__", str(value)))
def test_damage_is_named(read: Read, damage: Damage, tmp_path: Path) -> None:
    run = recovered_run(tmp_path / "run")
    damage.change(run)
    with within(LIMIT_S), pytest.raises(RunRecordError) as raised:
        read(run)
    text = str(raised.value)
    assert not unnamed(text, [str(run.folder / damage.file), *damage.needs]), text
    assert len(text.splitlines()) == 1


@pytest.mark.parametrize("read", [*WHOLE.values(), watch])
def test_an_undamaged_run_is_read(read: Read, tmp_path: Path) -> None:
    assert read(recovered_run(tmp_path / "run"))
