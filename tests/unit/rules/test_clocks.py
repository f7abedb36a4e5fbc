"""The wall clock may jump, so the engine only records it, and neither waits nor measures by it."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

import moevement_core
from moevement_core.run.progress import Progress
from moevement_core.run.run_record import RunRecord

TIMES = {
    "util/lock.py": 1,  # time at which a process took a folder, for people
    "log.py": 1,
    "run/job_entry.py": 1,
    "launching/job_file.py": 1,
    "run/run_record.py": 1,
    "session/run_directory.py": 1,
    # Times of a recovery on several hosts, for its report: failure noticed, ranks left, groups usable, and so on.
    "session/meeting.py": 1,
    "session/rejoin.py": 3,
    "session/resize.py": 2,
    "rendezvous/member.py": 1,
    "rendezvous/coordinator.py": 2,  # times of rosters and of the first commit, for reports and ETTR
    "rendezvous/losses.py": 1,
    "restart/generation.py": 1,
    # Seconds since the last eviction in the record, which another process may have asked for. A clock that is set wrong
    # makes the next eviction come early or late.
    "session/speed_watch.py": 1,
    # Begin of a trace of failures, which is the same on all hosts, and the time since the begin.
    "restart/injection.py": 3,
}
"""Number of reads of the wall clock in each file. A read is a mistake unless people read the time."""


def test_the_wall_clock_is_looked_at_for_times_alone() -> None:
    root = Path(moevement_core.__file__).parent
    reads = {
        str(path.relative_to(root)): count
        for path in sorted(root.rglob("*.py"))
        if (count := len(re.findall(r"\btime\.time(?:_ns)?\(|datetime\.now\(", path.read_text(encoding="utf-8"))))
    }
    assert reads == TIMES


def test_progress_is_shown_when_the_clock_has_been_put_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    RunRecord(tmp_path).metric(iteration=7, loss=1.0)  # a line of an earlier run
    with Progress(tmp_path, 9) as progress:
        progress.update()
        assert not progress._last
        real = time.time
        monkeypatch.setattr(time, "time", lambda: real() - 1e6)
        record = RunRecord(tmp_path)
        record.begin({}, first_iteration=1)
        record.metric(iteration=1, loss=2.0)
        progress.update()
    assert "iteration 1/9, loss 2.000" in capsys.readouterr().out
