"""The wheel, installed by pip where there is no checkout: beside nothing but torch, and with its extras."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from tests.packaging import attempts
from tests.packaging.environments import Environment, build, source_copy
from tests.training import ROOT

pytestmark = pytest.mark.builds

PACKAGES = ("moevement_core", "moevement_cli", "megatron.moevement", "moevement_kernels")
OF_EXTRAS = (
    "megatron.core", "megatron.training", "nvidia_resiliency_ext", "transformers", "tensorboard", "einops", "httpx",
    "grpc", "matplotlib", "emerging_optimizers", "pytest",
)  # fmt: skip
"""Modules that an installation without extras does not bring."""
SMALL = ROOT / "examples" / "plain_torch" / "small.py"
ITERATIONS = 40
KILLS_ITSELF = """        if iteration == 31 and dist.get_rank() == 1 and not args.moevement_load:
            import os, signal
            os.kill(os.getpid(), signal.SIGKILL)
"""
USES = """
import moevement_core as ft


def loop(session: ft.Session) -> int:
    for iteration in ft.iterations(session, until=3):
        session.step()
    return "the last iteration"


config: int = ft.SessionConfig()
"""
"""Script of a user with two mistakes: the result of the loop, and the type of the configuration."""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    (path,) = build(source_copy(folder / "source"), folder / "dist", "--wheel")
    return path


def installed(wheel: Path, folder: Path, extras: str = "") -> Environment:
    """Return an environment with torch, in which pip has installed the wheel and what it requires."""
    environment = Environment(folder / "environment")
    environment.borrow("torch")
    environment.install(f"{wheel}{extras}")
    return environment


@pytest.fixture(scope="module")
def core(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return installed(wheel, tmp_path_factory.mktemp("core"))


@pytest.fixture(scope="module")
def with_restart(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """Return an environment with the requirements of the extra, as docs/install.md installs them on an older glibc."""
    environment = installed(wheel, tmp_path_factory.mktemp("restart"))
    environment.install("defusedxml", "httpx", "packaging")
    environment.install(
        "--no-deps", "--only-binary=:all:", "--platform", f"manylinux_2_39_{platform.machine()}", "--target",
        str(environment.site), "nvidia-resiliency-ext==0.7.0",
    )  # fmt: skip
    return environment


@pytest.fixture(scope="module")
def with_megatron(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return installed(wheel, tmp_path_factory.mktemp("megatron"), "[megatron]")


def train(environment: Environment, script: Path, name: str, *words: str, options: tuple[str, ...] = ()) -> Path:
    """Train a script with a trainer of its own on two ranks; return the run directory."""
    environment.run(*training(environment, script, name, *words, options=options))
    return environment.folder / name


def training(
    environment: Environment, script: Path, name: str, *words: str, options: tuple[str, ...] = ()
) -> tuple[str, ...]:
    return (
        "moevement", "launch", "--trainer", "torch", "--nproc", "2", *options, str(script), "--iterations",
        str(ITERATIONS), "--run-dir", str(environment.folder / name), "--moevement-window", "3", *words,
    )  # fmt: skip


def test_it_is_the_wheel_that_runs(core: Environment) -> None:
    for package in PACKAGES:
        (path,) = core.run("python", "-c", f"import {package} as one; print(one.__file__)").split()
        assert path.startswith(str(core.site)), path
        assert Path(path).with_name("py.typed").exists()
    assert core.lacks(*OF_EXTRAS)


def test_help_names_all_commands(core: Environment) -> None:
    attempts.help_names_all_commands(core)


def test_plan_and_simulate_know_their_presets(core: Environment) -> None:
    attempts.plan_knows_its_presets(core)
    printed = core.run(
        "moevement", "simulate", "gpt_moe", "--strategy", "moevement", "gemini", "--mtbf", "1200", "--seeds",
        "2", "--hours", "1", "--json",
    )  # fmt: skip
    assert json.loads(printed.splitlines()[-1])


@pytest.mark.parametrize(
    ("words", "extra"),
    [
        (("launch", "--nproc", "2", str(SMALL)), "megatron"),
        (("launch", "--nproc", "2", "--trainer", "torch", "--spares", "1", str(SMALL)), "restart"),
        (("plan", "gpt_moe", "--ranks", "96", "--iteration-time", "2", "--cluster", "moevement-a100", "--bf16"),
         "megatron"),
        (("bench", "replay", "--rounds", "1", "--steps", "1"), "megatron"),
    ],
)  # fmt: skip
def test_what_needs_an_extra_is_refused_in_a_line(words: tuple[str, ...], extra: str, core: Environment) -> None:
    ended = core.attempt("moevement", *words)
    assert ended.returncode == 2, f"{ended.stdout}\n{ended.stderr}"
    line = ended.stderr.splitlines()[-1]
    assert line.startswith("moevement: ")
    assert f"extra {extra} " in line
    assert "Traceback" not in ended.stderr


def test_a_trainer_of_ones_own_goes_on_from_its_windows(core: Environment) -> None:
    """Kill a rank of a job without spares, and start the job again from its windows: all results are the same."""
    before = "        session.binding.run(iteration)\n"
    text = SMALL.read_text(encoding="utf-8")
    assert before in text
    script, windows = core.folder / "killed.py", str(core.folder / "windows")
    script.write_text(text.replace(before, KILLS_ITSELF + before), encoding="utf-8")
    free = train(core, SMALL, "free")
    words = ("--moevement-persist-dir", windows)
    assert core.attempt(*training(core, script, "killed", *words)).returncode == 1
    resumed = train(core, script, "resumed", *words, "--moevement-load", windows)
    core.run("moevement", "verify", str(free), str(resumed), "--common")
    first, *_ = (resumed / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert 1 < json.loads(first)["iteration"] <= 31


def test_a_trainer_of_ones_own_replaces_a_lost_rank(with_restart: Environment) -> None:
    free = train(with_restart, SMALL, "free")
    fault = ("--moevement-inject", "rank=1,iteration=21,phase=reduce")
    killed = train(with_restart, SMALL, "killed", *fault, options=("--spares", "1"))
    with_restart.run("moevement", "verify", str(free), str(killed))
    events = [json.loads(line) for line in (killed / "events.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [event["event"] for event in events].count("recovery") == 1
    assert with_restart.lacks("megatron.core", "fastapi", "grpc")


def test_megatron_trains_on_two_ranks(with_megatron: Environment) -> None:
    attempts.two_ranks_train(with_megatron)
    assert with_megatron.lacks("nvidia_resiliency_ext", "transformers", "pytest")


def test_scripts_of_users_are_checked_against_its_types(core: Environment) -> None:
    script, settings = core.folder / "uses.py", core.folder / "mypy.ini"
    script.write_text(USES, encoding="utf-8")
    settings.write_text("[mypy]\nstrict = True\n[mypy-torch.*,numpy.*]\nfollow_imports = skip\n", encoding="utf-8")
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", str(settings), "--python-executable",
         str(core.bin / "python"), str(script)],
        cwd=core.folder, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    lines = {number for number, line in enumerate(USES.splitlines(), 1) if "last" in line or "config" in line}
    errors = [line for line in checked.stdout.splitlines() if ": error: " in line]
    assert {int(line.split(":")[1]) for line in errors if line.startswith("uses.py:")} == lines, checked.stdout
    assert len(errors) == len(lines), checked.stdout
