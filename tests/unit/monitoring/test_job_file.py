"""The file ``job.json`` records how a job was launched, and how it ended."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from moevement_core.errors import ConfigError
from moevement_core.launching.job_file import JobFile, JobOutcome
from moevement_core.launching.signals import Stopped
from moevement_core.run.job_entry import JobEntry
from moevement_core.run.run_record import RunRecord
from moevement_core.util.process_identity import start_of


def entry() -> JobEntry:
    return JobEntry.of_this_process("moevement launch train.py", 4, 1)


def test_the_entry_has_what_a_report_needs(tmp_path: Path) -> None:
    record = RunRecord(tmp_path / "deep" / "run")
    with JobFile(record, entry()) as file:
        running = record.job()
        file.outcome = JobOutcome(0)
    assert running is not None
    assert (running.ended_at, running.code, running.is_abandoned) == (None, None, False)
    assert running.versions["torch"].startswith("2.")
    assert "cores" in running.hardware
    ended = record.job()
    assert ended is not None
    assert ended == replace(running, ended_at=ended.ended_at, code=0)
    assert ended.ended_at is not None
    assert ended.ended_at >= ended.began_at


@pytest.mark.parametrize(
    ("error", "code", "reason"),
    [
        (Stopped(15), 143, "stopped by SIGTERM"), (Stopped(2), 130, "stopped by Ctrl-C"), (ConfigError("a"), 2, "a"),
        (ValueError("b"), 1, "ValueError: b"),
    ],
)  # fmt: skip
def test_what_ends_a_job_is_kept(error: BaseException, code: int, reason: str, tmp_path: Path) -> None:
    record = RunRecord(tmp_path)
    with pytest.raises(type(error)), JobFile(record, entry()):
        raise error
    written = record.job()
    assert written is not None
    assert (written.code, written.reason) == (code, reason)


def test_the_entry_of_a_job_that_trains_is_left_alone(tmp_path: Path) -> None:
    """Check a coordinator, which may write its entry only when its own job has begun to train."""
    record, other = RunRecord(tmp_path), entry()
    record.write_job(other)
    with JobFile(record, entry(), begins=False) as file:
        file.outcome = JobOutcome(2, "refused")
    assert record.job() == other
    with JobFile(record, replace(entry(), command="mine"), begins=False) as file:
        file.begin()
        file.outcome = JobOutcome(0)
    written = record.job()
    assert written is not None
    assert (written.command, written.code) == ("mine", 0)


def test_a_refused_launch_leaves_the_entry_of_the_finished_job(tmp_path: Path) -> None:
    """Check that a launch replaces the entry only if its job has trained."""
    record, finished = RunRecord(tmp_path), replace(entry(), command="finished", code=0)
    record.begin({}, first_iteration=1)
    record.metric(iteration=1, loss=2.0)
    record.write_job(finished)
    with pytest.raises(ConfigError), JobFile(record, replace(entry(), command="refused")):
        raise ConfigError("a flag")
    assert record.job() == finished
    with JobFile(record, replace(entry(), command="trained")) as file:
        record.metric(iteration=2, loss=2.0)
        file.outcome = JobOutcome(2, "found later")
    written = record.job()
    assert written is not None
    assert (written.command, written.code) == ("trained", 2)


def test_a_job_whose_launcher_was_killed_is_abandoned(tmp_path: Path) -> None:
    launcher = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    job = replace(entry(), pid=launcher.pid, started=start_of(launcher.pid) or "")
    assert not job.is_abandoned
    launcher.kill()
    launcher.communicate()
    assert job.is_abandoned
    assert not replace(job, ended_at=1.0, code=0).is_abandoned
    assert not replace(job, machine="another").is_abandoned


def test_a_run_directory_that_cannot_be_made_is_no_error_of_the_entry() -> None:
    with JobFile(RunRecord(Path("/proc/none/run")), entry()) as file:
        file.outcome = JobOutcome(0)
