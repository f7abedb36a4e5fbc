"""A wheel, unpacked where there is no checkout, has all that its commands read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment that has the wheel and, from the one that tests run in, its dependencies."""
    folder = tmp_path_factory.mktemp("wheel")
    source = _copy(folder / "source")
    build = ("-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir")
    subprocess.run([sys.executable, *build, str(folder), str(source)], check=True)
    (wheel,) = folder.glob("*.whl")
    python = folder / "environment" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "environment"], check=True)
    (packages,) = (folder / "environment").glob("lib/python*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(packages)
    # Dependencies after the wheel; .pth files of another environment are not read, so its checkout stays out.
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    return python


def _copy(folder: Path) -> Path:
    """What git would give: setuptools leaves its traces beside what it builds."""
    files = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, check=True, capture_output=True,
        text=True,
    ).stdout.splitlines()  # fmt: skip
    for name in files:
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes((ROOT / name).read_bytes())
    return folder


def _run(python: Path, *words: str) -> str:
    """What Python prints, from a folder that is no checkout."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ended = subprocess.run(
        [python, "-W", "ignore", *words], cwd=python.parent, env=environment,
        capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_it_is_the_wheel_that_runs(installed: Path) -> None:
    folder = installed.parents[1]
    for package in ("moevement_core", "moevement_cli", "megatron.moevement", "moevement_kernels"):
        (path,) = _run(installed, "-c", f"import {package} as one; print(one.__file__)").split()
        assert path.startswith(str(folder)), path
        assert Path(path).with_name("py.typed").exists()


def test_plan_and_simulate_know_their_presets(installed: Path) -> None:
    command = ("-m", "moevement_cli.main")
    told = _run(
        installed, *command, "plan", "deepseek_moe", "--ranks", "96", "--iteration-time", "2.75", "--cluster",
        "moevement-a100", "--json",
    )  # fmt: skip
    assert json.loads(told.splitlines()[-1])["window"] >= 1
    told = _run(
        installed, *command, "simulate", "gpt_moe", "--strategy", "moevement", "gemini", "--mtbf", "1200", "--seeds",
        "2", "--hours", "1", "--json",
    )  # fmt: skip
    assert json.loads(told.splitlines()[-1])
