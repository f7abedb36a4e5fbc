"""Jobs of a trainer in plain torch, without Megatron, lose ranks and go on with the same bits."""

from __future__ import annotations

import ast
import json
import re
import signal
import time
from pathlib import Path

import pytest
import yaml

from moevement_cli.main import main
from moevement_core.run.run_record import RunRecord
from tests.functional.plain_torch import SCRIPT, is_the_same, run
from tests.launching import finished, launch


@pytest.mark.parametrize("nproc", [2, pytest.param(4, marks=pytest.mark.full)])
def test_ranks_are_killed_and_nothing_is_different(tmp_path: Path, nproc: int) -> None:
    """Kill ranks in an update, in a send to a peer, in the recovery from that, and in a commit after a reorder."""
    free = run(tmp_path / "failure_free", nproc)
    last = nproc - 1
    faults = [
        f"rank={last},iteration=9,phase=step", "rank=0,iteration=15,phase=replicate",
        "rank=0,iteration=14,phase=replay", "rank=0,iteration=22,phase=commit",
    ]  # fmt: skip
    killed = run(tmp_path / "killed", nproc, *(word for fault in faults for word in ("--moevement-inject", fault)))
    assert is_the_same(free, killed)
    assert [line["iteration"] for line in killed.metrics()] == list(range(1, 27))
    failures = [event for event in killed.events() if event["event"] == "failure"]
    recoveries = [event for event in killed.events() if event["event"] == "recovery"]
    assert len(failures) >= 3
    assert all(recovery["recomputed"] > 0 for recovery in recoveries), "frozen and active operators were mixed"
    assert free.summary()["checkpointing"]["reorders"] > 0
    pids = [
        process["pid"]
        for process in json.loads((killed.folder / "ranks.json").read_text())
        if process["role"] != "starting"
    ]
    assert len(set(pids)) == len(pids)


def test_a_rank_is_restored_by_its_logged_gradients(tmp_path: Path) -> None:
    free = run(tmp_path / "failure_free", 2)
    faults = ["rank=1,iteration=9,phase=reduce", "rank=0,iteration=15,phase=commit", "rank=1,iteration=20,phase=step"]
    words = (word for fault in faults for word in ("--moevement-inject", fault))
    killed = run(tmp_path / "killed", 2, "--moevement-recovery", "redo", *words)
    assert is_the_same(free, killed)
    recoveries = [event for event in killed.events() if event["event"] == "recovery"]
    assert len(recoveries) == len(faults)
    assert all(recovery["redone"] > 0 for recovery in recoveries)


@pytest.mark.full
def test_state_that_is_wiped_is_recovered(tmp_path: Path) -> None:
    free = run(tmp_path / "failure_free", 2)
    assert is_the_same(free, run(tmp_path / "wiped", 2, "--moevement-wipe-at", "7", "13"))


@pytest.mark.full
def test_a_new_job_starts_from_windows_on_disk(tmp_path: Path) -> None:
    windows = str(tmp_path / "windows")
    free = run(tmp_path / "failure_free", 2)
    run(tmp_path / "first", 2, "--moevement-persist-dir", windows)
    second = run(tmp_path / "second", 2, "--moevement-load", windows, "--moevement-persist-dir", windows)
    assert main(["verify", str(free.folder), str(second.folder), "--common"]) == 0
    assert second.metrics()[0]["iteration"] > 1


@pytest.mark.parametrize(
    ("options", "script", "words", "named"),
    [
        (["--nproc", "3"], SCRIPT, [], r"--nproc 3\b.*\b8 experts\b"),
        pytest.param(
            ["--nproc", "2"],
            SCRIPT,
            ["--moevement-window", "many"],
            r"--moevement-window many\b.*\bauto\b",
            marks=pytest.mark.full,
        ),
        (["--nproc", "2"], Path(__file__), [], r"\bno_binding\.py\b.*\bmoevement_core\.train\b"),
    ],
)
def test_mistakes_are_one_line(tmp_path: Path, options: list[str], script: Path, words: list[str], named: str) -> None:
    if script != SCRIPT:
        script = tmp_path / "no_binding.py"
        script.write_text("print()\n")
    code, _, err = finished(
        launch("--trainer", "torch", *options, "--spares", "1", str(script), *words, "--run-dir", str(tmp_path / "run"))
    )
    assert (code, err.count("\n")) == (2, 1), err
    assert re.search(named, err), err


def test_a_job_that_is_asked_to_end_does_so_at_a_boundary(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    words = ["--trainer", "torch", "--nproc", "2", "--spares", "1", str(SCRIPT), "--iterations", "100000"]
    process = launch(*words, "--run-dir", str(run_dir))
    metrics, deadline = run_dir / "metrics.jsonl", time.monotonic() + 100
    while not (metrics.exists() and metrics.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    code, out, err = finished(process)
    assert (code, err) == (0, ""), out
    record = RunRecord(run_dir)
    assert record.summary()["iterations"] == record.metrics()[-1]["iteration"] < 100000
    assert yaml.safe_load(record.config_path.read_text())["iterations"] == 100000


def test_the_example_knows_no_megatron() -> None:
    """Check that no import in the example's script is of Megatron."""
    tree = ast.parse(SCRIPT.read_text())
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert names
    assert not [name for name in names if name.split(".")[0] == "megatron"]
