"""``moevement drill`` flips bits in the data of real jobs: jobs find them, and end with the undamaged state."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moevement_cli import drill
from moevement_cli.main import main
from moevement_core.restart.faults import FlipKind
from tests.launching import forks_launchers
from tests.training import SCRIPT, flags

QUICK = (FlipKind.LOGS,)


def drilled(kinds: list[str], nproc: int, out: Path, capsys: pytest.CaptureFixture[str], **layout: object) -> None:
    words = flags(moevement_window=2, moevement_replicas_on_same_node=True, train_iters=10, bf16=True, **layout)
    argv = ["drill", "--flip", *kinds, "--at", "6", "--nproc", str(nproc), "--out", str(out), "--json"]
    code = main([*argv, "--", str(SCRIPT), *words])
    printed = capsys.readouterr().out
    results = json.loads(printed.splitlines()[-1])["drills"]
    assert code == 0, printed
    assert [result["kind"] for result in results] == kinds
    assert all(result["is_equal"] for result in results), printed


@pytest.mark.builds
@pytest.mark.slow("two jobs: a drill and its undamaged job")
def test_two_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    forks_launchers(drill, monkeypatch)
    drilled(list(QUICK), 2, tmp_path / "drill", capsys, pipeline_model_parallel_size=2)


@pytest.mark.full
@pytest.mark.parametrize("kind", FlipKind)
def test_each_kind(kind: FlipKind, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drilled(
        [kind], 4, tmp_path / "drill", capsys, pipeline_model_parallel_size=2, expert_model_parallel_size=2,
        use_distributed_optimizer=True, moevement_ranks_per_node=1,
    )  # fmt: skip
