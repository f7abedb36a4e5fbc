"""A trainer in plain torch goes on with fewer ranks when no spare is left, and grows again when processes come back."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from moevement_core.run.run_record import RunRecord
from moevement_core.storage.manifest import manifests
from tests.functional.elastic import GONE
from tests.launching import finished, launch
from tests.training import ROOT

SCRIPT = ROOT / "examples" / "plain_torch" / "train.py"
ELASTIC = ("--moevement-elastic", "--moevement-join-wait", "0.5")
EVERY = ("--moevement-strategy", "dense", "--moevement-dense-interval", "1")


@pytest.fixture(autouse=True)
def one_thread_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give all jobs one thread a rank. By default the launcher divides the cores among the ranks that it starts."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def run(run_dir: Path, nproc: int, options: tuple[str, ...], *words: str, iterations: int = 16) -> RunRecord:
    arguments = [*ELASTIC, "--moevement-verify", "iteration", "--iterations", str(iterations), *words]
    launched = launch(
        "--trainer", "torch", "--nproc", str(nproc), *options, str(SCRIPT), *arguments, "--run-dir", str(run_dir)
    )
    code, out, err = finished(launched)
    assert (code, err) == (0, ""), out
    return RunRecord(run_dir)


def losses(record: RunRecord, since: int) -> dict[int, float]:
    return {line["iteration"]: line["loss"] for line in record.metrics() if line["iteration"] > since}


@pytest.mark.parametrize(
    "saving",
    [EVERY, pytest.param(("--moevement-recovery", "redo", "--moevement-window", "2"), marks=pytest.mark.full)],
    ids=("dense", "redo"),
)
def test_the_job_goes_on_with_fewer_ranks_as_a_fresh_one_would(saving: tuple[str, ...], tmp_path: Path) -> None:
    """Kill one of two ranks, and with it half of the experts, whose state only snapshots on the other rank have.

    A fresh job of one rank starts from a window that two ranks have written to disk.
    """
    fault = ("--moevement-inject", "rank=1,iteration=7,phase=reduce")
    survived = run(tmp_path / "elastic", 2, GONE, *saving, *fault)
    (event,) = [event for event in survived.events() if event["event"] == "resized"]
    assert (event["world_before"], event["world_size"]) == (2, 1)
    assert event["digests_equal"]
    at = event["iteration"]
    assert 4 <= at <= 6
    assert [line["iteration"] for line in survived.metrics()] == list(range(1, 17))
    windows = str(tmp_path / "windows")
    run(tmp_path / "first", 2, GONE, *EVERY, "--moevement-persist-dir", windows, iterations=at + 1)
    assert manifests(Path(windows))[0].reaches == at
    fresh = run(tmp_path / "fresh", 1, GONE, *EVERY, "--moevement-load", windows, "--moevement-replicas", "0")
    assert losses(survived, at) == losses(fresh, at)


@pytest.mark.slow("a process joins while the job runs")
def test_the_job_grows_again_and_loses_nothing(tmp_path: Path) -> None:
    fault = ("--moevement-inject", "rank=0,iteration=5,phase=forward")
    survived = run(tmp_path / "run", 2, ("--respawn-after", "0.5"), *EVERY, *fault, iterations=600)
    events = [event for event in survived.events() if event["event"] == "resized"]
    assert [event["world_size"] for event in events] == [1, 2]
    assert events[1]["digests_equal"]
    assert [line["iteration"] for line in survived.metrics()] == list(range(1, 601))


def test_a_script_without_sizes_refuses_the_flag(tmp_path: Path) -> None:
    script = tmp_path / "fixed.py"
    script.write_text(SCRIPT.read_text().replace("(1, 2, 4, 8)", "()"))
    code, _, err = finished(launch("--trainer", "torch", "--nproc", "2", str(script), *ELASTIC))
    assert (code, err.count("\n")) == (2, 1), err
    assert re.search(r"--moevement-elastic\b.*\bsizes\b", err)
