"""``moevement bench ettr`` measures real jobs, whose ranks it kills."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from moevement_cli import killed_job
from moevement_cli.main import main
from tests.launching import forks_launchers
from tests.training import TINY


@pytest.mark.builds  # three jobs
def test_strategies_under_one_schedule_of_kills(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    forks_launchers(killed_job, monkeypatch)
    config = tmp_path / "tiny.yaml"
    overrides = {"pipeline-model-parallel-size": 2, "moevement-sparse-ckpt": True, "moevement-window": 3}
    config.write_text(yaml.safe_dump(TINY | overrides | {"num-layers": 2, "global-batch-size": 4, "eval-iters": 1}))
    words = ["bench", "ettr", "--nproc", "2", "--spares", "1", "--config", str(config), "--iterations", "30"]
    # The first kill of this schedule comes after 0.8 seconds, the next twenty seconds later.
    words += ["--mtbf", "3", "--seed", "116", "--strategies", "moevement-redo"]
    words += ["--plot", str(tmp_path / "ettr.png")]
    assert main([*words, "--json"]) == 0
    samples = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [sample["strategy"] for sample in samples] == ["failure-free", "moevement-redo", "moevement-redo"]
    assert all(sample["bits"] == "equal" and sample["loss"] for sample in samples), samples
    assert all(sample["iterations"] == 29 and sample["training_s"] > 0 < sample["iteration_s"] for sample in samples)
    assert [len(sample["kills"]) > 0 for sample in samples] == [False, False, True]
    assert all(sample["progress"][-1][1] >= 29 for sample in samples)
    assert (tmp_path / "ettr.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("words", "pattern"),
    [(["--mtbf", "0"], r"--mtbf 0\.0\b.*\b0\b"), (["--iterations", "0"], r"--iterations 0\b.*\b1\b")],
)
def test_values_that_cannot_be_are_refused(words: list[str], pattern: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["bench", "ettr", *words])
    assert caught.value.code == 2
    assert re.search(pattern, capsys.readouterr().err)


def test_a_trace_with_one_failure_has_no_mean_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("0,add,node1\n9000,remove,node1\n")
    with pytest.raises(SystemExit) as caught:
        main(["bench", "ettr", "--trace", str(trace)])
    assert caught.value.code == 2
    assert re.search(r"--trace \S*trace\.csv\b.*\b1\b.*\b(2|two)\b", capsys.readouterr().err)
