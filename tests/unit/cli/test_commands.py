"""Help of every command, messages for wrong words before any work begins, and the report of runs."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from megatron.moevement.preflight.early import refuse_early
from moevement_cli.examples import EXAMPLES
from moevement_cli.main import COMMANDS, main
from moevement_cli.run_facts import UNKNOWN, RunFacts, names
from moevement_cli.saving_costs import NotMeasured
from moevement_core.errors import ConfigError
from moevement_core.overhead.fields import FIELDS
from moevement_core.util.process_identity import machine_id
from moevement_core.util.versions import versions
from moevement_core.util.words import counted
from tests.unit.monitoring.runs import BEGAN_AT, job, line, recovered_run

LAPTOP = ["pretrain_gpt.py", "--config", str(EXAMPLES / "pretrain_moe" / "configs" / "laptop.yaml")]


def printed(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 0
    return capsys.readouterr().out


def refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Return the only line that a command prints to standard error before it ends with code 2."""
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    return error


def test_the_version_is_that_of_everything_a_bug_report_needs(capsys: pytest.CaptureFixture[str]) -> None:
    line = printed(["--version"], capsys)
    assert line.split()[0] == "moevement"
    assert {"moevement", "megatron-core", "torch", "NVRx", "Python"} == versions().keys()
    assert all(f"{name} {version}" in line for name, version in versions().items())


def test_help_lists_every_command_in_a_group(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(["--help"], capsys).splitlines()
    groups = {"run": "launch", "look": "top", "size": "plan", "test": "bench"}
    for group, first in groups.items():
        assert lines[lines.index(f"  {group}:") + 1].split()[0] == first
    listed = {line.split()[0] for line in lines if re.match(r" {4}\w", line)}
    assert listed == set(COMMANDS)
    assert sum(line.startswith("  moevement ") for line in lines) == 3


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command_has_a_sentence(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    usage, sentence, *_ = printed([command, "--help"], capsys).split("\n\n")
    assert usage.startswith(f"usage: moevement {command}")
    assert re.search(r"[.:]\s*$", sentence)


def test_help_of_launch_says_where_the_flags_of_fault_tolerance_are(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(["launch", "--help"], capsys)
    assert "--moevement-sparse-ckpt" in text
    assert "docs/flags.md" in text


def test_choices_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    error = refused(["drill", "--flip", "nonsense"], capsys)
    assert "'copies'" in error
    assert "FlipKind" not in error


def test_a_run_is_not_compared_with_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = recovered_run(tmp_path / "run").folder
    (tmp_path / "link").symlink_to(run)
    assert str(tmp_path / "link") in refused(["verify", str(run), str(tmp_path / "link")], capsys)
    other = recovered_run(tmp_path / "other").folder
    assert main(["verify", str(run), str(other)]) == 0


@pytest.mark.parametrize(
    ("flag", "file", "pattern"),
    [
        ("--plot", "{}/x.gif", r"\.gif\b.*\.png\b.*\.svg\b.*\.pdf\b"), ("--plot", "{}/x", r"\.png\b"),
        ("--plot", "/nonexist/x.png", r"/nonexist(?!/)"), ("--html", "/nonexist/x.html", r"/nonexist(?!/)"),
        ("--trace", "/nonexist/deep/x.json", r"/nonexist(?!/)"),
    ],
)  # fmt: skip
def test_files_are_looked_at_first(
    flag: str, file: str, pattern: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, path = recovered_run(tmp_path / "run").folder, Path(file.format(tmp_path))
    assert re.search(
        f"{re.escape(f'{flag} {path}')}.*{pattern}", refused(["report", str(run), flag, str(path)], capsys)
    )
    assert not path.exists()
    assert not Path("/nonexist").exists()


def test_a_folder_of_runs_stands_for_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = [str(recovered_run(tmp_path / name).folder) for name in ("first", "second")]
    (tmp_path / "notes").mkdir()
    assert all(name in refused(["top", str(tmp_path)], capsys) for name in folders)
    assert main(["report", str(tmp_path), "--json"]) == 0
    runs = json.loads(capsys.readouterr().out.splitlines()[-1])["runs"]
    assert [run["run"] for run in runs] == folders


def test_a_short_run_of_the_laptop_preset_is_not_refused() -> None:
    for iterations in ("12", "2"):
        refuse_early([*LAPTOP, "--train-iters", iterations], 4)


@pytest.mark.parametrize(
    ("words", "ranks", "pattern"),
    [
        (["--lr-warmup-iters", "15", "--train-iters", "12"], 4, r"--lr-warmup-iters 15\b.*--train-iters 12\b"),
        (["--lr-warmup-iters=15", "--lr-decay-iters=9"], 4, r"--lr-warmup-iters 15\b.*--lr-decay-iters 9\b"),
        ([], 3, r"\b3\b.*--pipeline-model-parallel-size 2\b"),
        (["--expert-model-parallel-size", "4"], 4, r"--expert-model-parallel-size 4\b.*\b8\b"),
    ],
)
def test_what_flags_alone_rule_out_starts_no_rank(
    words: list[str], ranks: int, pattern: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match=pattern):
        refuse_early([*LAPTOP, *words], ranks)
    script = str(EXAMPLES / "pretrain_moe" / "pretrain_gpt.py")
    launch = ["launch", "--nproc", str(ranks), script, *LAPTOP[1:], *words, "--run-dir", str(tmp_path / "run")]
    assert re.search(pattern, refused(launch, capsys))
    assert not (tmp_path / "run").exists()


def test_what_later_files_decide_is_left_to_the_ranks() -> None:
    for words in (["--use-checkpoint-args"], ["--yaml-cfg", "x.yaml"], ["--train-iters", "many"]):
        refuse_early([*LAPTOP, *words, "--lr-warmup-iters", "500"], 3)


def test_numbers_have_their_nouns() -> None:
    assert [counted(number, "spare") for number in (0, 1, 2)] == ["0 spares", "1 spare", "2 spares"]
    assert counted(1000, "process", "processes") == "1,000 processes"


def test_a_report_of_a_run_that_was_refused_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = recovered_run(tmp_path / "run")
    run.metrics_path.unlink()
    run.write_job(job(ended_at=BEGAN_AT, code=2, reason="--lr 0: needs more"))
    assert "--lr 0: needs more" in refused(["report", str(run.folder)], capsys)


def test_a_report_says_what_runs_come_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Check a report in eighty columns, with the whole name of each run and, with --verbose, each recovery in full."""
    called = ["a_first_run_of_a_long_name", "a_second_run_of_a_long_name"]
    runs = [str(recovered_run(tmp_path / name).folder) for name in called]
    assert main(["report", *runs, "--verbose", "--json"]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    rows = {line[:15].strip(): line[15:].split() for line in lines}
    assert lines[0].startswith("Equal")
    assert rows["run"] == called
    assert rows["ETTR"] == ["62.5%", "62.5%"]
    assert rows["iteration time"] == ["1.000", "s", "1.000", "s"]
    assert rows["recoveries"][:3] == ["1", "(4.0", "s,"]
    assert rows["saving costs"] == ["2.0%", "(1.0%", "to", "3.0%)"] * 2
    shares = {"copies": "0.4%", "digests": "0.3%", "sends": "1.0%", "policy": "0.1%", "stalls": "0.2%"}
    assert {name: rows[name] for name in shares} == {name: [share] * 2 for name, share in shares.items()}
    assert rows["state digest"] == ["ab", "the", "same"]
    assert sum("leaving" in line or "fed " in line for line in lines) == 2
    values = json.loads(last)["runs"][0]
    assert (values["effective"], values["recoveries"], values["lost_s"], values["replayed"]) == (0.625, 1, 4.0, 2)
    assert (values["overhead"]["iteration"], values["overhead"]["share"]) == (10, 0.02)
    assert (values["overhead"]["parts"]["send"], values["overhead_missing"]) == (0.01, None)
    assert values["origin"]["command"] == job().command
    assert max(len(line) for line in lines if not line.startswith(tuple(called)) and line != lines[0]) <= 80


def test_a_report_says_why_nothing_was_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [recovered_run(tmp_path / name) for name in ("measured", "short", "plain")]
    for run, left_out in zip(runs[1:], (FIELDS, line(1).keys() - {"iteration", "loss", "time"}), strict=True):
        records = [
            {name: value for name, value in record.items() if name not in left_out} for record in run.metrics()[:5]
        ]
        run.metrics_path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    assert main(["report", *(str(run.folder) for run in runs), "--json"]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    values = json.loads(last)["runs"]
    assert [value["overhead_missing"] for value in values] == [None, NotMeasured.TOO_SHORT, NotMeasured.NO_CHECKPOINTS]
    assert [value["overhead"] is None for value in values] == [False, True, True]
    assert [line.split(":")[0] for line in lines if line.startswith(("short:", "plain:"))] == ["short", "plain"]
    assert any(row.split()[:3] == ["sends", "1.0%", UNKNOWN] for row in lines)
    assert main(["report", str(runs[1].folder)]) == 0
    assert not any(row.split()[:1] == ["sends"] for row in capsys.readouterr().out.splitlines())


def test_a_plot_has_what_saving_costs_where_it_was_measured(tmp_path: Path) -> None:
    run, plot = recovered_run(tmp_path / "run"), tmp_path / "run.svg"
    for axes, bands in ((3, 1), (2, 0)):
        assert main(["report", str(run.folder), "--plot", str(plot)]) == 0
        drawn = plot.read_text()
        assert len(re.findall(r'id="axes_\d+"', drawn)) == axes
        assert len(re.findall(r'id="FillBetweenPolyCollection_\d+"', drawn)) == bands
        lines = [{name: value for name, value in record.items() if name not in FIELDS} for record in run.metrics()]
        run.metrics_path.write_text("".join(f"{json.dumps(record)}\n" for record in lines))


def test_a_report_tells_a_killed_run_from_one_that_goes_on(tmp_path: Path) -> None:
    run = recovered_run(tmp_path, has_ended=False)
    going = RunFacts(run).state
    run.write_job(job(machine=machine_id(), pid=os.getpid(), started="0"))
    killed = RunFacts(run).state
    run.write_job(job(ended_at=BEGAN_AT, code=1, reason="rank 2 failed"))
    assert len({going, killed, RunFacts(run).state}) == 3
    assert RunFacts(run).state.endswith(": rank 2 failed")


def test_names_of_runs_are_as_long_as_it_takes(tmp_path: Path) -> None:
    assert names([tmp_path / "a" / "x", tmp_path / "b" / "x"]) == ["a/x", "b/x"]
    assert names([tmp_path / "a" / "x", tmp_path / "b" / "y"]) == ["x", "y"]
    assert names([tmp_path / "x", tmp_path / "x"]) == ["x", "x"]
