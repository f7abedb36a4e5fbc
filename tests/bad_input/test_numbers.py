"""Numbers that cannot be, on the command lines of everything that computes or measures."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import yaml

from moevement_cli.simulate import SCENARIOS
from tests.bad_input.command import Row, check, table

NOT_ABOVE_0 = ("nan", "inf", "-inf", "-1", "0")
SCENARIO = "simulate laptop --strategy none --seeds 2 --hours 1"
PLAN = "plan gpt_moe --ranks 96 --iteration-time 2 --cluster moevement-a100"


def rows(command: str, flag: str, values: tuple[str, ...], needs: str) -> list[Row]:
    """One for each value."""
    return [Row(f"{command} {flag}={value}", [needs]) for value in values]


@table(
    *rows(SCENARIO, "--mtbf", NOT_ABOVE_0, "needs more than 0"),
    *rows(SCENARIO, "--hours", NOT_ABOVE_0, "needs more than 0"),
    *rows(SCENARIO, "--speedup", NOT_ABOVE_0, "needs more than 0"),
    *rows(SCENARIO, "--iteration-time", NOT_ABOVE_0, "needs more than 0"),
    *rows(SCENARIO, "--storage-bandwidth", NOT_ABOVE_0, "storage bandwidth"),
    *rows(SCENARIO, "--d2h-bandwidth", NOT_ABOVE_0, "bandwidth from device to host"),
    *rows(SCENARIO, "--network-bandwidth", NOT_ABOVE_0, "network bandwidth"),
    *rows(SCENARIO, "--host-memory", NOT_ABOVE_0, "host memory"),
    *rows(SCENARIO, "--weibull", (*NOT_ABOVE_0, "0.001", "1e9"), "Weibull shape"),
    *rows(SCENARIO, "--together", ("nan", "inf", "-1", "1"), "needs 0 or more, less than 1"),
    *rows(SCENARIO, "--detect", ("nan", "inf", "-1"), "needs 0 or more"),
    *rows(SCENARIO, "--regroup", ("nan", "inf", "-1"), "needs 0 or more"),
    *rows(SCENARIO, "--interference", ("nan", "inf", "-1"), "needs 0 or more"),
    *rows(SCENARIO, "--repair", ("nan", "-1", "-inf"), "needs 0 or more"),
    *rows(SCENARIO, "--skew", ("nan", "inf", "-1", "2"), "needs 0 to 1"),
    *rows(SCENARIO, "--network-share", ("nan", "inf", "-1", "0", "2"), "network share"),
    *rows(SCENARIO, "--gpus-per-node", ("-1", "0"), "GPUs per node"),
    *rows(SCENARIO, "--window", ("-1", "0"), "needs at least 1"),
    *rows(SCENARIO, "--replicas", ("-1", "1000000"), "replicas"),
    *rows(SCENARIO, "--ranks", ("-1", "0", "7"), "ranks"),
    *rows(SCENARIO, "--spares", ("-1",), "spares -1"),
    *rows(SCENARIO, "--seeds", ("-1", "0"), "seeds"),
    *rows(SCENARIO, "--workers", ("-1", "0"), "--workers"),
    *rows(SCENARIO, "--first-seed", ("-1",), "first_seed -1; needs 0 or more"),
    Row(f"{SCENARIO} --mtbf 1e-9", ["mtbf 1e-09", "3.6e+12 failures an hour", "longer mtbf"]),
    Row(f"{SCENARIO} --mtbf 1e-300", ["failures an hour"]),
    Row(f"{SCENARIO} --seeds 100000000", ["in 100000000 trainings", "fewer trainings"]),
    Row(f"{SCENARIO} --hours 1e12 --mtbf 60", ["60 failures an hour", "fewer hours"]),
    Row(f"{SCENARIO} --window 100000", ["window 100000", "no stage has more than"]),
    Row(f"{SCENARIO} --trace /dev/null", ["no failure in 1 hours"]),
    Row(f"{SCENARIO} --trace {{folder}}", ["Is a directory"]),
    Row(f"{SCENARIO} --trace {{trace}}", ["line 1: milliseconds nan"]),
    Row("simulate {not_a_number}", ["run.seeds nan; needs a whole number"]),
    Row("simulate {endless}", ["cluster.gpus_per_node inf; needs a whole number"]),
)
def test_simulate(row: Row, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "trace.csv").write_text("nan,remove,a\n")
    whole = yaml.safe_load((SCENARIOS / "deepseek_32b.yaml").read_text())
    for name, change in (
        ("not_a_number", {"run": {"seeds": math.nan}}), ("endless", {"cluster": {"gpus_per_node": math.inf}}),
    ):  # fmt: skip
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump({**whole, **change}))
    places = {path.stem: path for path in tmp_path.iterdir()}
    check(row, capfd, monkeypatch, folder=tmp_path, **places)


@table(
    *rows(PLAN, "--iteration-time", NOT_ABOVE_0, "--iteration-time"),
    *rows(PLAN, "--d2h-bandwidth", NOT_ABOVE_0, "bandwidth from device to host"),
    *rows(PLAN, "--network-bandwidth", NOT_ABOVE_0, "network bandwidth"),
    *rows(PLAN, "--network-share", ("nan", "inf", "-1", "0", "2"), "network share"),
    *rows(PLAN, "--host-memory", NOT_ABOVE_0, "host memory"),
    *rows(PLAN, "--gpus-per-node", ("-1", "0"), "GPUs per node"),
    *rows(PLAN, "--ranks", ("-1", "0"), "--ranks"),
    *rows(PLAN, "--window", ("-1", "0", "100000"), "window"),
    *rows(PLAN, "--replicas", ("-1", "100000"), "replicas"),
    *rows(PLAN, "--protection", ("x", "parity:0+0", "copies:-1", ""), "needs copies:R"),
    *rows(PLAN, "--regime", ("fp1",), "regime"),
    *rows(PLAN, "--num-layers", ("-3", "x"), "--num-layers"),
    *rows(PLAN, "--num-experts", ("nan",), "--num-experts"),
    Row("plan {folder} --ranks 8 --iteration-time 2 --cluster moevement-a100", ["is no file and no preset"]),
    Row("plan /dev/null --ranks 8 --iteration-time 2 --cluster moevement-a100", ["is no file and no preset"]),
    Row("plan gpt_moe --ranks 8 --iteration-time 1e", ["invalid float value"]),
)
def test_plan(row: Row, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    check(row, capfd, monkeypatch, folder=tmp_path)


@table(
    *rows("elastic {trace}", "--segment", NOT_ABOVE_0, "--segment"),
    *rows("elastic {trace}", "--iteration-s", NOT_ABOVE_0, "--iteration-s"),
    *rows("elastic {trace}", "--bytes-per-s", NOT_ABOVE_0, "--bytes-per-s"),
    *rows("elastic {trace}", "--wait-s", ("nan", "inf", "-1"), "--wait-s"),
    *rows("elastic {trace}", "--expert-share", ("nan", "-1", "2"), "--expert-share"),
    *rows("elastic {trace}", "--skew", ("nan", "inf", "-1", "100"), "--skew"),
    *rows("elastic {trace}", "--layers", ("-1", "0", "1000000000"), "--layers"),
    *rows("elastic {trace}", "--experts", ("-1", "0", "1000000000"), "--experts"),
    *rows("elastic {trace}", "--rebalance-every", ("-1", "0"), "--rebalance-every"),
    Row("elastic {trace} --segment 1e-9", ["--segment 1e-09", "segments"]),
    Row("elastic {folder}", ["Is a directory"]),
    Row("elastic {binary}", ["no text"]),
    Row("elastic {digits}", ["line 1"]),
    Row("elastic {trace} --routing {binary}", ["--routing"]),
    Row("elastic {trace} --routing {folder}", ["--routing"]),
)
def test_elastic(row: Row, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "trace.csv").write_text("0,add,a\n0,add,b\n3600000,remove,a\n")
    (tmp_path / "digits.csv").write_text("\u00b2,add,a\n")
    (tmp_path / "binary").write_bytes(bytes(range(256)))
    places = {path.stem: path for path in tmp_path.iterdir()}
    check(row, capfd, monkeypatch, folder=tmp_path, **places)


@table(
    *rows("bench overhead", "--nproc", ("-1", "1"), "--nproc"),
    *rows("bench overhead", "--window", ("-1", "0"), "--window"),
    *rows("bench overhead", "--micro-batches", ("-1", "0"), "--micro-batches"),
    *rows("bench overhead", "--blocks", ("-1", "1"), "--blocks"),
    *rows("bench replay", "--nproc", ("-1", "0"), "--nproc"),
    *rows("bench replay", "--micro-batches", ("-1", "0"), "--micro-batches"),
    *rows("bench replay", "--steps", ("-1", "0"), "--steps"),
    *rows("bench recovery", "--stages", ("-1", "1"), "--stages"),
    *rows("bench recovery", "--kills", ("-1",), "--kills"),
    *rows("bench ettr", "--mtbf", NOT_ABOVE_0, "--mtbf"),
    *rows("bench ettr", "--speedup", NOT_ABOVE_0, "--speedup"),
    *rows("bench ettr", "--seed", ("-1",), "--seed"),
    *rows("bench ettr", "--spares", ("-1",), "--spares"),
    *rows("bench ettr", "--iterations", ("-1", "0"), "--iterations"),
    Row("bench ettr --mtbf 1e-9", ["failures an hour"]),
    Row("bench ettr --config {folder}", ["--config"]),
    Row("bench ettr --scenario {folder}", ["Is a directory"]),
    *(Row(f"profile --nproc 1 --iterations={value} {{script}}", ["--iterations"]) for value in ("-1", "0")),
    Row("profile --nproc 0 {script}", ["--nproc 0"]),
    Row("profile --nproc 1 --output {folder} {script}", ["--output {folder}: is a folder"]),
    Row("profile --nproc 1 --output {script}/x.yaml {script}", ["--output {script}/x.yaml: "]),
    Row("profile --micro-batch-sizes 0 --nproc 1 {script}", ["--micro-batch-sizes 0"]),
    Row("profile --nproc 1 --storage {script} {script}", ["--storage {script}"]),
    Row("profile --nproc 1 {folder}/none.py", ["none.py: no such training script"]),
)
def test_measuring(
    row: Row, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text("raise SystemExit('it was started')\n")
    check(row, capfd, monkeypatch, folder=tmp_path, script=tmp_path / "script.py")


@table(
    *(Row(f"launch --nproc={value} {{script}}", ["--nproc"]) for value in ("-1", "0", "x")),
    *(Row(f"launch --nproc 1 --spares={value} {{script}}", ["--spares"]) for value in ("-1", "x")),
    *(Row(f"launch --nproc 1 --spare-timeout={value} {{script}}", ["--spare-timeout"]) for value in ("-1", "nan", "x")),
    *(Row(f"launch --nproc 1 --respawn-after={value} {{script}}", ["--respawn-after"]) for value in ("-1", "nan", "x")),
    *(Row(f"launch --nproc 1 --ranks-per-node={value} {{script}}", ["--ranks-per-node"]) for value in ("-1", "0", "x")),
    Row("launch --nproc 1 {folder}/none.py", ["none.py: no such training script"]),
    Row("launch --nproc 1 {folder}", ["no such training script"]),
    Row("launch --nproc 1 {script} --config", ["--config: needs the path"]),
    Row("launch --nproc 1 {script} --config {folder}", ["--config {folder}"]),
    Row("launch --nproc 1 {script} --config {script}", ["--config {script}"]),
    Row("launch --nproc 1 {script} --run-dir {script}/run", ["--run-dir {script}/run"]),
    Row("launch --nproc 1 {script} --run-dir {script}", ["--run-dir {script}"]),
    *(Row(f"coordinate --ranks={value}", ["--ranks"]) for value in ("-1", "0", "x")),
    *(Row(f"coordinate --ranks 1 --port={value}", ["--port"]) for value in ("-1", "65536", "99999999999", "x")),
    *(Row(f"coordinate --ranks 1 --spare-timeout={value}", ["--spare-timeout"]) for value in ("nan", "-1", "x")),
    *(Row("coordinate --ranks 1 --host", ["--host"], more=(value,)) for value in ("", " ", "no.such.host.invalid")),
    Row("coordinate --ranks 1 --run-dir", ["empty path"], more=("",)),
    Row("coordinate --ranks 1 --run-dir {script}", ["--run-dir {script}"]),
    Row("coordinate --ranks 1 -- true", ["without --nodes"]),
    Row("coordinate --ranks 1 --nodes a --tasks-per-node 0 -- true", ["--tasks-per-node 0"]),
    Row("coordinate --ranks 1 --nodes , -- true", ["--nodes"]),
)
def test_launching(
    row: Row, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text("- not\n  flags: [\n")
    check(row, capfd, monkeypatch, folder=tmp_path, script=tmp_path / "script.py")
