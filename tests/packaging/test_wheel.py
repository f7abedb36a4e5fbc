"""Check that a wheel, installed where there is no checkout, has all that its commands read."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.packaging import attempts
from tests.packaging.environments import SITE, Environment, source_copy

pytestmark = pytest.mark.builds

PACKAGES = ("moevement_core", "moevement_cli", "megatron.moevement", "moevement_kernels")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """Return an environment with the wheel, which uses dependencies of the environment that tests run in."""
    folder = tmp_path_factory.mktemp("wheel")
    source = source_copy(folder / "source")
    build = ("-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir")
    subprocess.run([sys.executable, *build, str(folder), str(source)], check=True)
    (wheel,) = folder.glob("*.whl")
    environment = Environment(folder / "environment")
    install = ("-m", "pip", "--python", str(environment.bin / "python"), "install", "--quiet", "--no-deps")
    subprocess.run([sys.executable, *install, str(wheel)], check=True)
    # Dependencies come after the wheel. Python ignores .pth files of the other environment, so its checkout stays out.
    (environment.site / "dependencies.pth").write_text(str(SITE))
    return environment


def test_it_is_the_wheel_that_runs(installed: Environment) -> None:
    for package in PACKAGES:
        (path,) = installed.run("python", "-c", f"import {package} as one; print(one.__file__)").split()
        assert path.startswith(str(installed.site)), path
        assert Path(path).with_name("py.typed").exists()


def test_kernels_are_shipped_as_source(installed: Environment) -> None:
    """Check that kernels are compiled where they run, so that every machine can use the same wheel."""
    shipped = {path.name for path in (installed.site / "moevement_kernels").rglob("*.c*")}
    sources = {path.name for path in (Path(__file__).parents[2] / "kernels").rglob("*.cu*")}
    assert sources
    assert sources <= shipped


def test_help_names_all_commands(installed: Environment) -> None:
    attempts.help_names_all_commands(installed)


def test_plan_and_simulate_know_their_presets(installed: Environment) -> None:
    attempts.plan_knows_its_presets(installed)
    printed = installed.run(
        "moevement", "simulate", "gpt_moe", "--strategy", "moevement", "gemini", "--mtbf", "1200", "--seeds",
        "2", "--hours", "1", "--json",
    )  # fmt: skip
    assert json.loads(printed.splitlines()[-1])


def test_two_ranks_train(installed: Environment) -> None:
    attempts.two_ranks_train(installed)
