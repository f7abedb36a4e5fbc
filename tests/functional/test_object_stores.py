"""Jobs write windows to a URL and start again from it; faults of the store cost windows, never training."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from moevement_cli.main import main
from moevement_core.run.run_record import RunRecord
from moevement_core.storage.object_store import ObjectStore
from tests.failure_free import failure_free_digest
from tests.faulty_store import PLAN_ENV
from tests.functional.jobs import SPARSE
from tests.functional.plain_torch import SCRIPT, is_the_same, run
from tests.launching import Launcher, finished, launch, survive
from tests.training import SCRIPT as MEGATRON
from tests.training import flags

FAULTY = Path(__file__).with_name("faulty_trainer.py")
ARGUMENTS = ["--trainer", "torch", "--nproc", "2", "--spares", "1"]
ITERATIONS = ["--moevement-window", "4", "--moevement-verify", "iteration", "--iterations"]


def kill_with_first_windows(job: Launcher, url: str, record: RunRecord, least: int) -> None:
    """Kill all processes of a job in the middle of an iteration after its first windows."""
    deadline = time.monotonic() + 120
    while not (windows := ObjectStore(url).manifests()) or windows[0].reaches < least:
        assert time.monotonic() < deadline, "no window was written"
        assert job.poll() is None, finished(job)
        time.sleep(0.02)
    processes = json.loads((record.folder / "ranks.json").read_text())
    for pid in [job.pid, *(process["pid"] for process in processes)]:
        os.kill(pid, signal.SIGKILL)
    job.wait(20)


@pytest.mark.slow("three jobs in a row")
def test_all_processes_die_and_a_new_job_goes_on_from_a_url(tmp_path: Path) -> None:
    url, first = f"file://{tmp_path}/windows", RunRecord(tmp_path / "first")
    free = run(tmp_path / "failure_free", 2)
    words = [str(SCRIPT), *ITERATIONS, "26", "--run-dir", str(first.folder), "--moevement-persist-dir", url]
    kill_with_first_windows(launch(*ARGUMENTS, *words), url, first, least=11)
    second = run(tmp_path / "second", 2, "--moevement-load", url, "--moevement-persist-dir", url)
    assert main(["verify", str(free.folder), str(second.folder), "--common"]) == 0
    assert second.metrics()[0]["iteration"] > 8
    assert main(["windows", url]) == 0


@pytest.mark.slow("two jobs in a row")
def test_an_incomplete_window_is_left_for_an_older_one(tmp_path: Path) -> None:
    """Delete an object of the newest window: the next job starts from the window before, with equal bits."""
    url = f"file://{tmp_path}/windows"
    free = run(tmp_path / "first", 2, "--moevement-persist-dir", url)
    newest, older = ObjectStore(url).manifests()
    objects = sorted((tmp_path / "windows" / newest.name).glob("rank_00001_*.snapshot"))
    objects[0].unlink()
    second = run(tmp_path / "second", 2, "--moevement-load", url)
    assert second.metrics()[0]["iteration"] == older.reaches
    assert main(["verify", str(free.folder), str(second.folder), "--common"]) == 0


def faulty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plan: dict[str, Any]) -> tuple[RunRecord, str]:
    """Run a job whose store has faults, and return its record and the launcher's output."""
    path, run_dir = tmp_path / "plan.json", tmp_path / "faulty"
    path.write_text(json.dumps(plan))
    monkeypatch.setenv(PLAN_ENV, str(path))
    monkeypatch.setenv("STORE_SECRET_KEY", "opensesame")
    words = [str(FAULTY), *ITERATIONS, "26", "--run-dir", str(run_dir)]
    location = ["--moevement-persist-dir", f"faultyfile://{tmp_path}/windows"]
    code, out, err = finished(launch(*ARGUMENTS, *words, *location))
    assert (code, err) == (0, ""), out
    return RunRecord(run_dir), out


@pytest.mark.slow("the same job with and without faults")
def test_a_store_that_refuses_every_snapshot_costs_no_iteration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = run(tmp_path / "failure_free", 2)
    plan = {"failing": ["rank_00001_iteration"]}
    record, out = faulty(tmp_path, monkeypatch, plan)
    assert is_the_same(free, record)
    events = [event for event in record.events() if event["event"] == "windows_not_on_disk"]
    assert events
    assert any(event["text"] in line for event in events for line in out.splitlines())
    assert ObjectStore(f"file://{tmp_path}/windows").manifests() == []
    logs = "".join(path.read_text() for path in record.folder.rglob("*.out")) + out
    assert re.search(r"faultyfile://\S+.*503", logs)


@pytest.mark.full
@pytest.mark.slow("the store is slow")
def test_a_slow_store_does_not_hold_up_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = run(tmp_path / "failure_free", 2)
    record, _ = faulty(tmp_path, monkeypatch, {"write_s": 0.3})
    assert is_the_same(free, record)
    stalls = [line["stall_s"] for line in record.metrics() if "stall_s" in line]
    assert sum(stalls) < 0.3 * len(stalls)


@pytest.mark.parametrize(
    ("location", "named"),
    [
        ("file:///proc/nowhere/windows", r"file:///proc/nowhere/windows\b"),
        ("s3://AKIA1:opensesame@bucket/job", r"--moevement-persist-dir s3://\*\*\*@bucket"),
        ("file:///windows/{node}", r"\{node\}"),
        ("unheard-of://bucket", r"\bunheard-of\b"),
    ],
)
def test_a_store_that_cannot_be_used_is_one_line(tmp_path: Path, location: str, named: str) -> None:
    words = [str(SCRIPT), *ITERATIONS, "26", "--run-dir", str(tmp_path / "run"), "--moevement-persist-dir", location]
    code, out, err = finished(launch(*ARGUMENTS, *words))
    assert (code, err.count("\n")) == (2, 1), err
    assert re.search(named, err), err
    files = [path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert not [data for data in [out.encode(), err.encode(), *files] if b"opensesame" in data]
    assert "iteration 1" not in out


@pytest.mark.slow("all processes start again")
def test_a_megatron_job_goes_on_from_a_url(tmp_path: Path) -> None:
    flags_ = SPARSE | {"pipeline_model_parallel_size": 2, "moevement_replicas": 1, "train_iters": 40}
    wanted = failure_free_digest(2, **flags_)
    url = f"file://{tmp_path}/windows"
    first = RunRecord(tmp_path / "first")
    words = flags(**flags_, moevement_persist_dir=url)
    job = launch("--nproc", "2", "--spares", "1", str(MEGATRON), *words, "--run-dir", str(first.folder))
    kill_with_first_windows(job, url, first, least=8)
    survived = survive(2, 1, tmp_path / "second", **flags_, moevement_persist_dir=url, moevement_load=url)
    assert survived.digest == wanted
    assert survived.events("start")[0]["iteration"] >= 8
