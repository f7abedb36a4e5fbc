"""Ranks move off a node or a process while the job trains; no iteration is repeated, and every bit is equal."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moevement_cli.main import main
from moevement_core.run.run_record import RunRecord
from tests.failure_free import failure_free
from tests.launching import finished, launch, logs
from tests.training import ROOT, SCRIPT, flags

EXAMPLE = ROOT / "examples" / "plain_torch"
PACED = """
import sys, time
sys.path.insert(0, {example!r})
import train
original = train.ft.TorchBinding.run

def run(self, iteration, *frozen):
    time.sleep(0.2)  # Copies reach peers within two iterations on a busy machine, too; otherwise windows are abandoned.
    original(self, iteration, *frozen)

train.ft.TorchBinding.run = run
train.main()
"""
MEGATRON: dict[str, Any] = {
    "moevement_sparse_ckpt": True, "moevement_window": 3, "moevement_replicas": 1, "pipeline_model_parallel_size": 2,
    "train_iters": 320,
}  # fmt: skip


class Job:
    """Job of two ranks and a spare that runs while a test drains it."""

    def __init__(self, run_dir: Path, *words: str) -> None:
        self.record = RunRecord(run_dir)
        self.process = launch("--nproc", "2", "--spares", "1", *words, "--run-dir", str(run_dir))

    def until(self, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 120
        while not holds():
            assert self.process.poll() is None, f"{self.process.communicate()}\n{logs(self.record.folder)}"
            assert time.monotonic() < deadline, logs(self.record.folder)
            time.sleep(0.05)

    def until_iteration(self, iteration: int) -> None:
        self.until(lambda: (self.record.newest_metric() or {"iteration": 0})["iteration"] >= iteration)

    def until_spare(self) -> None:
        self.until(lambda: any(entry["role"] == "spare" for entry in self.processes()))

    def processes(self) -> list[dict[str, Any]]:
        path = self.record.ranks_path
        return json.loads(path.read_text()) if path.exists() else []

    def drain(self, target: str) -> None:
        assert main(["drain", str(self.record.folder), target, "--reason", "a test"]) == 0

    def check_moves(self, ranks: list[int]) -> None:
        """Let the job end, and check that only the drained ranks moved, one after the other, and repeated nothing."""
        code, out, err = finished(self.process)
        assert code == 0, out + err
        failures = [event for event in self.record.events() if event["event"] == "failure"]
        named = [re.findall(r"\brank (\d+)\b", text)[0] for event in failures for text in event["failures"]]
        assert named == [str(rank) for rank in ranks]
        for event in failures:
            assert "drain" in event["noticed_by"], event
            recovery = event["recovery"]
            assert (recovery["replayed"], recovery["redone"], recovery["recomputed"]) == (0, 0, 0)
            assert recovery["sources"]["replica"] == sum(recovery["sources"].values()) == 1
        lines = list(self.record.metrics())
        assert [line["iteration"] for line in lines] == list(range(1, len(lines) + 1))
        # Windows become persisted after each move, so that a failure costs as little as before.
        assert lines[-1]["windows_abandoned"] == 0
        assert lines[-1]["persisted_from"] >= len(lines) - 12


def torch_words(folder: Path, *words: str) -> list[str]:
    script = folder / "paced.py"
    script.write_text(PACED.format(example=str(EXAMPLE)))
    return ["--trainer", "torch", str(script), "--moevement-window", "3", "--iterations", "160", *words]


@pytest.mark.slow("a process starts again, and takes the second rank")
def test_ranks_of_a_trainer_in_plain_torch_move_one_after_the_other(tmp_path: Path) -> None:
    """Move both ranks of a job, each to the process that is the spare by then."""
    words = torch_words(tmp_path)
    unpaced = [str(EXAMPLE / "train.py") if word.endswith(".py") else word for word in words]
    code, out, err = finished(launch("--nproc", "2", "--spares", "0", *unpaced, "--run-dir", str(tmp_path / "free")))
    assert code == 0, out + err
    job = Job(tmp_path / "run", *words)
    for iteration, rank in ((6, 1), (20, 0)):
        job.until_iteration(iteration)
        job.until_spare()
        job.drain(str(rank))
    job.check_moves([1, 0])
    assert main(["verify", str(tmp_path / "free"), str(tmp_path / "run")]) == 0


@pytest.mark.slow("two nodes are drained, and the process of the first has to start again")
def test_a_node_is_drained_and_comes_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Drain the node of rank 1, take that back, and drain the node that rank 1 moved to: it returns to the first."""
    free = failure_free(2, **MEGATRON, moevement_ranks_per_node=1)
    job = Job(tmp_path / "run", "--ranks-per-node", "1", str(SCRIPT), *flags(**MEGATRON))
    job.until_iteration(4)
    job.drain("1")
    assert main(["drain", str(job.record.folder)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "1: a test"
    assert {entry["node"] for entry in job.processes() if entry["role"] == "active"} == {"0", "2"}
    assert main(["drain", str(job.record.folder), "1", "--cancel"]) == 0
    job.until(lambda: any((entry["role"], entry["node"]) == ("spare", "1") for entry in job.processes()))
    job.drain("2")
    assert {entry["node"] for entry in job.processes() if entry["role"] == "active"} == {"0", "1"}
    job.check_moves([1, 1])
    assert main(["verify", str(free.folder), str(job.record.folder)]) == 0


@pytest.mark.full
def test_a_rank_is_killed_while_another_one_is_drained(tmp_path: Path) -> None:
    free = failure_free(2, **MEGATRON)
    job = Job(tmp_path / "run", str(SCRIPT), *flags(**MEGATRON, moevement_replicas_on_same_node=True))
    job.until_iteration(5)
    main(["drain", str(job.record.folder), "1", "--no-wait"])
    os.kill(next(entry["pid"] for entry in job.processes() if entry["rank"] == 0), signal.SIGKILL)
    code, out, err = finished(job.process)
    assert code == 0, out + err
    assert main(["verify", str(free.folder), str(job.record.folder)]) == 0


def test_a_folder_without_a_running_job_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, named in (
        (["none", "1"], "none"), ([".", "1"], "run directory"), ([".", "--cancel"], "--cancel"),
        ([".", "1", "--cancel"], "1"), ([".", "1", "--reason", ""], "--reason"),
    ):  # fmt: skip
        with pytest.raises(SystemExit) as ended:
            main(["drain", str(tmp_path / words[0]), *words[1:]])
        assert ended.value.code == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert re.search(re.escape(named), error)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(1, 21))
def test_ranks_move_while_ranks_are_killed(seed: int, tmp_path: Path) -> None:
    """Drain both ranks again and again, and kill ranks at random; the job ends with the bits of a quiet one."""
    words = torch_words(tmp_path)
    job = Job(tmp_path / "run", *words, "--moevement-inject-mtbf", "6", "--moevement-inject-seed", str(seed))
    job.until_iteration(8)
    for move in range(4):
        job.until_iteration(8 + 30 * move)
        assert main(["drain", str(job.record.folder), f"rank:{move % 2}", "--reason", "a test", "--no-wait"]) == 0
    code, out, err = finished(job.process)
    assert code == 0, out + err
    run_dir = tmp_path / "free"
    unpaced = [str(EXAMPLE / "train.py") if word.endswith(".py") else word for word in words]
    code, out, err = finished(launch("--nproc", "2", "--spares", "0", *unpaced, "--run-dir", str(run_dir)))
    assert code == 0, out + err
    assert main(["verify", str(run_dir), str(job.record.folder)]) == 0
