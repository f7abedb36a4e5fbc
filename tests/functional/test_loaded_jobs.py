"""Jobs that begin from a dense checkpoint recover from failures, also by windows that are newer than the checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moevement_core.run.run_record import RunRecord
from moevement_core.run.verify import compare
from tests.launching import finished, launch
from tests.training import SCRIPT, flags

SAVED, END = 8, 15
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "replicated": {}, "mixed precision": {"bf16": True}, "distributed": {"use_distributed_optimizer": True},
}  # fmt: skip


def run(run_dir: Path, *words: str, spares: int) -> RunRecord:
    job = launch("--nproc", "2", "--spares", str(spares), *words, "--run-dir", str(run_dir))
    code, out, err = finished(job)
    assert code == 0, out + err
    return RunRecord(run_dir)


@pytest.mark.slow("three jobs in a row")
@pytest.mark.parametrize("layout", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_rank_is_replaced_after_a_load(layout: dict[str, Any], tmp_path: Path) -> None:
    """A replacement makes the state of the optimizer, and survivors have loaded theirs; both have the same digests."""
    dense, windows = tmp_path / "dense", tmp_path / "windows"
    words = [
        str(SCRIPT), *flags(train_iters=END, pipeline_model_parallel_size=2, **layout), "--moevement-sparse-ckpt",
        "--moevement-window", "3",
    ]  # fmt: skip
    kept = ["--moevement-persist-dir", str(windows), "--moevement-keep-windows", "8"]
    free = run(tmp_path / "free", *words, "--save", str(dense), "--save-interval", str(SAVED), *kept, spares=0)
    (dense / "latest_checkpointed_iteration.txt").write_text(str(SAVED))
    load = ["--load", str(dense), "--moevement-inject", "rank=1,iteration=13,phase=backward"]
    for name, more in {"dense": [], "window": ["--moevement-load", str(windows)]}.items():
        record = run(tmp_path / name, *words, *load, *more, spares=1)
        assert compare(free, record, common_iterations=True).equal
