"""``moevement simulate`` as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from moevement_cli.main import main
from moevement_cli.simulate import SCENARIOS

JOB = ["simulate", "gpt_moe", "--ranks", "96", "--iteration-time", "2", "--cluster", "moevement-a100"]


def test_a_sweep_is_reported_drawn_and_given_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
    told = " ".join(out.split())
    assert "--moevement-sparse-ckpt --moevement-window" in told, "whatever is best, flags that can be run are given"
    assert "not proposed, because they lose the updates of experts: moc" in told


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
        (["--mtbf", "0"], "mtbf 0.0; needs more than 0"),
        (["--regroup", "-1"], "regroup -1.0; needs 0 or more"),
        (["--seeds", "0"], "seeds 0, spares None"),
        (["--skew", "2"], "skew 2.0; needs 0 to 1"),
        (["--window", "0"], "window 0; needs at least 1"),
        (["--replicas", "-1"], "replicas -1; needs 0 or more"),
        (["--replicas", "30"], "at most 11 replicas"),
        (["--num-layers", "3"], "--num-layers 3: neither a flag of moevement simulate"),
        (["--mtfb", "600"], "--mtfb 600: neither a flag of moevement simulate"),
        (["--ranks", "100"], "100 ranks with pipeline 3"),
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


def test_what_is_no_scenario_is_named_by_file_and_field(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = yaml.safe_load((SCENARIOS / "gpt_moe.yaml").read_text())
    for change, message in (
        ({"jobs": {}}, "jobs is not known; needs one of"),
        ({"job": {**whole["job"], "layers": 3}}, "job.layers is not known"),
        ({"job": {**whole["job"], "num_layers": "many"}}, "job.num_layers 'many'; needs a number"),
        ({"job": {**whole["job"], "num_layers": 2.5}}, "job.num_layers 2.5; needs a whole number"),
        ({"job": {**whole["job"], "swiglu": 1}}, "job.swiglu 1; needs true or false"),
        ({"job": {**whole["job"], "moe_router_topk": 64}}, "32 experts with"),
        ({"parallel": {"ranks": 96, "pipeline": 3, "expert": 5}}, "96 ranks with expert parallelism 5"),
        ({"parallel": {"pipeline": 3}}, "parallel without ranks"),
        ({"cluster": "moevement-b200"}, "cluster 'moevement-b200'; needs one of moevement-a100"),
        ({"cluster": {"d2h": 1}}, "cluster without gpus_per_node, network"),
        ({"run": {"strategies": ["best"]}}, "strategy 'best'; needs one of none"),
        ({"profile": "nothing.yaml"}, "nothing.yaml"),
        ({"failures": [1]}, "failures [1]; needs fields and values"),
        ({"checkpointing": {"window_kind": "square"}}, "window_kind 'square'; needs one of aligned"),
        ({"cluster": {"preset": "moevement-a100", "speeds": [1, 2]}}, "cluster.speeds [1, 2]; needs pairs"),
        ({"cluster": {"preset": "moevement-a100", "storage": 0}}, "storage bandwidth 0"),
        ({"job": {**whole["job"], "regime": "FP9"}}, "regime 'FP9'"),
    ):
        path = tmp_path / "made.yaml"
        path.write_text(yaml.safe_dump({**whole, **change}))
        with pytest.raises(SystemExit, match="2"):
            main(["simulate", str(path)])
        err = capsys.readouterr().err
        assert "made.yaml" in err, err
        assert message in err, err
        assert len(err.splitlines()) == 1


def test_scales_and_jobs_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["simulate", "qwen_moe", "gpt_moe", "--ranks", "96", "192", "--strategy", "moevement", "--mtbf", "1800"]
    assert main([*words, "--seeds", "2", "--json"]) == 0
    results = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
    assert [(one["job"], one["ranks"]) for one in results] == [
        (job, ranks) for job in ("qwen_moe", "gpt_moe") for ranks in (96, 192)
    ]


def test_workers_draw_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    told = []
    for workers in ("1", "2"):
        words = ["simulate", "gpt_moe", "--mtbf", "1800", "--seeds", "2", "--workers", workers, "--json"]
        assert main(words) == 0
        told.append(capsys.readouterr().out.splitlines()[-1])
    assert told[0] == told[1]
