"""Processes whose device breaks give up their rank. The tests raise errors of a GPU in a trainer on CPUs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from moevement_cli.main import main
from moevement_core.run.run_record import RunRecord
from tests.launching import finished, launch
from tests.training import ROOT

EXAMPLE = ROOT / "examples" / "plain_torch"
SCRIPT = """
import os, sys, time
sys.path.insert(0, {example!r})
import torch
import train
from moevement_core.restart import device_health
from moevement_core.session import loop
member = int(os.environ["MOEVEMENT_MEMBER"])
{body}
train.main()
"""
RAISES = """
original = train.ft.TorchBinding.run

def run(self, iteration, *frozen):
    if (member, iteration) in {faults!r}:
        raise torch.AcceleratorError("CUDA error: uncorrectable NVLink error detected during the execution")
    original(self, iteration, *frozen)

train.ft.TorchBinding.run = run
"""
HANGS = """
loop.visible_devices = lambda: ("GPU-0", "GPU-1", "GPU-2")
device_health.use_device = lambda number: time.sleep(3600) if number == 1 else None
device_health.LIMIT_S = 3.0
"""


def run(folder: Path, name: str, body: str, *words: str) -> tuple[RunRecord, str]:
    script = folder / f"{name}.py"
    script.write_text(SCRIPT.format(example=str(EXAMPLE), body=body))
    arguments = ["--moevement-window", "3", "--iterations", "16", *words, "--run-dir", str(folder / name)]
    code, out, err = finished(launch("--trainer", "torch", "--nproc", "2", "--spares", "1", str(script), *arguments))
    assert code == 0, out + err
    return RunRecord(folder / name), out + err


@pytest.fixture(scope="module")
def free(tmp_path_factory: pytest.TempPathFactory) -> RunRecord:
    return run(tmp_path_factory.mktemp("free"), "free", "")[0]


def failures(record: RunRecord) -> Sequence[str]:
    return [failure for event in record.events() if event["event"] == "failure" for failure in event["failures"]]


def test_a_rank_whose_device_raises_is_replaced_and_nothing_is_different(tmp_path: Path, free: RunRecord) -> None:
    """Raise an error of the device in a process, and in the same iteration in the spare that replaces the process."""
    broken, out = run(tmp_path, "broken", RAISES.format(faults=[(1, 9), (2, 9)]))
    assert main(["verify", str(free.folder), str(broken.folder)]) == 0
    messages = failures(broken)
    assert len(messages) == 2
    assert all("AcceleratorError" in message and "rank 1" in message for message in messages), messages
    assert "device" in next(event["noticed_by"] for event in broken.events() if event["event"] == "failure")
    assert out.count("AcceleratorError") >= 2


def test_a_device_that_does_not_answer_is_left_out_before_the_job_begins(tmp_path: Path, free: RunRecord) -> None:
    """Let the second of three devices, that of rank 1, hang: the spare takes the rank, with the third device."""
    hanging, out = run(tmp_path, "hanging", HANGS)
    assert main(["verify", str(free.folder), str(hanging.folder)]) == 0
    assert "GPU-1" in out
    assert "GPU-0" not in out
    assert "GPU-2" not in out
