"""Invalid numbers and files on the command lines of all commands that compute, measure or launch.

There is one row for each kind of check that a command makes. tests/unit/cli/test_command_ranges.py tries every flag,
and both ends of its range.
"""

from __future__ import annotations

import errno
import math
from pathlib import Path

import pytest
import yaml

from moevement_cli.simulate import SCENARIOS
from tests.bad_input.command import Reason, Row, check, named_in_plan, named_in_simulate, table

SCENARIO = "simulate laptop --strategy none --seeds 2 --hours 1"
TRACED = "simulate laptop --strategy none --hours 1"
PLAN = "plan gpt_moe --ranks 96 --iteration-time 2 --cluster moevement-a100"
IS_A_FOLDER, EXISTS = Reason(errno.EISDIR), Reason(errno.EEXIST)


def number(command: str, flag: str, value: float, *bounds: float) -> Row:
    """Return a row for a number that is out of range; its message names the flag, the number and ``bounds``."""
    named = next(
        (names for begins, names in ((SCENARIO, named_in_simulate), (PLAN, named_in_plan)) if begins in command), None
    )
    needs = [flag, value] if named is None else named(flag, value)
    return Row(f"{command} {flag}={value}", [*needs, *bounds])


def text(command: str, flag: str, value: str) -> Row:
    """Return a row for a value that is not a number."""
    return Row(f"{command} {flag}={value}", [flag, f"'{value}'"])


@table(
    number(SCENARIO, "--hours", math.nan, 0),
    number(SCENARIO, "--mtbf", 0.0, 0),
    number(SCENARIO, "--detect", math.inf, 0),
    number(f"{SCENARIO} --spares 1", "--repair", -1.0, 0, math.inf),
    number(SCENARIO, "--skew", 2.0, 0, 1),
    number(SCENARIO, "--first-seed", -1, 0),
    number(SCENARIO, "--storage-bandwidth", -1.0, 0),
    number(SCENARIO, "--d2h-bandwidth", -math.inf, 0),
    number(SCENARIO, "--network-share", 2.0, 0, 1),
    number(SCENARIO, "--gpus-per-node", 0, 1),
    number(SCENARIO, "--weibull", 0.001, 0.1, 100),
    number(SCENARIO, "--together", 1.0, 0, 1),
    number(SCENARIO, "--window", 0, 1),
    number(SCENARIO, "--replicas", -1, 0),
    number(SCENARIO, "--ranks", -1, 1),
    number(SCENARIO, "--spares", -1, 0),
    number(SCENARIO, "--seeds", 0, 1),
    number(SCENARIO, "--workers", 0, 1),
    number(SCENARIO, "--ranks", 7, 2),
    number(SCENARIO, "--replicas", 1_000_000, 3),
    number(SCENARIO, "--window", 100_000, 13),
    number(SCENARIO, "--mtbf", 1e-9, 3.6e12, 1_000_000),
    number(SCENARIO, "--mtbf", 1e-300, 3.6e303, 1_000_000),
    text(SCENARIO, "--hours", "x"),
    Row(f"{SCENARIO} --seeds 100000000", ["mtbf", 100_000_000, 1_000_000]),
    Row(f"{SCENARIO} --hours 1e12 --mtbf 60", ["mtbf", 60, 1e12, 1_000_000]),
    Row(f"{TRACED} --trace /dev/null", ["trace", "/dev/null", "no failure", 1]),
    Row(f"{TRACED} --trace {{folder}}", ["trace", "{folder}", IS_A_FOLDER]),
    Row(f"{TRACED} --trace {{trace}}", ["{trace}", "line 1", math.nan, 0]),
    Row("simulate {not_a_number}", ["{not_a_number}", "run.seeds", math.nan]),
    Row("simulate {endless}", ["{endless}", "cluster.gpus_per_node", math.inf]),
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
    number(PLAN, "--iteration-time", math.nan, 0),
    number(PLAN, "--network-bandwidth", -1.0, 0),
    number(PLAN, "--network-share", 0.0, 1),
    number(PLAN, "--gpus-per-node", 0, 1),
    number(PLAN, "--ranks", 0, 1),
    number(PLAN, "--window", -1, 1),
    number(PLAN, "--replicas", -1, 0),
    number(PLAN, "--num-layers", -3, 1),
    text(PLAN, "--num-layers", "x"),
    text(PLAN, "--iteration-time", "1e"),
    Row(f"{PLAN} --window=100000", ["window", 100_000, 26]),
    Row(f"{PLAN} --replicas=100000", ["replicas", 100_000, 11]),
    Row(f"{PLAN} --protection=x", ["--protection", "x", "copies:R", "parity:G+M"]),
    Row(f"{PLAN} --regime=fp1", ["regime", "'fp1'", "mixed"]),
    Row("plan {folder} --ranks 8 --iteration-time 2 --cluster moevement-a100", ["'{folder}'", "gpt_moe"]),
    Row("plan /dev/null --ranks 8 --iteration-time 2 --cluster moevement-a100", ["'/dev/null'", "gpt_moe"]),
)
def test_plan(row: Row, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    check(row, capfd, monkeypatch, folder=tmp_path)


@table(
    number("elastic {trace}", "--segment", math.nan, 0),
    number("elastic {trace}", "--iteration-s", math.inf, 0),
    number("elastic {trace}", "--rebalance-every", 0, 0),
    number("elastic {trace}", "--wait-s", -1.0, 0),
    number("elastic {trace}", "--expert-share", 2.0, 0, 1),
    number("elastic {trace}", "--skew", 100.0, 0, 99),
    number("elastic {trace}", "--layers", 1_000_000_000, 1, 10_000),
    number("elastic {trace}", "--experts", 1_000_000_000, 10, 6),
    number("elastic {trace}", "--segment", 1e-9, 100_000),
    text("elastic {trace}", "--skew", "x"),
    Row("elastic {folder}", ["{folder}", IS_A_FOLDER]),
    Row("elastic {binary}", ["{binary}", "text"]),
    Row("elastic {digits}", ["{digits}", "line 1", "'\u00b2,add,a'"]),
    Row("elastic {trace} --routing {binary}", ["--routing", "{binary}", "tokens_per_expert"]),
    Row("elastic {trace} --routing {folder}", ["--routing", "{folder}", IS_A_FOLDER]),
)
def test_elastic(row: Row, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "trace.csv").write_text("0,add,a\n0,add,b\n3600000,remove,a\n")
    (tmp_path / "digits.csv").write_text("\u00b2,add,a\n")
    (tmp_path / "binary").write_bytes(bytes(range(256)))
    places = {path.stem: path for path in tmp_path.iterdir()}
    check(row, capfd, monkeypatch, folder=tmp_path, **places)


@table(
    number("bench overhead", "--nproc", 1, 2),
    number("bench overhead", "--window", 0, 1),
    number("bench overhead", "--micro-batches", -1, 1),
    number("bench overhead", "--blocks", 1, 2),
    text("bench overhead", "--window", "1.5"),
    number("bench replay", "--nproc", -1, 1),
    number("bench replay", "--micro-batches", 0, 1),
    number("bench recovery", "--stages", 1, 2),
    number("bench recovery", "--kills", -1, 0),
    number("bench ettr", "--mtbf", math.nan, 0),
    number("bench ettr", "--speedup", 0.0, 0),
    number("bench ettr", "--seed", -1, 0),
    number("bench ettr", "--iterations", 0, 1),
    Row("bench ettr --mtbf 1e-9", ["mtbf", 1e-9, 3.6e12, 1_000_000]),
    Row("bench ettr --config {folder}", ["--config", "{folder}", IS_A_FOLDER]),
    Row("bench ettr --scenario {folder}", ["{folder}", IS_A_FOLDER]),
    number("drill", "--kill", 4, 4),
    number("top {folder}", "--interval", 0.0, 0),
    Row("profile --nproc 1 --iterations=0 {script}", ["--iterations", 0, 8]),
    Row("profile --nproc 0 {script}", ["--nproc", 0, 1]),
    Row("profile --micro-batch-sizes 0 --nproc 1 {script}", ["--micro-batch-sizes", 0, 1]),
    Row("profile --nproc 1 --output {folder} {script}", ["--output", "{folder}", "a folder"]),
    Row("profile --nproc 1 --output {script}/x.yaml {script}", ["--output", "{script}/x.yaml", EXISTS]),
    Row("profile --nproc 1 --storage {script} {script}", ["--storage", "{script}", "no folder"]),
    Row("profile --nproc 1 {folder}/none.py", ["{folder}/none.py", "no such"]),
)
def test_measuring(
    row: Row, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text("raise SystemExit('it was started')\n")
    check(row, capfd, monkeypatch, folder=tmp_path, script=tmp_path / "script.py")


@table(
    Row("launch --nproc=0 {script}", ["--nproc", 0, 1]),
    Row("launch --nproc=x {script}", ["--nproc", "'x'"]),
    Row("launch --nproc 1 --spares=-1 {script}", ["--spares", -1, 0]),
    Row("launch --nproc 1 --ranks-per-node=0 {script}", ["--ranks-per-node", 0, 1]),
    Row("launch --nproc 1 --spare-timeout=nan {script}", ["--spare-timeout", math.nan, 0, math.inf]),
    Row("launch --nproc 1 --respawn-after=-1 {script}", ["--respawn-after", -1, 0, math.inf]),
    Row("launch --nproc 1 --respawn-after=x {script}", ["--respawn-after", "'x'"]),
    Row("launch --nproc 1 {folder}/none.py", ["{folder}/none.py", "no such"]),
    Row("launch --nproc 1 {folder}", ["{folder}", "no such"]),
    Row("launch --nproc 1 {script} --config", ["--config", "YAML"]),
    Row("launch --nproc 1 {script} --config {folder}", ["--config", "{folder}", IS_A_FOLDER]),
    Row("launch --nproc 1 {script} --config {script}", ["--config", "{script}", "YAML", "line 2"]),
    Row("launch --nproc 1 {script} --run-dir {script}/run", ["--run-dir", "{script}/run", Reason(errno.ENOTDIR)]),
    Row("launch --nproc 1 {script} --run-dir {script}", ["--run-dir", "{script}", EXISTS]),
    number("coordinate", "--ranks", 0, 1),
    text("coordinate", "--ranks", "x"),
    number("coordinate --ranks 1", "--port", -1, 0, 65535),
    number("coordinate --ranks 1", "--port", 99_999_999_999, 0, 65535),
    number("coordinate --ranks 1", "--spare-timeout", math.nan, 0, math.inf),
    Row("coordinate --ranks 1 --host", ["--host", "''"], more=("",)),
    Row("coordinate --ranks 1 --host", ["--host", "' '"], more=(" ",)),
    Row("coordinate --ranks 1 --host no.such.host.invalid", ["--host", "no.such.host.invalid"]),
    Row("coordinate --ranks 1 --run-dir", ["--run-dir", "''"], more=("",)),
    Row("coordinate --ranks 1 --run-dir {script}", ["--run-dir", "{script}", EXISTS]),
    Row("coordinate --ranks 1 -- true", ["without --nodes"]),
    Row("coordinate --ranks 1 --nodes a --tasks-per-node 0 -- true", ["--tasks-per-node", 0, 1]),
    Row("coordinate --ranks 1 --nodes , -- true", ["--nodes", ","]),
)
def test_launching(
    row: Row, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text("- not\n  flags: [\n")
    check(row, capfd, monkeypatch, folder=tmp_path, script=tmp_path / "script.py")
