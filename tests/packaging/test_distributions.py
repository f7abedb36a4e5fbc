"""Distributions are equal bit for bit wherever they are built, and have what they need and nothing else."""

from __future__ import annotations

import os
import re
import stat
import tarfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

from moevement_core import __version__
from tests.packaging.environments import build, source_copy
from tests.training import ROOT

pytestmark = pytest.mark.builds

PACKAGES = ("megatron/moevement", "moevement_core", "moevement_cli", "moevement_kernels")
NAMES = (f"moevement_megatron-{__version__}-py3-none-any.whl", f"moevement_megatron-{__version__}.tar.gz")
EXAMPLES = "moevement_cli/_examples/"
YEAR_2001_S = 1_000_000_000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("distributions")


@pytest.fixture(scope="module")
def built(folder: Path) -> tuple[Path, Path]:
    """Build the wheel, through the source archive, and the source archive."""
    wheel, archive = build(source_copy(folder / "source"), folder / "dist")
    assert (wheel.name, archive.name) == NAMES
    return wheel, archive


@contextmanager
def umask(mode: int) -> Iterator[None]:
    before = os.umask(mode)
    try:
        yield
    finally:
        os.umask(before)


def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        return Parser().parsestr(archive.read(f"moevement_megatron-{__version__}.dist-info/METADATA").decode())


def test_two_builds_give_equal_bytes(built: tuple[Path, Path], folder: Path) -> None:
    """Build once more in another folder, from files of other times and permissions, under another umask."""
    with umask(0o077):
        source = source_copy(folder / "another" / "place" / "source")
        for path in source.rglob("*"):
            if path.is_file():
                path.chmod(path.stat().st_mode & 0o700)
                os.utime(path, (YEAR_2001_S, YEAR_2001_S))
        again = build(source, folder / "another" / "dist")
    for first, second in zip(built, again, strict=True):
        assert first.name == second.name
        assert first.read_bytes() == second.read_bytes()


def test_a_wheel_from_the_tree_is_that_from_the_source_archive(built: tuple[Path, Path], folder: Path) -> None:
    (direct,) = build(source_copy(folder / "tree"), folder / "direct", "--wheel")
    assert direct.read_bytes() == built[0].read_bytes()


def test_the_source_archive_has_what_an_installation_needs(built: tuple[Path, Path]) -> None:
    with tarfile.open(built[1]) as archive:
        members = {member.name.partition("/")[2]: member for member in archive.getmembers() if member.isfile()}
    kernels = {path.relative_to(ROOT).as_posix() for path in (ROOT / "kernels").rglob("*.cu*")}
    examples = {path.relative_to(ROOT).as_posix() for path in (ROOT / "examples").rglob("*.yaml")}
    assert kernels
    needed = {
        "LICENSE", "README.md", "CHANGELOG.md", "Dockerfile", "pyproject.toml", "setup.py", "MANIFEST.in",
        "docs/design.md", "scripts/install_in_container.sh", "requirements/lock.txt",
        "requirements/nvidia-resiliency-ext.txt", "examples/plain_torch/small.py",
    }  # fmt: skip
    assert needed | kernels | examples <= members.keys()
    assert not [name for name in members if name.startswith(("tests/", "benchmarks/", ".")) or name.endswith(".pyc")]
    assert members["scripts/install_in_container.sh"].mode & stat.S_IXUSR
    assert {(member.uid, member.uname, member.mtime) for member in members.values()} == {(0, "", 315532800)}


def test_the_wheel_has_packages_and_nothing_else(built: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(built[0]) as archive:
        names = set(archive.namelist())
    own = {f"{package}/py.typed" for package in PACKAGES}
    of_metadata = f"moevement_megatron-{__version__}.dist-info/"
    assert own <= names
    assert f"{of_metadata}licenses/LICENSE" in names
    sources = {
        f"moevement_kernels/cuda/{path.name}" for path in (ROOT / "kernels" / "moevement_kernels").rglob("*.cu*")
    }
    others = {
        name for name in names
        if not name.startswith(of_metadata) and not name.endswith(".py") and not name.startswith(EXAMPLES)
    }  # fmt: skip
    assert others == own | sources
    roots = tuple(f"{package}/" for package in PACKAGES)
    assert not [name for name in names if not name.startswith((of_metadata, *roots))]
    assert not [name for name in names if re.search(r"(^|/)(tests?|benchmarks)/|/test_", name)]


def test_the_metadata_say_what_the_project_is(built: tuple[Path, Path]) -> None:
    fields = metadata(built[0])
    assert (fields["Name"], fields["Version"]) == ("moevement-megatron", __version__)
    assert fields["License-Expression"] == "Apache-2.0"
    classifiers = fields.get_all("Classifier") or []
    assert "Typing :: Typed" in classifiers
    assert "Programming Language :: Python :: 3.12" in classifiers
    assert {"megatron", "restart"} <= set(fields.get_all("Provides-Extra") or [])
    unconditional = {
        re.split(r"[<>=]", text)[0] for text in fields.get_all("Requires-Dist") or [] if "extra ==" not in text
    }
    assert unconditional == {
        "torch", "fsspec", "msgspec", "numpy", "prometheus-client", "psutil", "pyyaml", "rich", "xxhash",
    }  # fmt: skip
