"""``moevement simulate`` as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moevement_core.cli.main import main

JOB = ["simulate", "gpt_moe", "--ranks", "96", "--iteration-time", "2", "--cluster", "moevement-a100"]


def test_a_sweep_is_told_drawn_and_given_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plot = tmp_path / "deep" / "ettr.png"
    assert main([*JOB, "--mtbf", "600", "7200", "--seeds", "3", "--best", "--plot", str(plot), "--json"]) == 0
    out = capsys.readouterr().out
    results = json.loads(out.splitlines()[-1])["results"]
    assert {(one["strategy"], one["mtbf_s"]) for one in results} == {
        (name, mtbf_s) for name in ("checkfreq", "gemini", "moc", "moevement") for mtbf_s in (600, 7200)
    }
    assert all(0 < one["ettr"] <= 1 and len(one["failures"]) == 3 for one in results)
    assert plot.stat().st_size > 10_000
    assert "a failure every 10 min" in out
    assert "loses the updates of" in " ".join(out.split()), "what loses updates is not recommended"


def test_recorded_failures_are_replayed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("0,add,a\n3600000,remove,a\n7200000,remove,b\n")
    assert main([*JOB, "--trace", str(trace), "--strategy", "none", "moevement", "--hours", "3", "--json"]) == 0
    none, ours = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
    assert none["failures"] == ours["failures"] == [2]
    assert none["ettr"] < 0.35 < 0.95 < ours["ettr"]


def test_a_trace_without_a_failure_is_no_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("0,add,a\n3600000,remove,a\n")
    with pytest.raises(SystemExit, match="2"):
        main([*JOB, "--trace", str(trace), "--hours", "0.5"])
    assert "no failure in 0.5 hours" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--mtbf", "0"], "--mtbf 0.0; needs more than 0"),
        (["--regroup", "-1"], "--regroup -1.0; needs 0 or more"),
        (["--seeds", "0"], "--seeds 0 --spares None"),
        (["--trace", "README.md"], "trace README.md, line 1:"),
        (["--trace", "nothing.csv"], "trace nothing.csv"),
    ],
)
def test_what_cannot_be_simulated_is_one_line(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([*JOB, *words])
    assert message in capsys.readouterr().err
