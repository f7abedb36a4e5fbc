"""A user lists the windows that a job left on disk, and starts a new job from one of them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from moevement_cli.main import main
from moevement_core.run.run_record import RunRecord
from tests.launching import finished, launch
from tests.training import ROOT

SCRIPT = ROOT / "examples" / "plain_torch" / "train.py"
SAVING = ("--moevement-strategy", "dense", "--moevement-dense-interval", "2")


def run(run_dir: Path, *words: str) -> tuple[int, str]:
    launched = launch(
        "--trainer", "torch", "--nproc", "2", "--spares", "1", str(SCRIPT), *SAVING, "--iterations", "20", *words,
        "--run-dir", str(run_dir),
    )  # fmt: skip
    code, _, err = finished(launched)
    return code, err


def test_a_job_goes_back_to_a_window_of_choice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    windows = tmp_path / "windows"
    assert run(tmp_path / "first", "--moevement-persist-dir", str(windows), "--moevement-keep-windows", "9") == (0, "")
    assert main(["windows", str(windows), "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["windows"]
    losses = {line["iteration"]: line["loss"] for line in RunRecord(tmp_path / "first").metrics()}
    assert len(listed) > 3
    losses_of_windows = {0: None} | losses  # On a slow disk, the window of the start is still among the newest ones.
    for window in listed:
        assert (window["ranks"], window["loss"]) == (2, losses_of_windows[window["iteration"]])
        assert window["nbytes"] > 100_000
    chosen = listed[2]["iteration"]
    load = ("--moevement-load", str(windows), "--moevement-load-iteration")
    assert run(tmp_path / "second", *load, str(chosen)) == (0, "")
    again = {line["iteration"]: line["loss"] for line in RunRecord(tmp_path / "second").metrics()}
    assert again == {iteration: loss for iteration, loss in losses.items() if iteration > chosen}
    assert main(["windows", str(windows)]) == 0
    assert re.search(rf"^{chosen} .*\b2\b", capsys.readouterr().out, re.MULTILINE)
    code, err = run(tmp_path / "third", *load, "99")
    assert (code, err.count("\n")) == (2, 1), err
    assert re.search(rf"--moevement-load-iteration 99\b.*\b{chosen}\b", err)


@pytest.mark.parametrize("name", ["none", "."])
def test_a_folder_without_windows_is_refused(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["windows", str(tmp_path / name)])
    assert ended.value.code == 2
    assert re.search(r"--moevement-persist-dir\b", capsys.readouterr().err)
