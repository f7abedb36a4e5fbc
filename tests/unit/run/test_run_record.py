"""The run directory: whole lines, one per iteration, a summary only at the end."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from unittest.mock import Mock

import pytest

from moevement_cli.main import main
from moevement_core.errors import RunRecordError
from moevement_core.run import run_record
from moevement_core.run.events import Evaluated
from moevement_core.run.run_record import RunRecord
from moevement_core.run.verify import compare
from moevement_core.util.lock import LOCK, Holder, acquire


def record(folder: Path, losses: dict[int, float], **summary: object) -> RunRecord:
    run = RunRecord(folder)
    run.begin({"seed": 1}, first_iteration=1)
    for iteration, loss in losses.items():
        run.metric(iteration=iteration, loss=loss, grad_norm=1.5, learning_rate=0.1, loss_scale=1.0, skipped=False)
    parts = {"weights": "a", "rng": "b"}
    run.write_summary({"state_digest": {"all": "x", "parts": parts, "ranks": [parts, parts]}, **summary})
    return run


def test_a_run_resumed_from_an_earlier_iteration_has_each_line_once(tmp_path: Path) -> None:
    run = record(tmp_path, {1: 3.0, 2: 2.0, 3: 1.0})
    run.begin({}, first_iteration=3)
    run.metric(iteration=3, loss=1.0)
    assert [line["iteration"] for line in run.metrics()] == [1, 2, 3]
    with pytest.raises(RunRecordError, match=r"\bsummary\.json\b"):
        run.summary()


def test_a_torn_last_line_is_skipped_and_a_torn_middle_is_an_error(tmp_path: Path) -> None:
    run = record(tmp_path, {1: 3.0, 2: 2.0})
    with run.metrics_path.open("a") as file:
        file.write('{"iteration": 3, "lo')
    assert [line["iteration"] for line in run.metrics()] == [1, 2]
    with run.metrics_path.open("a") as file:
        file.write('\n{"iteration": 4}\n')
    with pytest.raises(RunRecordError, match=r"\bmetrics\.jsonl\b.*\bline 3\b"):
        run.metrics()


def test_the_newest_line_is_found_without_reading_the_others(tmp_path: Path) -> None:
    run = RunRecord(tmp_path)
    assert run.newest_metric() is None
    record(tmp_path, {iteration: 1.0 for iteration in range(1, 1001)})
    with run.metrics_path.open("a") as file:
        file.write('{"iteration": 1001, "lo')
    newest = run.newest_metric()
    assert newest is not None
    assert newest["iteration"] == 1000
    with run.metrics_path.open("a") as file:
        file.write('ss": 1.0}\n{"step": 3, "accuracy": 0.5}\n')
    assert run.newest_metric() is None  # A script writes to a file of the same name.


@pytest.mark.parametrize("first", [1, 2, 700, 1001])
def test_a_record_is_taken_over_from_any_iteration(first: int, tmp_path: Path) -> None:
    record(tmp_path, {iteration: 1.0 for iteration in range(1, 1001)})
    run = RunRecord(tmp_path)
    with run.metrics_path.open("a") as file:
        file.write('{"iteration": 1001, "lo')
    before = run.config_path.read_text()
    run.take_over(first_iteration=first)
    run.metric(iteration=first, loss=2.0)
    assert [line["iteration"] for line in run.metrics()] == list(range(1, first + 1))
    assert (run.figures.line["loss"], run.config_path.read_text()) == (2.0, before)
    with pytest.raises(RunRecordError, match=r"\bsummary\.json\b"):
        run.summary()


def test_only_the_end_of_a_long_record_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record(tmp_path, {iteration: 1.0 for iteration in range(1, 3001)})
    parse = Mock(side_effect=json.loads)
    monkeypatch.setattr(run_record.json, "loads", parse)
    RunRecord(tmp_path).take_over(first_iteration=2990)
    assert 10 <= parse.call_count < 300


@pytest.mark.parametrize("damaged", ["[]\n", "{\n", '{"iteration": "x"}\n', "\0\0\n"])
def test_a_record_with_a_damaged_end_is_not_taken_over(damaged: str, tmp_path: Path) -> None:
    run = record(tmp_path, {1: 3.0, 2: 2.0})
    with run.metrics_path.open("a") as file:
        file.write(damaged)
    with pytest.raises(RunRecordError, match=r"\bmetrics\.jsonl\b"):
        RunRecord(tmp_path).take_over(first_iteration=3)


def test_a_record_without_lines_is_taken_over(tmp_path: Path) -> None:
    run = RunRecord(tmp_path)
    run.take_over(first_iteration=3)
    run.metric(iteration=3, loss=1.0)
    assert [line["iteration"] for line in run.metrics()] == [3]


@pytest.mark.parametrize(
    ("content", "pattern"),
    [
        (None, r"/run\b(?!/)"),
        ("{", r"/run/summary\.json\b.*\bJSON\b"),
        ("{}", r"/run/summary\.json\b.*\bstate_digest\b"),
        ('{"state_digest": 1}', r"/run/summary\.json\b.*\bstate_digest\b"),
    ],
)
def test_a_summary_that_cannot_be_used_says_why(content: str | None, pattern: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    if content is not None:
        folder.mkdir()
        (folder / "summary.json").write_text(content)
    with pytest.raises(RunRecordError, match=pattern):
        RunRecord(folder).summary()


def test_equal_runs_are_equal(tmp_path: Path) -> None:
    a, b = record(tmp_path / "a", {1: 3.0, 2: 2.0}), record(tmp_path / "b", {1: 3.0, 2: 2.0})
    assert compare(a, b).equal


@pytest.mark.parametrize(
    ("losses", "compared", "difference"),
    [
        ({1: 3.0, 2: 2.0000000000000004}, 2, r"\biteration 2\b.*\bloss\b.*\b2\.0\b.*\b2\.0000000000000004\b"),
        ({1: 3.0}, 1, r"\biteration 2\b.*/a\b"),
        ({1: 3.0, 2: 2.0, 3: 1.0}, 2, r"\biteration 3\b.*/b\b"),
        ({7: 1.0}, 0, r"\biteration\b(?! \d)"),
    ],
)
def test_the_first_difference_is_named(
    losses: dict[int, float], compared: int, difference: str, tmp_path: Path
) -> None:
    a, b = record(tmp_path / "a", {1: 3.0, 2: 2.0}), record(tmp_path / "b", losses)
    verdict = compare(a, b)
    assert not verdict.equal
    assert verdict.iterations_compared == compared
    assert re.search(difference, verdict.first_difference or "")


def test_a_resumed_run_can_be_compared_where_it_overlaps(tmp_path: Path) -> None:
    a, b = record(tmp_path / "a", {1: 3.0, 2: 2.0}), record(tmp_path / "b", {2: 2.0})
    assert not compare(a, b).equal
    verdict = compare(a, b, common_iterations=True)
    assert verdict.equal
    assert verdict.iterations_compared == 1


def test_a_difference_in_the_final_state_names_part_and_rank(tmp_path: Path) -> None:
    a, b = record(tmp_path / "a", {1: 3.0}), record(tmp_path / "b", {1: 3.0})
    summary = json.loads(b.summary_path.read_text())
    summary["state_digest"] |= {"all": "y", "parts": {"weights": "a", "rng": "c"}}
    summary["state_digest"]["ranks"][1] = {"weights": "a", "rng": "c"}
    b.write_summary(summary)
    verdict = compare(a, b)
    assert re.search(r"\brng\b.*\brank 1\b", verdict.first_difference or "")
    assert verdict.parts == {"weights": True, "rng": False}


def test_two_jobs_in_one_directory_are_no_run(tmp_path: Path) -> None:
    a, b = record(tmp_path / "a", {1: 3.0, 2: 2.0, 3: 1.0}), record(tmp_path / "b", {1: 3.0, 2: 2.0, 3: 1.0})
    for iteration in (2, 3):
        b.metric(iteration=iteration, loss=3.0 - iteration)
    for runs in ((a, b), (b, a), (b, b)):
        with pytest.raises(RunRecordError, match=r"/b/metrics\.jsonl\b.*\b2\b.*\b2, 3\b"):
            compare(*runs)
    same = record(tmp_path / "same", {1: 3.0, 2: 2.0, 3: 1.0})
    assert main(["verify", str(a.folder), str(same.folder)]) == 0
    with pytest.raises(SystemExit) as caught:
        main(["verify", str(a.folder), str(b.folder)])
    assert caught.value.code == 2


def test_a_run_whose_directory_another_job_has_taken_over_writes_nothing_more(tmp_path: Path) -> None:
    lock = acquire(tmp_path, "aaaa", "--run-dir", beat_s=0.02)
    run = RunRecord(tmp_path, lock)
    run.begin({}, first_iteration=1)
    run.metric(iteration=1)
    deadline = time.monotonic() + 10
    while lock.lost is None:  # a beat of this job may overwrite the other holder
        (tmp_path / LOCK).write_bytes(Holder.of_this_process("bbbb").encode())
        assert time.monotonic() < deadline
        time.sleep(0.01)
    run.metric(iteration=2)
    run.event(Evaluated("validation", 1, 2.0))
    assert [line["iteration"] for line in run.metrics()] == [1]
    assert not run.events()
    with pytest.raises(RunRecordError, match=r"\bbbbb\b"):
        run.write_summary({})


@pytest.mark.parametrize("torn", ['{"iteration": 2, "lo', '{"iteration": 2, "loss": 1.0}'])
def test_a_line_after_a_torn_one_begins_a_line_of_its_own(tmp_path: Path, torn: str) -> None:
    """Leave a torn line, as a killed writer does; the next writer is another process."""
    RunRecord(tmp_path).metric(iteration=1, loss=2.0)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(torn)
    assert RunRecord(tmp_path).metrics()[0]["iteration"] == 1
    RunRecord(tmp_path).metric(iteration=3, loss=1.0)
    assert [line["iteration"] for line in RunRecord(tmp_path).metrics()] == [1, 3]


def test_a_file_of_one_torn_line_is_begun_again(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"itera')
    assert RunRecord(tmp_path).metrics() == []
    RunRecord(tmp_path).metric(iteration=1, loss=2.0)
    assert [line["iteration"] for line in RunRecord(tmp_path).metrics()] == [1]
