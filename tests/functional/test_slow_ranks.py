"""Ranks that are slower than their peers are named once, and drained if the flags say so."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from moevement_cli.main import main
from moevement_core.run.run_record import RunRecord
from moevement_core.speed.phases import PHASES
from tests.launching import finished, launch
from tests.training import ROOT

EXAMPLE = ROOT / "examples" / "plain_torch"
PACED = """
import os, sys, time
sys.path.insert(0, {example!r})
import train
original = train.ft.TorchBinding.run
slow = os.environ.get("MOEVEMENT_MEMBER") in {slow!r}

def run(self, iteration, *frozen):
    time.sleep(0.25 if slow else 0.04)
    original(self, iteration, *frozen)

train.ft.TorchBinding.run = run
train.main()
"""


def torch_words(folder: Path, iterations: int, *slow: str) -> list[str]:
    script = folder / "paced.py"
    script.write_text(PACED.format(example=str(EXAMPLE), slow=slow))
    return ["--trainer", "torch", str(script), "--moevement-window", "3", "--iterations", str(iterations)]


def run(run_dir: Path, *words: str, spares: int = 1) -> RunRecord:
    code, out, err = finished(launch("--nproc", "2", "--spares", str(spares), *words, "--run-dir", str(run_dir)))
    assert code == 0, out + err
    return RunRecord(run_dir)


@pytest.mark.slow("iterations are paced, so that a process can be slower than another one")
def test_a_slow_process_is_named_and_its_rank_moves_to_a_spare(tmp_path: Path) -> None:
    words = torch_words(tmp_path, 90, "1")
    record = run(
        tmp_path / "run", *words, "--moevement-evict-slow", "--moevement-evict-slow-seconds", "0.1",
        "--moevement-slow-factor", "1.5",
    )  # fmt: skip
    events = list(record.events())
    (slow,) = [event for event in events if event["event"] == "slow"]
    assert (slow["ranks"], slow["phase"], slow["is_evicted"]) == ([1], PHASES[0], True)
    assert slow["factor"] > 1.5
    (failure,) = [event for event in events if event["event"] == "failure"]
    assert "drain" in failure["noticed_by"]
    assert failure["recovery"]["replayed"] == 0
    compared = {round(line["slowest_factor"], 3) for line in record.metrics() if line.get("slowest_factor") is not None}
    assert slow["factor"] in compared
    unpaced = [str(EXAMPLE / "train.py") if word.endswith(".py") else word for word in words]
    run(tmp_path / "free", *unpaced, spares=0)
    assert main(["verify", str(tmp_path / "free"), str(tmp_path / "run")]) == 0


class Throttle:
    """Limit on the processor time of one process, by a control group of version 1, which this class makes."""

    ROOT = Path("/sys/fs/cgroup/cpu")
    PERIOD_US = 10_000

    def __init__(self, pid: int, share: float) -> None:
        self._folder = self.ROOT / f"moevement-{os.getpid()}"
        self._folder.mkdir()
        (self._folder / "cpu.cfs_period_us").write_text(str(self.PERIOD_US))
        (self._folder / "cpu.cfs_quota_us").write_text(str(int(self.PERIOD_US * share)))
        (self._folder / "cgroup.procs").write_text(str(pid))

    def end(self) -> None:
        for pid in (self._folder / "cgroup.procs").read_text().split():
            (self.ROOT / "cgroup.procs").write_text(pid)
        self._folder.rmdir()


class Loop:
    """Process that shares the processor of rank 1 with it, in an endless loop."""

    def __init__(self) -> None:
        self._process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
        os.sched_setaffinity(self._process.pid, {1})

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


def pid_of_rank_1(record: RunRecord) -> int:
    ranks = json.loads((record.folder / "ranks.json").read_text(encoding="utf-8"))
    return int(next(entry["pid"] for entry in ranks if entry["rank"] == 1))


@pytest.mark.full
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="needs a processor for each rank")
@pytest.mark.parametrize("by", ["shared", "throttled"])
def test_a_rank_without_a_processor_of_its_own_is_named(by: str, tmp_path: Path) -> None:
    """Pin each rank to a processor; then let an endless loop share that of rank 1, or limit it by a control group."""
    if by == "throttled" and not os.access(Throttle.ROOT / "cgroup.procs", os.W_OK):
        pytest.skip("needs a writable control group of version 1 for processors")
    script = tmp_path / "pinned.py"
    script.write_text(
        f"import os, sys\nsys.path.insert(0, {str(EXAMPLE)!r})\nimport train\n"
        "os.sched_setaffinity(0, {int(os.environ['RANK'])})\ntrain.main()\n"
    )
    job = launch(
        "--nproc", "2", "--trainer", "torch", str(script), "--iterations", "4000", "--run-dir", str(tmp_path / "run"),
    )  # fmt: skip
    record, disturbance = RunRecord(tmp_path / "run"), None
    try:
        deadline = time.monotonic() + 120
        while job.poll() is None and not any(event["event"] == "slow" for event in record.events()):
            assert time.monotonic() < deadline
            iteration = (record.newest_metric() or {"iteration": 0})["iteration"]
            if iteration > 100 and disturbance is None:
                disturbance = Loop() if by == "shared" else Throttle(pid_of_rank_1(record), share=0.4)
            time.sleep(0.1)
    finally:
        if disturbance is not None:
            disturbance.end()
        if job.poll() is None:
            job.terminate()
        finished(job)
    slow = [event for event in record.events() if event["event"] == "slow"]
    assert slow[0]["ranks"] == [1]
    assert slow[0]["iteration"] > 100


@pytest.mark.full
@pytest.mark.parametrize("seed", range(1, 21))
def test_a_slow_rank_moves_while_ranks_are_killed(seed: int, tmp_path: Path) -> None:
    """Let the first process of rank 1 be slow, and kill ranks at random; the job ends with the bits of a quiet one."""
    words = torch_words(tmp_path, 90, "1")
    record = run(
        tmp_path / "run", *words, "--moevement-evict-slow", "--moevement-evict-slow-seconds", "0.1",
        "--moevement-slow-factor", "1.5", "--moevement-inject-mtbf", "5", "--moevement-inject-seed", str(seed),
        spares=2,
    )  # fmt: skip
    # A kill may hit the slow process before it is compared.
    slow = [event["ranks"] for event in record.events() if event["event"] == "slow"]
    assert slow in ([], [[1]])
    unpaced = [str(EXAMPLE / "train.py") if word.endswith(".py") else word for word in words]
    run(tmp_path / "free", *unpaced, spares=0)
    assert main(["verify", str(tmp_path / "free"), str(tmp_path / "run")]) == 0
