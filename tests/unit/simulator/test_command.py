"""``moevement simulate`` as a user runs it."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import re
import sys
from pathlib import Path

import pytest
import yaml

from moevement_cli.main import main
from moevement_cli.plan import PRESETS
from moevement_cli.simulate import SCENARIOS

JOB = ["simulate", "gpt_moe", "--ranks", "96", "--iteration-time", "2", "--cluster", "moevement-a100"]


def test_a_sweep_is_reported_drawn_and_given_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plot = tmp_path / "deep" / "ettr.png"
    assert main([*JOB, "--mtbf", "600", "7200", "--seeds", "3", "--best", "--plot", str(plot), "--json"]) == 0
    out = capsys.readouterr().out
    results = json.loads(out.splitlines()[-1])["results"]
    assert {(result["strategy"], result["mtbf_s"]) for result in results} == {
        (name, mtbf_s) for name in ("checkfreq", "gemini", "moc", "moevement") for mtbf_s in (600, 7200)
    }
    assert all(0 < result["ettr"] <= 1 and len(result["failures"]) == 3 for result in results)
    assert plot.stat().st_size > 10_000
    assert re.search(r"(?m)\b96 ranks\b.*\b10 min\s*$", out), "the title of a table"
    shown = " ".join(out.split())
    for advice in json.loads(out.splitlines()[-1])["advice"]:
        best = advice["choices"][0]
        assert best["flags"] in shown, "flags that can be run are given"
        assert re.search(rf"{re.escape(best['flags'])}\W.*\b{best['ettr']:.3f}\b", shown)
        rows = [row["ettr"] for row in results if row["mtbf_s"] == advice["mtbf_s"] and row["strategy"] != "moc"]
        assert best["ettr"] >= max(rows)


JOB_OF_A_FEW = ["simulate", "gpt_moe", "--mtbf", "10m", "--seeds", "2", "--json"]
CHANGES = (
    "--cluster moevement-h100", "--d2h-bandwidth 0.5", "--copy-bandwidth 1", "--network-share 0.1",
    "--network-bandwidth 3", "--gpus-per-node 4", "--host-memory 20", "--replicas 1",
    "--protection copies:1", "--keep-own never",
    "--window-kind rolling", "--window 9", "--regime fp32", "--iteration-time 7s", "--ranks 192", "--hours 20",
    "--seeds 3", "--first-seed 7", "--weibull 0.7", "--together 0.5", "--spares 2", "--spares 2 --repair 1h",
    "--detect 5s", "--regroup 1m", "--interference 0.3", "--contention 0.3", "--storage-bandwidth 1",
    "--strategy gemini moevement", "--strategy moevement --skew 0.9",
)  # fmt: skip
VOID = (
    ("--speedup 2", "--trace"), ("--repair 1h", "--spares"), ("--protection parity:4+1", "copies:R"),
    ("--protection copies:1 --replicas 2", "--replicas"), ("--trace {trace} --mtbf 1h", "--mtbf"),
    ("--trace {trace} --weibull 0.7", "--weibull"), ("--trace {trace} --together 0.1", "--together"),
    ("--copy-bandwidth 1 --network-share 0.5", "--network-share"), ("--num-layers 12", "--num-layers"),
)  # fmt: skip


@pytest.fixture(scope="module")
def unchanged() -> str:
    """Return the results of a job, as JSON."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        assert main(JOB_OF_A_FEW) == 0
    return output.getvalue().splitlines()[-1]


@pytest.mark.parametrize("words", CHANGES)
def test_no_option_changes_nothing(words: str, unchanged: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*JOB_OF_A_FEW, *words.split()]) == 0
    assert capsys.readouterr().out.splitlines()[-1] != unchanged


@pytest.mark.parametrize(("words", "named"), VOID)
def test_an_option_that_would_change_nothing_is_refused(
    words: str, named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "trace.csv").write_text("0,add,a\n3600000,remove,a\n")
    job = ["simulate", "gpt_moe", "--seeds", "2"] if "{trace}" not in words else ["simulate", "gpt_moe"]
    with pytest.raises(SystemExit, match="2"):
        main([*job, *words.format(trace=tmp_path / "trace.csv").split()])
    (line,) = capsys.readouterr().err.splitlines()
    assert named in line


def test_a_model_fails_as_often_as_others_of_its_size_did(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*MODEL, "--ranks", "4", "--seeds", "1", "--strategy", "none", "--json"]) == 0
    (result,) = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
    assert result["mtbf_s"] == pytest.approx(54 * 24 * 3600 * 16_384 / 419 / 4)


MODEL = ["simulate", str(PRESETS / "laptop.yaml"), "--iteration-time", "2", "--cluster", "moevement-a100"]


def test_a_model_by_megatrons_flags_is_simulated(capsys: pytest.CaptureFixture[str]) -> None:
    hook = sys.excepthook
    words = ["--ranks", "4", "--mtbf", "3600", "--seeds", "1", "--hours", "1", "--strategy", "moevement", "gemini"]
    assert main([*MODEL, *words, "--json"]) == 0
    printed = capsys.readouterr()
    assert "rank" not in printed.err
    results = json.loads(printed.out.splitlines()[-1])["results"]
    assert [result["strategy"] for result in results] == ["moevement", "gemini"]
    assert sys.excepthook is hook, "an error that comes later names no rank that was only imagined"


def test_ranks_that_do_not_fill_the_layout_of_a_model_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([*MODEL, "--ranks", "6", "--expert-model-parallel-size", "4"])
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(r"--expert-model-parallel-size 4\b.*\b6\b.*\b8\b", line)


def test_recorded_failures_are_replayed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("0,add,a\n3600000,remove,a\n7200000,remove,b\n")
    assert main([*JOB, "--trace", str(trace), "--strategy", "none", "moevement", "--hours", "3", "--json"]) == 0
    none, moevement = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
    assert none["failures"] == moevement["failures"] == [2]
    assert none["ettr"] < 0.35 < 0.95 < moevement["ettr"]


def test_a_trace_without_a_failure_is_no_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("0,add,a\n3600000,remove,a\n")
    with pytest.raises(SystemExit, match="2"):
        main([*JOB, "--trace", str(trace), "--hours", "0.5"])
    assert re.search(rf"{re.escape(str(trace))}\b.*\b0\.5 hours\b", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("words", "pattern"),
    [
        (["--mtbf", "0"], r"\bmtbf 0\.0\b.*\b0\b"),
        (["--regroup", "-1"], r"\bregroup -1\.0\b.*\b0\b"),
        (["--seeds", "0"], r"\bseeds 0\b.*\b1\b"),
        (["--skew", "2"], r"\bskew 2\.0\b.*\b0\b.*\b1\b"),
        (["--window", "0"], r"\bwindow 0\b.*\b1\b"),
        (["--replicas", "-1"], r"\breplicas -1\b.*\b0\b"),
        (["--replicas", "30"], r"\b30 replicas\b.*\b11 replicas\b"),
        (["--num-layers", "3"], r"--num-layers 3\b"),
        (["--mtfb", "600"], r"--mtfb 600\b"),
        (["--ranks", "100"], r"\b100 ranks\b.*\bpipeline 3\b"),
        (["--trace", "README.md"], r"\btrace README\.md\b.*\bline 1\b"),
        (["--trace", "nothing.csv"], rf"\btrace nothing\.csv\b.*{os.strerror(errno.ENOENT)}"),
    ],
)
def test_what_cannot_be_simulated_is_one_line(
    words: list[str], pattern: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([*JOB, *words])
    error = capsys.readouterr().err
    assert re.search(pattern, error), error


def test_what_is_no_scenario_is_named_by_file_and_field(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = yaml.safe_load((SCENARIOS / "gpt_moe.yaml").read_text())
    for change, pattern in (
        ({"jobs": {}}, r"\bjobs\b.*\bjob\b.*\bparallel\b"),
        ({"job": {**whole["job"], "layers": 3}}, r"\bjob\.layers\b.*\bnum_layers\b"),
        ({"job": {**whole["job"], "num_layers": "many"}}, r"\bjob\.num_layers 'many'"),
        ({"job": {**whole["job"], "num_layers": 2.5}}, r"\bjob\.num_layers 2\.5\b.*\bwhole\b"),
        ({"job": {**whole["job"], "swiglu": 1}}, r"\bjob\.swiglu 1\b.*\btrue\b.*\bfalse\b"),
        ({"job": {**whole["job"], "moe_router_topk": 64}}, r"\b32 experts\b.*\bmoe_router_topk 64\b"),
        ({"parallel": {"ranks": 96, "pipeline": 3, "expert": 5}}, r"\b96 ranks\b.*\bexpert 5\b.*\b15\b"),
        ({"parallel": {"pipeline": 3}}, r"\bparallel\b.*\branks\b"),
        ({"cluster": "moevement-b200"}, r"\bcluster 'moevement-b200'.*\bmoevement-a100\b"),
        ({"cluster": {"d2h": 1}}, r"\bcluster\b.*\bgpus_per_node, network\b"),
        ({"run": {"strategies": ["best"]}}, r"\bstrategy 'best'.*\bnone\b"),
        ({"profile": "nothing.yaml"}, r"\bnothing\.yaml\b"),
        ({"failures": [1]}, r"\bfailures \[1\]"),
        ({"checkpointing": {"window_kind": "square"}}, r"\bwindow_kind 'square'.*\baligned\b"),
        ({"cluster": {"preset": "moevement-a100", "speeds": [1, 2]}}, r"\bcluster\.speeds \[1, 2\].*\bpairs\b"),
        ({"cluster": {"preset": "moevement-a100", "storage": 0}}, r"\bstorage bandwidth 0"),
        ({"job": {**whole["job"], "regime": "FP9"}}, r"\bregime 'FP9'"),
    ):
        path = tmp_path / "made.yaml"
        path.write_text(yaml.safe_dump({**whole, **change}))
        with pytest.raises(SystemExit, match="2"):
            main(["simulate", str(path)])
        err = capsys.readouterr().err
        assert "made.yaml" in err, err
        assert re.search(pattern, err), err
        assert len(err.splitlines()) == 1


def test_scales_and_jobs_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["simulate", "qwen_moe", "gpt_moe", "--ranks", "96", "192", "--strategy", "moevement", "--mtbf", "1800"]
    assert main([*words, "--seeds", "2", "--json"]) == 0
    results = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
    assert [(result["job"], result["ranks"]) for result in results] == [
        (job, ranks) for job in ("qwen_moe", "gpt_moe") for ranks in (96, 192)
    ]


def test_workers_draw_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    outputs = []
    for workers in ("1", "2"):
        words = ["simulate", "gpt_moe", "--mtbf", "1800", "--seeds", "2", "--workers", workers, "--json"]
        assert main(words) == 0
        outputs.append(capsys.readouterr().out.splitlines()[-1])
    assert outputs[0] == outputs[1]
