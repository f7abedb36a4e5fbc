"""Records and output that cannot be written: the job reports the failure once and goes on."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from moevement_core.errors import RunRecordError
from moevement_core.run.events import Started
from moevement_core.run.run_record import RunRecord
from tests.bad_input.command import Reason, unnamed
from tests.unit.monitoring.runs import line

LIMIT_S = 60


@pytest.fixture
def tiny(tmp_path: Path) -> Iterator[Path]:
    """Yield the folder of a file system of 64 kB."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip("needs the right to mount a file system")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def fill(folder: Path) -> Path:
    """Fill a file system; return the file that takes its last bytes."""
    path = folder / "filler"
    with path.open("wb", buffering=0) as file:
        try:
            while file.write(bytes(512)):
                pass
        except OSError:
            return path
    raise AssertionError("the file system never was full")


def test_a_full_disk_is_said_once_and_leaves_whole_lines(tiny: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = RunRecord(tiny / "run")
    run.begin({"seed": 1}, first_iteration=1)
    for iteration in range(1, 4):
        run.metric(**line(iteration))
    filler = fill(tiny)
    for iteration in range(4, 60):
        run.metric(**line(iteration))
        run.event(Started(iteration, 1))
        run.write_ranks([])
    run.write_summary({"state_digest": {"all": "a", "parts": {}, "ranks": []}})
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert str(run.folder) in record.getMessage()
    assert not unnamed(record.getMessage(), [Reason(errno.ENOSPC)])
    kept = [metric["iteration"] for metric in RunRecord(tiny / "run").metrics()]
    assert kept == list(range(1, len(kept) + 1)), "whole lines, and none after one that is missing half"
    filler.unlink()
    run.metric(**line(60))
    assert RunRecord(tiny / "run").metrics()[-1]["iteration"] == 60
    run.event(Started(60, 1))
    run.write_ranks([])
    run.write_summary({})
    _, record = caplog.records
    assert record.levelno == logging.INFO
    assert str(run.folder) in record.getMessage()
    assert run.figures.iterations == 60, "what is shown of the run goes on"


def test_a_run_cannot_begin_on_a_full_disk(tiny: Path) -> None:
    fill(tiny)
    with pytest.raises(RunRecordError, match=f"--run-dir {tiny}/run: {Reason(errno.ENOSPC)}"):
        RunRecord(tiny / "run").begin({"text": "x" * 5000}, first_iteration=1)


def test_a_folder_that_was_removed_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = RunRecord(tmp_path / "run")
    run.begin({"seed": 1}, first_iteration=1)
    run.metric(**line(1))
    shutil.rmtree(tmp_path / "run")
    for iteration in range(2, 5):
        run.metric(**line(iteration))
    run.write_summary({})
    (message,) = caplog.messages
    assert not unnamed(message, [str(run.metrics_path), Reason(errno.ENOENT)])


LIMITED = """
import resource, sys
from pathlib import Path
from moevement_core.run.run_record import RunRecord
from tests.unit.monitoring.runs import line
run = RunRecord(Path(sys.argv[1]))
run.begin({"seed": 1}, first_iteration=1)
resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
for iteration in range(1, 30):
    run.metric(**line(iteration))
"""


def test_a_limit_on_the_size_of_files_is_said_once(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path / "run")], capture_output=True, text=True, timeout=LIMIT_S,
        check=False,
    )  # fmt: skip
    assert (ended.returncode, ended.stderr) == (0, "")
    (message,) = [each for each in ended.stdout.splitlines() if each.startswith("moevement: ")]
    assert not unnamed(message, [str(tmp_path / "run" / "metrics.jsonl"), Reason(errno.EFBIG)])
    text = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert [json.loads(each)["iteration"] for each in text.splitlines()] == list(range(1, text.count("\n") + 1))


PRINTING = """
import sys
from moevement_core import log
from moevement_core.util.output import never_fails
never_fails()
for number in range(2000):
    print("line", number, flush=True)
    log.info("again")
print("done", file=sys.stderr)
"""


@pytest.mark.parametrize(("where", "reason"), [("closed", errno.EPIPE), ("full", errno.ENOSPC)])
def test_output_that_nobody_takes_ends_no_job(where: str, reason: int) -> None:
    reading, writing = os.pipe()
    if where == "full":
        writing = os.open("/dev/full", os.O_WRONLY)
    os.close(reading)
    with os.fdopen(writing, "wb") as out:
        ended = subprocess.run(
            [sys.executable, "-c", PRINTING], stdout=out, stderr=subprocess.PIPE, text=True, timeout=LIMIT_S,
            check=False,
        )  # fmt: skip
    assert ended.returncode == 0
    message, done = ended.stderr.splitlines()
    assert not unnamed(message, ["moevement", "stdout", Reason(reason)])
    assert done == "done"


@pytest.mark.parametrize(("where", "code"), [("closed", 1), ("full", 2)])
def test_a_command_ends_with_its_output(where: str, code: int) -> None:
    reading, writing = os.pipe()
    if where == "full":
        writing = os.open("/dev/full", os.O_WRONLY)
    os.close(reading)
    with os.fdopen(writing, "wb") as out:
        ended = subprocess.run(
            [sys.executable, "-m", "moevement_cli.main", "simulate", "laptop", "--seeds", "2"], stdout=out,
            stderr=subprocess.PIPE, text=True, timeout=LIMIT_S, check=False,
        )  # fmt: skip
    assert ended.returncode == code
    assert "Traceback" not in ended.stderr
    assert len(ended.stderr.splitlines()) <= 1
