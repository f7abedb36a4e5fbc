"""Steps of the Dockerfile without Docker. As in NVIDIA's container, torch is installed before them."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.packaging import attempts
from tests.packaging.environments import Environment, source_copy
from tests.training import ROOT

pytestmark = pytest.mark.builds

IN_THE_CONTAINER = ("pip", "torch", "numpy", "psutil", "pyyaml", "tensorboard", "matplotlib")
"""Distributions that NVIDIA's container has and the package needs, and pip."""
FOR_SPEED = ("transformers", "sentencepiece")
"""Distributions that the container does not have. They are borrowed, as their installation takes half a minute."""
TORCH = "2.13.0a0+5c9fa1b.nv26.6"
"""Version like those of NVIDIA's builds: before the release, and on no index."""


def run_commands() -> list[str]:
    """Return the RUN instructions of the Dockerfile."""
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    return re.findall(r"^RUN (.*)$", text, flags=re.MULTILINE)


def played(folder: Path) -> Environment:
    environment = Environment(folder)
    for distribution in (*IN_THE_CONTAINER, *FOR_SPEED):
        environment.borrow(distribution)
    environment.call("torch", TORCH)
    return environment


def run(environment: Environment, source: Path, command: str) -> subprocess.CompletedProcess[str]:
    """Run a command as Docker does, but compile only modules that are imported."""
    return subprocess.run(
        ["/bin/sh", "-c", command], cwd=source, env={**environment.variables(), "PIP_NO_COMPILE": "1"},
        capture_output=True, text=True, timeout=280,
    )  # fmt: skip


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return source_copy(tmp_path_factory.mktemp("context") / "moevement")


@pytest.fixture(scope="module")
def container(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    environment = played(tmp_path_factory.mktemp("container") / "environment")
    commands = run_commands()
    assert commands
    for command in commands:
        ended = run(environment, source, command)
        assert ended.returncode == 0, f"{ended.stdout}\n{ended.stderr}"
    return environment


def test_torch_of_the_container_stays(container: Environment) -> None:
    listed = container.run("python", "-m", "pip", "list", "--format=freeze")
    assert f"torch=={TORCH}\n" in listed
    assert (container.site / "torch").is_symlink()


def test_nothing_comes_that_nobody_asked_for(container: Environment) -> None:
    """Check that no other torch library, no service of nvidia-resiliency-ext and no test tool is installed."""
    listed = container.run("python", "-m", "pip", "list", "--format=freeze").lower()
    for name in ("apex", "transformer-engine", "fastapi", "grpcio-tools", "pytest", "mkdocs"):
        assert f"\n{name}==" not in listed


def test_help_names_all_commands(container: Environment) -> None:
    attempts.help_names_all_commands(container)


def test_two_ranks_train(container: Environment) -> None:
    attempts.two_ranks_train(container)


@pytest.mark.full
def test_a_package_of_the_container_is_not_replaced(source: Path, tmp_path: Path) -> None:
    """Check that a package that is too old ends the installation, and is neither upgraded nor ignored."""
    environment = played(tmp_path / "environment")
    environment.borrow("xxhash")
    environment.call("xxhash", "3.0.0")
    ended = run(environment, source, run_commands()[0])
    assert ended.returncode != 0
    assert "xxhash" in ended.stderr
    assert "xxhash==3.0.0" in environment.run("python", "-m", "pip", "list", "--format=freeze")


def test_an_environment_without_torch_is_refused(source: Path, tmp_path: Path) -> None:
    environment = Environment(tmp_path / "environment")
    ended = run(environment, source, run_commands()[0])
    assert ended.returncode == 2
    assert re.search(r"^install_in_container: .*\btorch\b", ended.stderr, flags=re.MULTILINE)


def test_docker_is_sent_nothing_that_git_ignores() -> None:
    ignored = {line.strip("*/") for line in (ROOT / ".gitignore").read_text().splitlines()}
    not_sent = {line.strip("*/") for line in (ROOT / ".dockerignore").read_text().splitlines() if line[:1] != "#"}
    assert not_sent == ignored | {".git"}
