"""Jobs that begin from a dense checkpoint recover from failures, also by windows that are newer than the checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moevement_cli.main import main
from tests.launching import finished, launch
from tests.training import SCRIPT, flags

SAVED, END = 8, 15
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "replicated": {}, "mixed precision": {"bf16": True}, "distributed": {"use_distributed_optimizer": True},
}  # fmt: skip


def run(run_dir: Path, *words: str, spares: int) -> None:
    job = launch("--nproc", "2", "--spares", str(spares), *words, "--run-dir", str(run_dir))
    code, out, err = finished(job)
    assert code == 0, out + err


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
    run(tmp_path / "free", *words, "--save", str(dense), "--save-interval", str(SAVED), *kept, spares=0)
    (dense / "latest_checkpointed_iteration.txt").write_text(str(SAVED))
    load = ["--load", str(dense), "--moevement-inject", "rank=1,iteration=13,phase=backward"]
    run(tmp_path / "dense_only", *words, *load, spares=1)
    run(tmp_path / "windows_too", *words, *load, "--moevement-load", str(windows), spares=1)
    for other in ("dense_only", "windows_too"):
        assert main(["verify", str(tmp_path / "free"), str(tmp_path / other)]) == 0
