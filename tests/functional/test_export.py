"""Windows on disk become dense checkpoints, which load under another layout with equal bits."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from moevement_cli.main import main
from tests.launching import finished, launch
from tests.limits import HANGS_S
from tests.training import ROOT, SCRIPT, flags, losses, train

REACHED = 11
"""Iteration of both dense checkpoints, and of a window."""
LAYOUT: dict[str, Any] = {
    "pipeline_model_parallel_size": 2, "expert_model_parallel_size": 2, "use_distributed_optimizer": True,
    "dist_ckpt_optim_fully_reshardable": True,
}  # fmt: skip
OTHER: dict[str, Any] = {
    "tensor_model_parallel_size": 2, "sequence_parallel": True, "use_distributed_optimizer": True,
    "dist_ckpt_optim_fully_reshardable": True, "override_opt_param_scheduler": True,
    "make_vocab_size_divisible_by": 8,
}  # fmt: skip


def tensors_of(folder: Path, into: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a dense checkpoint by name, whole, in whatever shards they were saved."""
    dcp_to_torch_save(str(folder / f"iter_{REACHED:07d}"), str(into))
    saved = torch.load(into, weights_only=False)
    tensors: dict[str, torch.Tensor] = {}

    def walk(name: str, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            tensors[name] = value
        elif isinstance(value, dict):
            for key, inner in value.items():
                walk(f"{name}.{key}", inner)

    walk("", saved)
    return tensors


def are_equal(first: Path, second: Path, scratch: Path) -> bool:
    a, b = (tensors_of(folder, scratch / f"{number}.pt") for number, folder in enumerate((first, second)))
    assert a.keys() == b.keys()
    assert any("exp_avg" in name for name in a)
    return all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.slow("four jobs in a row")
def test_a_window_becomes_a_dense_checkpoint_that_another_layout_loads(tmp_path: Path) -> None:
    windows, dense, out, again = (tmp_path / name for name in ("windows", "dense", "out", "again"))
    sparse = ["--moevement-sparse-ckpt", "--moevement-window", "3"]
    words = [str(SCRIPT), *flags(train_iters=14, **LAYOUT), *sparse]
    code, printed, errors = finished(launch(
        "--nproc", "4", *words, "--run-dir", str(tmp_path / "run"), "--moevement-persist-dir", str(windows),
        "--moevement-keep-windows", "9", "--save", str(dense), "--save-interval", str(REACHED),
    ))  # fmt: skip
    assert code == 0, printed + errors
    # Flags of the job that loads the result do as well. The flags of folders are left out.
    flags_of_job = [
        str(SCRIPT), *flags(train_iters=REACHED + 1, **OTHER), *sparse, "--run-dir", str(tmp_path / "run"),
        "--moevement-persist-dir", str(windows),
    ]  # fmt: skip
    asked = [str(windows), "--to", str(out), "--iteration", str(REACHED), *flags_of_job]
    export = subprocess.run(
        [sys.executable, "-m", "moevement_cli.main", "export", *asked],
        capture_output=True, text=True, timeout=HANGS_S, check=False, cwd=ROOT,
    )  # fmt: skip
    assert export.returncode == 0, export.stdout + export.stderr
    assert are_equal(dense, out, tmp_path)

    train(2, None, **OTHER, train_iters=REACHED, load=str(out), save=str(again), save_interval=1000)
    assert are_equal(out, again, tmp_path)
    record = train(2, tmp_path / "other", **OTHER, train_iters=REACHED + 1, load=str(out))
    assert losses(record)[REACHED + 1] == pytest.approx(losses_of(tmp_path / "run"), rel=1e-4)


def losses_of(run_dir: Path) -> float:
    from moevement_core.run.run_record import RunRecord

    return losses(RunRecord(run_dir))[REACHED + 1]


def test_a_window_that_is_not_there_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["export", str(tmp_path), "--to", str(tmp_path / "out"), str(SCRIPT)])
    assert end.value.code == 2
    assert str(tmp_path) in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
