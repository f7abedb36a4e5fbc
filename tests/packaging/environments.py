"""Source copies and environments in which tests try packages; environments borrow packages of another one."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.training import ROOT

SITE = Path(sysconfig.get_path("purelib"))
"""Folder of the packages of the environment that tests run in."""


def source_copy(folder: Path) -> Path:
    """Copy the files that git knows or would add, as setuptools would write beside the originals; return the folder."""
    files = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, check=True, capture_output=True,
        text=True,
    ).stdout.splitlines()  # fmt: skip
    for name in files:
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


def build(source: Path, folder: Path, *options: str) -> list[Path]:
    """Build distributions of the sources in a folder, as `make dist` does; return their paths in the order of names.

    Args:
        source: folder of the sources; setuptools writes beside them.
        folder: folder for the results.
        options: options of `python -m build`; without any, it builds the source archive, and from that the wheel.
    """
    words = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), *options, str(source)]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=280)
    assert ended.returncode == 0, f"{ended.stdout}\n{ended.stderr}"
    return sorted(folder.iterdir())


def overlay(folder: Path, *wheels: str) -> None:
    """Install packages, without what they require, into a folder for PYTHONPATH beside the present environment.

    The test is skipped if the package index cannot be reached, or does not have them.

    Args:
        folder: the folder.
        wheels: requirements, or ``-r`` and a file of requirements.
    """
    install = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), *wheels]
    ended = subprocess.run(install, capture_output=True, text=True, timeout=280)
    if ended.returncode:
        pytest.skip(f"{wheels[0]} cannot be installed here: {ended.stderr.strip().splitlines()[-1]}")


class Environment:
    """Virtual environment outside of every checkout."""

    def __init__(self, folder: Path) -> None:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
        self.folder, self.bin = folder, folder / "bin"
        self._borrowed = dict[str, str]()
        """Versions of the borrowed distributions, by name."""
        (self.site,) = folder.glob("lib/python*/site-packages")

    def variables(self) -> dict[str, str]:
        """Return the environment variables of a user who has activated the environment."""
        dropped = ("PYTHONPATH", "VIRTUAL_ENV", "PYTHONDONTWRITEBYTECODE")
        kept = {name: value for name, value in os.environ.items() if name not in dropped}
        return {**kept, "PATH": f"{self.bin}:{os.environ['PATH']}", "PYTHONWARNINGS": "ignore"}

    def run(self, *words: str, timeout_s: float = 200) -> str:
        """Run a command of this environment outside of every checkout; return what it prints."""
        ended = self.attempt(*words, timeout_s=timeout_s)
        assert ended.returncode == 0, f"{ended.stdout}\n{ended.stderr}"
        return ended.stdout

    def attempt(self, *words: str, timeout_s: float = 200) -> subprocess.CompletedProcess[str]:
        """Run a command like :meth:`run`, also one that fails; return its exit code and output."""
        return subprocess.run(
            [str(self.bin / words[0]), *words[1:]], cwd=self.folder, env=self.variables(),
            capture_output=True, text=True, timeout=timeout_s,
        )  # fmt: skip

    def install(self, *words: str) -> None:
        """Run `pip install` for this environment, with pip of the environment that tests run in.

        Nothing is compiled, and no borrowed distribution is replaced: their folders are links, so new files would land
        in the other environment.
        """
        pip = [sys.executable, "-m", "pip", "--python", str(self.bin / "python"), "install", "--quiet", "--no-compile"]
        kept = self.folder / "borrowed.txt"
        kept.write_text("".join(f"{name}=={version}\n" for name, version in self._borrowed.items()))
        variables = {**os.environ, "PIP_CONSTRAINT": str(kept)}
        ended = subprocess.run(
            [*pip, *words], cwd=self.folder, env=variables, capture_output=True, text=True, timeout=280
        )
        assert ended.returncode == 0, ended.stderr

    def lacks(self, *modules: str) -> bool:
        """Return True if none of the modules can be imported."""
        ask = "import sys; from moevement_core.util.extras import is_installed as has; print(*map(has, sys.argv[1:]))"
        return set(self.run("python", "-c", ask, *modules).split()) == {"False"}

    def borrow(self, distribution: str) -> None:
        """Link a distribution, and all that it requires, from the environment that tests run in."""
        for name in sorted(_closure(distribution)):
            self._borrowed[name] = importlib.metadata.version(name)
            for top in {file.parts[0] for file in importlib.metadata.files(name) or () if file.parts[0] != ".."}:
                if not (self.site / top).exists():
                    (self.site / top).symlink_to(SITE / top)

    def call(self, distribution: str, version: str) -> None:
        """Make a borrowed distribution report another version."""
        (borrowed,) = self.site.glob(f"{distribution}-*.dist-info")
        renamed = self.site / f"{distribution}-{version}.dist-info"
        shutil.copytree(borrowed, renamed)
        borrowed.unlink()
        metadata = (renamed / "METADATA").read_text(encoding="utf-8")
        before = f"\nVersion: {importlib.metadata.version(distribution)}\n"
        assert before in metadata
        self._borrowed[distribution] = version
        (renamed / "METADATA").write_text(metadata.replace(before, f"\nVersion: {version}\n", 1), encoding="utf-8")


def _closure(name: str) -> set[str]:
    """Return a distribution and all that it requires here, by the names in their metadata."""
    names: set[str] = set()
    pending = [(name, frozenset[str]())]
    seen: set[tuple[str, frozenset[str]]] = set()
    while pending:
        current = pending.pop()
        if current in seen:
            continue
        seen.add(current)
        name, extras = current
        names.add(name)
        pending += _required(name, extras)
    return names


def _required(name: str, extras: frozenset[str]) -> Iterator[tuple[str, frozenset[str]]]:
    for text in importlib.metadata.requires(name) or ():
        requirement = Requirement(text)
        if requirement.marker is None or any(
            requirement.marker.evaluate({"extra": extra}) for extra in (extras or frozenset({""}))
        ):
            yield requirement.name.lower(), frozenset(requirement.extras)
