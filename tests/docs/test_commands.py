"""Every command in README and docs parses, and a test runs it or a comment says why none does."""

from __future__ import annotations

import argparse
import ast
import os
import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from megatron.moevement.arguments import add_arguments
from moevement_cli import main as cli
from moevement_core.launching import config_file
from tests.docs.commands import PAGES, Command, blocks, commands, is_for_a_shell
from tests.training import ROOT

ALL = [command for page in PAGES for command in commands(page)]

HERE = {
    r"moevement plan .*": (),
    r"moevement simulate .*": ("--seeds", "1", "--hours", "1"),
    r"moevement advise .*": ("--seeds", "2"),
    r"moevement elastic .*": (),
}
"""Patterns of cheap commands that this file runs, with the flags that make them cheaper."""

IN_CI = r"make (lint|test|docs|test-packaging|check-durations|test-cluster)"
"""Pattern of the commands that .ci/run runs."""

ELSEWHERE = {
    r"source \.venv/bin/activate": "tests/docs/test_commands.py::test_the_environment_is_activated",
    r"moevement launch --trainer torch .* examples/torchtitan/train.py .*":
        "tests/packaging/test_torchtitan.py::test_lost_shards_come_back",
    r"moevement launch --trainer bridge .* qwen3_30b_a3b_pretrain_config .*":
        "tests/functional/test_bridge.py::test_a_recipe_by_name_recovers",
    r"moevement launch --trainer bridge .*":
        "tests/functional/test_bridge.py::test_ranks_are_killed_around_saves_and_nothing_is_different",
    r"moevement launch .* --spares 1 .* --moevement-sparse-ckpt .*":
        "tests/functional/test_kills.py::test_a_rank_killed_in_every_phase_of_an_iteration",
    r"moevement launch .* --spares \d .* --moevement-inject rank=\d,iteration=\d+,phase=backward":
        "tests/functional/test_kills.py::test_a_rank_killed_in_every_phase_of_an_iteration",
    r"moevement launch .* --spares \d .* --moevement-inject .* --moevement-inject rank=1,phase=replay":
        "tests/functional/test_kills.py::test_failures_during_a_recovery",
    r"moevement launch .* --moevement-wipe-at 7 20":
        "tests/functional/test_recovery.py::test_a_wiped_job_comes_back_bit_for_bit",
    r"moevement launch --nproc 4 \S+ --config \S+ --train-iters 30 --run-dir runs/whole":
        "tests/functional/test_launch.py::test_forked_and_fresh_ranks_are_the_same_run",
    r"moevement launch .* --moevement-persist-dir (\S+) --moevement-load \1":
        "tests/functional/test_persisted_windows.py::"
        "test_a_newer_dense_checkpoint_wins_and_an_empty_folder_is_a_fresh_start",
    r"moevement launch .* --moevement-persist-dir (file://\S+) --moevement-load \1":
        "tests/functional/test_object_stores.py::test_a_megatron_job_goes_on_from_a_url",
    r"moevement verify \S+ \S+ .*--fixed-environment":
        "tests/determinism/test_gates.py::test_the_gates_as_a_user_runs_them",
    r"moevement launch .* --deterministic-mode .*":
        "tests/determinism/test_gates.py::test_the_gates_as_a_user_runs_them",
    r"moevement drain runs/mine.*": "tests/functional/test_drain.py::test_a_node_is_drained_and_comes_back",
    r"moevement export \S+ --to \S+ --iteration \d+ .*":
        "tests/functional/test_export.py::test_a_window_becomes_a_dense_checkpoint_that_another_layout_loads",
    r"moevement windows \S+": "tests/functional/test_rollback.py::test_a_job_goes_back_to_a_window_of_choice",
    r"moevement launch .* --moevement-load \S+ --moevement-load-iteration \d+":
        "tests/functional/test_rollback.py::test_a_job_goes_back_to_a_window_of_choice",
    r"moevement launch .* --moevement-rollback-on-spike \S+ .*":
        "tests/functional/test_loss_spikes.py::"
        "test_megatron_goes_back_and_saves_no_dense_checkpoint_of_what_it_left",
    r"moevement launch .* --moevement-elastic .* --moevement-expert-slots .*":
        "tests/functional/test_elastic.py::test_elastic_experts_go_on_with_fewer_ranks_as_a_fresh_job_would",
    r"moevement launch --trainer torch .* --moevement-audit-interval 5 .*":
        "tests/functional/test_audits.py::test_a_flip_of_each_part_is_found_and_its_rank_named",
    r"moevement launch --trainer torch .*":
        "tests/functional/test_plain_torch.py::test_ranks_are_killed_and_nothing_is_different",
    r"moevement verify \S+ \S+": "tests/unit/run/test_run_record.py",
    r"moevement report .*": "tests/functional/test_kills.py::test_a_rank_killed_in_every_phase_of_an_iteration",
    r"moevement top \S+.*": "tests/unit/monitoring/test_top.py",
    r"moevement data build .*": "tests/unit/megatron/test_token_files.py::test_the_command",
    r"moevement drill.*": "tests/functional/test_drill.py::test_two_ranks",
    r"python -m tests\.simulation .*": "tests/unit/harness/test_simulation.py",
    r"make dist": "tests/packaging/test_distributions.py::test_two_builds_give_equal_bytes",
    r"moevement profile .*": "tests/functional/test_profile.py::test_a_run_is_measured_and_simulated",
}  # fmt: skip
"""Patterns of commands that are too slow for this file, with the test that runs the same command."""


class _Refusing(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        raise ValueError(message)


@cache
def _flags() -> argparse.ArgumentParser:
    """Return a parser of Megatron's and this project's flags that raises an error instead of exiting."""
    from megatron.training.arguments import add_megatron_arguments

    return add_arguments(add_megatron_arguments(_Refusing(allow_abbrev=False)))


def _is_understood(command: Command) -> None:
    """Raise an error if the program of a command would not accept its words."""
    program, *words = command.words
    if program == "moevement":
        _subcommand(words)
    elif program == "sbatch":
        script = next(place for place, word in enumerate(words) if not word.startswith("-"))
        _training(words[script], words[script + 1 :])
    elif program == "make":
        subprocess.run(["make", "--dry-run", *words], cwd=ROOT, check=True, capture_output=True)
    elif program == "docker":
        assert (ROOT / "Dockerfile").is_file()
    elif program == "python":
        path = Path(*words[1].split(".")) if words[0] == "-m" else Path(words[0])
        assert any((ROOT / path.with_suffix(suffix)).exists() for suffix in ("", ".py"))
    elif program != "source":
        raise ValueError(f"{program}: no command that this test knows")


def _subcommand(words: list[str]) -> None:
    arguments, others = cli._parser(words).parse_known_args(words)
    if words[0] == "drill":
        assert not others
        if arguments.job:
            _training(arguments.job[1], arguments.job[2:])
        return
    if words[0] in ("launch", "profile"):
        assert not others
        if getattr(arguments, "trainer", "megatron") == "megatron":
            _training(arguments.script, arguments.arguments)
        return
    assert not others or hasattr(arguments, "flags"), others
    _flags().parse_args(others)


def _training(script: str, words: list[str]) -> None:
    if script != "SCRIPT":  # the placeholder in a line that shows the syntax
        assert (ROOT / script).is_file(), script
        _flags().parse_args(config_file.expand(words))


def _matches(command: Command, pattern: str) -> bool:
    return re.fullmatch(pattern, shlex.join(command.words)) is not None


def _runs_somewhere(command: Command) -> bool:
    return any(_matches(command, pattern) for pattern in (*HERE, *ELSEWHERE, IN_CI))


@pytest.fixture(autouse=True)
def _in_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def test_there_are_commands() -> None:
    assert {"README.md", "laptop.md", "cluster.md", "recovery.md", "simulator.md"} <= {
        command.page.name for command in ALL
    }


@pytest.mark.parametrize("command", ALL, ids=str)
def test_a_command_is_understood(command: Command) -> None:
    _is_understood(command)


@pytest.mark.parametrize(
    "words",
    [
        "moevement plan deepseek_moe --ranks 96 --iteration-time 2.75 --clutser moevement-a100",
        "moevement verify a b c",
        "moevement launch --nproc 4 examples/pretrain_moe/pretrain_gpt.py --moevement-windows 3",
        "moevement launch --nproc 4 examples/pretrain_moe/pretrain.py",
        "make demonstration",
        "python scripts/tables_of_flags.py",
    ],
)
def test_a_command_that_is_not_there_is_not_understood(words: str) -> None:
    with pytest.raises((ValueError, SystemExit, AssertionError, subprocess.CalledProcessError)):
        _is_understood(Command(ROOT / "README.md", 1, tuple(words.split()), ""))


def test_every_command_is_run_or_says_why_not() -> None:
    assert not [str(command) for command in ALL if not command.excuse and not _runs_somewhere(command)]


def test_no_excuse_is_left_of_what_is_run() -> None:
    excused = {(command.page, command.excuse) for command in ALL if command.excuse}
    needed = {(command.page, command.excuse) for command in ALL if command.excuse and not _runs_somewhere(command)}
    assert excused == needed


def test_every_block_is_for_a_shell_or_says_what_it_is() -> None:
    """Check that no command is overlooked in a block whose first line is no command."""
    for page in PAGES:
        for block in blocks(page.read_text(encoding="utf-8")):
            typed = [
                line for line in block.lines if re.match(r"\s*(moevement [a-z]+ -|make [a-z]|sbatch -|\$L )", line)
            ]
            assert not typed or is_for_a_shell(block) or block.language == "text", f"{page.name}:{block.line}: {typed}"


def test_the_tests_that_run_them_are_there() -> None:
    for where in ELSEWHERE.values():
        file, _, name = where.partition("::")
        functions = {
            node.name for node in ast.parse((ROOT / file).read_text()).body if isinstance(node, ast.FunctionDef)
        }
        assert not name or name in functions, where


def test_nothing_is_in_the_tables_that_no_page_shows() -> None:
    for pattern in (*HERE, *ELSEWHERE):
        assert any(_matches(command, pattern) for command in ALL), pattern


def test_ci_runs_what_it_is_said_to_run() -> None:
    lines = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    shown = {shlex.join(command.words) for command in ALL if _matches(command, IN_CI)}
    assert shown <= set(lines)


@pytest.mark.builds
@pytest.mark.parametrize(
    "text",
    sorted({shlex.join(command.words) for command in ALL if any(_matches(command, pattern) for pattern in HERE)}),
)
def test_a_cheap_command_runs(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (less,) = (less for pattern, less in HERE.items() if re.fullmatch(pattern, text))
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    assert cli.main([*shlex.split(text)[1:], *less]) == 0


def test_the_environment_is_activated() -> None:
    activate = Path(sys.prefix) / "bin" / "activate"
    done = subprocess.run(
        ["bash", "-c", f"source {shlex.quote(str(activate))} && command -v moevement"],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    assert done.stdout.strip() == str(Path(sys.prefix) / "bin" / "moevement")


def test_clean_leaves_runs_of_a_users_own(tmp_path: Path) -> None:
    created = [tmp_path / name for name in (".venv", "site", "runs/demo", "runs/tests")]
    own = [tmp_path / name for name in ("runs/mine", "runs/windows", "data")]
    for folder in (*created, *own):
        folder.mkdir(parents=True)
    subprocess.run(["make", "-f", str(ROOT / "Makefile"), "clean"], cwd=tmp_path, check=True, capture_output=True)
    assert not [folder for folder in created if folder.exists()]
    assert [folder for folder in own if folder.exists()] == own


def test_other_versions_have_an_environment_of_their_own() -> None:
    def lines_of(*words: str) -> list[str]:
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
        command = ["make", "--no-print-directory", "--dry-run", "test-with", *words]
        dry_run = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, env=environment)
        return dry_run.stdout.splitlines()

    lines = lines_of("TORCH=2.15.0", "MEGATRON=/checkout", "TESTS=tests/unit")
    variable, script = lines[0].split()
    folder = variable.removeprefix("VENV=")
    assert script == "scripts/bootstrap.sh"
    assert folder not in (variable, ".venv")
    assert all(line.startswith(f"{folder}/bin/") for line in lines[1:])
    assert "torch==2.15.0" in lines[1].split()
    assert {"--megatron=/checkout", "tests/unit"} <= set(lines[2].split())
    lines = lines_of()
    assert lines[0].split()[0] == "VENV=.venv"
    assert lines[-1].startswith(".venv/bin/python ")
