"""Jobs with wrong flags end at once with one line; a job whose disk fills trains on with the same bits."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moevement_core.run.run_record import RunRecord
from moevement_core.run.verify import compare
from tests.failure_free import failure_free
from tests.launching import finished, launch, logs
from tests.training import ROOT, SCRIPT, flags, outcomes

SPARSE: dict[str, Any] = {
    "moevement_sparse_ckpt": True, "moevement_window": 2, "moevement_replicas": 1, "moevement_ranks_per_node": 1,
    "pipeline_model_parallel_size": 2,
}  # fmt: skip


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        pytest.param({"num_experts": 6, "expert_model_parallel_size": 4}, r"--num-experts 6\b", id="in-the-preflight"),
        pytest.param(
            {"moe_router_enable_expert_bias": True, "moe_router_score_function": "softmax"},
            r"Megatron\b.*--moe-router-score-function", id="by-megatron",
        ),
    ],
)  # fmt: skip
def test_a_mistake_beside_spares_ends_at_once(wrong: dict[str, Any], named: str, tmp_path: Path) -> None:
    words = flags(**SPARSE | {"moevement_replicas_on_same_node": True} | wrong)
    nproc = wrong.get("expert_model_parallel_size", 1) * 2
    code, _, err = finished(
        launch("--nproc", str(nproc), "--spares", "1", str(SCRIPT), *words, "--run-dir", str(tmp_path / "run"))
    )
    assert code == 2, f"{err}\n{logs(tmp_path / 'run')}"
    assert re.fullmatch(rf"moevement: .*{named}.*\n", err), err
    events = RunRecord(tmp_path / "run").events()
    assert not [event for event in events if event["event"] in ("failure", "restart")], "nobody tried again"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "none", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip("needs the right to mount a file system")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.builds
@pytest.mark.slow("two jobs")
def test_a_disk_that_fills_while_a_job_trains_changes_no_bit_of_it(small_disk: Path, tmp_path: Path) -> None:
    """Fill the disk of windows and record: the job trains on, and warns less often than once a window."""
    iterations = 40
    wanted = failure_free(2, train_iters=iterations, **SPARSE)
    windows, run_dir = small_disk / "windows", small_disk / "run"
    filled = threading.Thread(target=_fill_when, args=(small_disk, windows))
    filled.start()
    ended = outcomes(2, run_dir, train_iters=iterations, **SPARSE, moevement_persist_dir=str(windows))
    filled.join()
    (small_disk / "filler").unlink()
    warnings = [line for outcome in ended for line in outcome.output.splitlines() if os.strerror(errno.ENOSPC) in line]
    windows_lost = sum(str(windows) in line for line in warnings)
    assert 0 < windows_lost < 2 * 6, "the 1st, 2nd, 4th ... of each rank"
    compared = compare(wanted, RunRecord(run_dir), common_iterations=True)
    assert compared.first_difference is None


def _fill_when(disk: Path, windows: Path) -> None:
    """Fill the disk as soon as it has a whole window."""
    deadline = time.monotonic() + 120
    while not list(windows.glob("window_*.json")) and time.monotonic() < deadline:
        time.sleep(0.02)
    with (disk / "filler").open("wb", buffering=0) as file:
        for size in (1 << 20, 4096, 1):
            try:
                while file.write(bytes(size)):
                    pass
            except OSError:
                continue


def test_a_script_that_refuses_its_own_flags_is_quoted(tmp_path: Path) -> None:
    """Give a flag that the script's argparse does not know, and a run directory, so that ranks write into files."""
    small = ROOT / "examples" / "plain_torch" / "small.py"
    words = ["--trainer", "torch", "--nproc", "2", "--spares", "1", str(small), "--bogus", "--run-dir", str(tmp_path)]
    code, _, err = finished(launch(*words))
    assert code == 2
    assert err.splitlines()[-1].endswith("--bogus")
