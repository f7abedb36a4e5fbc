"""``moevement elastic`` reads a trace and prints a table of systems, or one line about an invalid input."""

from __future__ import annotations

import errno
import json
import os
import re
from pathlib import Path

import numpy as np
import pytest

from moevement_cli.main import main
from moevement_core.errors import ConfigError
from moevement_core.util.exit_codes import USAGE_ERROR


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.csv"
    nodes = [f"0,add,n{number}" for number in range(4)]
    path.write_text("\n".join([*nodes, "60000,remove,n1", "180000,add,n4", "3000000,remove,n2"]) + "\n")
    return path


SMALL = ("--nodes", "4", "--slots", "4", "--layers", "2", "--segment", "1200", "--wait-s", "10")


def test_elastic_experts_train_most(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["elastic", str(trace), *SMALL, "--json"]) == 0
    results = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
    iterations = {result["system"]: sum(segment["iterations"] for segment in result["segments"]) for result in results}
    assert iterations["lazarus"] > iterations["regroup"] > iterations["restart"]
    (lazarus,) = (result["segments"] for result in results if result["system"] == "lazarus")
    assert lazarus[0]["changes"] == 2
    assert lazarus[0]["fallbacks"] == 0


def test_recorded_loads(trace: Path, tmp_path: Path) -> None:
    tokens = np.random.default_rng(1).integers(1, 1000, (3, 2, 8))
    np.savez(tmp_path / "routing.npz", tokens_per_expert=tokens, iteration=np.array([1, 11, 21]))
    assert main(["elastic", str(trace), *SMALL, "--routing", str(tmp_path / "routing.npz")]) == 0


@pytest.mark.parametrize(
    ("words", "pattern"),
    [
        (["--nodes", "1"], r"--nodes 1\b.*--slots 4\b.*--experts 8\b"),
        (["--segment", "nan"], r"--segment nan\b.*\b0\b"),
        (["--iteration-s", "0"], r"--iteration-s 0\b.*\b0\b"),
        (["--expert-share", "2"], r"--expert-share 2\.0\b.*\b0\b.*\b1\b"),
        (["--routing", "/nowhere.npz"], rf"--routing /nowhere\.npz\b.*{os.strerror(errno.ENOENT)}"),
        (["--routing", __file__], rf"--routing {re.escape(__file__)}.*\btokens_per_expert\b"),
    ],
)
def test_what_cannot_be_is_one_line(
    words: list[str], pattern: str, trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises((SystemExit, ConfigError)) as caught:
        main(["elastic", str(trace), *SMALL, *words])
    if isinstance(caught.value, SystemExit):
        assert caught.value.code == USAGE_ERROR
    error = capsys.readouterr().err
    assert "Traceback" not in error
    assert re.search(pattern, error), error
