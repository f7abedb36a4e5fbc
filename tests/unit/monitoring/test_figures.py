"""Figures of a run agree with its record, also while the record grows and when a run resumes into it."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from moevement_core.errors import RunRecordError
from moevement_core.monitoring.tail import Tail
from moevement_core.monitoring.watched_run import WatchedRun
from moevement_core.run.account import PARTS
from moevement_core.run.figures import FIGURES, FigureKind, RunFigures
from moevement_core.run.run_record import RunRecord
from scripts import metrics_table
from tests.unit.monitoring.runs import append, failure, line, recovered_run


def values(run: WatchedRun) -> dict[str, float]:
    run.update()
    return {sample.figure.name + (f"/{sample.label}" if sample.label else ""): sample.value for sample in run.samples()}


def test_the_table_of_metrics_is_up_to_date() -> None:
    assert metrics_table.OUTPUT.read_text(encoding="utf-8") == metrics_table.table(), (
        "run: python scripts/metrics_table.py"
    )


def test_names_are_unlike_and_end_in_their_base_unit() -> None:
    assert len({figure.exported_name for figure in FIGURES}) == len(FIGURES)
    tags = [figure.tag for figure in FIGURES if figure.tag]
    assert len(set(tags)) == len(tags)
    for figure in FIGURES:
        if figure.unit in ("seconds", "bytes"):
            assert figure.name.endswith(figure.unit)
        assert not figure.name.endswith("_total"), "it is appended"


def test_figures_are_those_of_the_record(tmp_path: Path) -> None:
    recovered_run(tmp_path)
    has = values(WatchedRun(tmp_path))
    assert (has["iteration"], has["loss"]) == (10, pytest.approx(2.0))
    assert (has["copied_bytes"], has["stall_seconds"]) == (10_000, 2.5), "of all iterations"
    assert (has["windows_abandoned"], has["disk_written_bytes"]) == (1, 7000), "the record has sums of these"
    assert (has["processes/active"], has["processes/spare"], has["nodes"]) == (4, 1, 2)
    assert (has["recoveries"], has["replayed_iterations"], has["warnings"]) == (1, 2, 1)
    assert has["last_recovery_seconds/replay"] == has["recovery_seconds/replay"] == 1.5
    assert has["effective_training_time_ratio"] == pytest.approx(10 / 16)
    assert has.keys() == {
        *(figure.name for figure in FIGURES if figure.label is None and figure.name != "expert_imbalance"),
        "processes/active", "processes/spare",
        *(f"last_recovery_seconds/{part}" for part in failure().parts()),
        *(f"recovery_seconds/{part}" for part in PARTS),
    }  # fmt: skip


def test_what_is_not_known_is_left_out(tmp_path: Path) -> None:
    assert {name: value for name, value in values(WatchedRun(tmp_path / "none")).items() if value} == {}
    figures = RunFigures()
    figures.take_line({"iteration": 1, "loss": 3.0, "persisted_from": None, "iteration_s": None})
    names = {sample.figure.name for sample in figures.samples() if sample.figure.kind is FigureKind.GAUGE}
    assert names == {"iteration", "loss"}


def test_a_loss_that_is_no_number_is_seen() -> None:
    figures = RunFigures()
    figures.take_line(line(1, "nan"))
    (loss,) = [sample.value for sample in figures.samples() if sample.figure.name == "loss"]
    assert math.isnan(loss)


def test_a_recovered_iteration_says_nothing_of_checkpoints() -> None:
    figures = RunFigures()
    figures.take_line(line(1))
    figures.take_line({"iteration": 2, "loss": 1.0, "iteration_s": None, "recovered": True, "time": 1_000_003.0})
    has = {sample.figure.name: sample.value for sample in figures.samples()}
    assert (has["iteration"], has["loss"], has["window_iterations"], has["copied_bytes"]) == (2, 1.0, 3, 1000)


def test_a_record_is_followed_while_it_grows(tmp_path: Path) -> None:
    run = recovered_run(tmp_path, has_ended=False)
    watched = WatchedRun(tmp_path)
    assert values(watched)["recoveries"] == 1
    append(run.metrics_path, line(11, time=1_000_017.0))
    run.event(failure(2))
    has = values(watched)
    assert (has["iteration"], has["copied_bytes"], has["recoveries"]) == (11, 11_000, 2)
    assert not watched.has_ended


def test_a_run_that_resumes_is_counted_from_its_record_alone(tmp_path: Path) -> None:
    """Check that a resumed run removes the lines of repeated iterations, and that the figures exclude them."""
    run = recovered_run(tmp_path)
    watched = WatchedRun(tmp_path)
    assert values(watched)["copied_bytes"] == 10_000
    run.begin({}, first_iteration=5)
    run.metric(**line(5))
    has = values(watched)
    assert (has["iteration"], has["copied_bytes"], has["recoveries"]) == (5, 5000, 1)


def test_a_line_whose_end_is_missing_is_left_for_later(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_text('{"a": 1}\n{"a": ')
    tail = Tail(path)
    assert tail.read().lines == [{"a": 1}]
    with path.open("a") as file:
        file.write("2}\n")
    news = tail.read()
    assert (news.lines, news.is_rewritten) == ([{"a": 2}], False)
    assert tail.read().lines == []


def test_a_damaged_line_is_an_error(tmp_path: Path) -> None:
    run = recovered_run(tmp_path)
    with run.metrics_path.open("a") as file:
        file.write("[1]\n")
    with pytest.raises(RunRecordError, match=r"\bmetrics\.jsonl\b.*\[1\]"):
        WatchedRun(tmp_path).update()


def test_tensorboard_has_shares_of_iterations_and_all_of_recoveries(tmp_path: Path) -> None:
    has = dict(recovered_run(tmp_path).figures.scalars())
    assert (has["moevement/loss"], has["moevement/copied_bytes"]) == (pytest.approx(2.0), 1000)
    assert (has["moevement/recoveries"], has["moevement/last_recovery_seconds/replay"]) == (1, 1.5)
    assert has["moevement/effective_training_time_ratio"] == pytest.approx(10 / 16)
    documented = {figure.tag for figure in FIGURES if figure.tag} - {"moevement/expert_imbalance"}
    assert {tag if tag in documented else tag.rsplit("/", 1)[0] for tag in has} == documented


def test_who_goes_on_with_a_record_counts_from_what_is_there(tmp_path: Path) -> None:
    recovered_run(tmp_path, has_ended=False)
    another = RunRecord(tmp_path)
    another.begin({}, first_iteration=9)
    another.metric(**line(9))
    assert (another.figures.iterations, len(another.figures.recoveries)) == (9, 1)
