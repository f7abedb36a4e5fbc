"""What packages are tried in: the source as git has it, and an environment that borrows packages of another one."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement

from tests.training import ROOT

SITE = Path(sysconfig.get_path("purelib"))
"""Where the packages of the environment that tests run in are."""


def source_copy(folder: Path) -> Path:
    """What git would give: setuptools leaves its traces beside what it builds."""
    files = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, check=True, capture_output=True,
        text=True,
    ).stdout.splitlines()  # fmt: skip
    for name in files:
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


class Environment:
    """A virtual environment beside every checkout."""

    def __init__(self, folder: Path) -> None:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
        self.folder, self.bin = folder, folder / "bin"
        (self.site,) = folder.glob("lib/python*/site-packages")

    def variables(self) -> dict[str, str]:
        """The environment variables of a user who has activated it."""
        dropped = ("PYTHONPATH", "VIRTUAL_ENV", "PYTHONDONTWRITEBYTECODE")
        kept = {name: value for name, value in os.environ.items() if name not in dropped}
        return {**kept, "PATH": f"{self.bin}:{os.environ['PATH']}", "PYTHONWARNINGS": "ignore"}

    def run(self, *words: str, timeout_s: float = 200) -> str:
        """What a command of this environment prints, from a folder that is no checkout."""
        ended = subprocess.run(
            [str(self.bin / words[0]), *words[1:]], cwd=self.folder, env=self.variables(),
            capture_output=True, text=True, timeout=timeout_s,
        )  # fmt: skip
        assert ended.returncode == 0, f"{ended.stdout}\n{ended.stderr}"
        return ended.stdout

    def borrow(self, distribution: str) -> None:
        """Have a distribution of the environment that tests run in, with all that it requires."""
        for name in sorted(_closure(distribution)):
            for top in {file.parts[0] for file in importlib.metadata.files(name) or () if file.parts[0] != ".."}:
                if not (self.site / top).exists():
                    (self.site / top).symlink_to(SITE / top)

    def call(self, distribution: str, version: str) -> None:
        """Let a borrowed distribution say that it is of another version."""
        (borrowed,) = self.site.glob(f"{distribution}-*.dist-info")
        renamed = self.site / f"{distribution}-{version}.dist-info"
        shutil.copytree(borrowed, renamed)
        borrowed.unlink()
        metadata = (renamed / "METADATA").read_text(encoding="utf-8")
        before = f"\nVersion: {importlib.metadata.version(distribution)}\n"
        assert before in metadata
        (renamed / "METADATA").write_text(metadata.replace(before, f"\nVersion: {version}\n", 1), encoding="utf-8")


def _closure(name: str) -> set[str]:
    """A distribution and all that it requires here, by the names of their metadata."""
    found: set[str] = set()
    pending = [(name, frozenset[str]())]
    seen: set[tuple[str, frozenset[str]]] = set()
    while pending:
        current = pending.pop()
        if current in seen:
            continue
        seen.add(current)
        name, extras = current
        found.add(name)
        pending += _required(name, extras)
    return found


def _required(name: str, extras: frozenset[str]) -> Iterator[tuple[str, frozenset[str]]]:
    for text in importlib.metadata.requires(name) or ():
        requirement = Requirement(text)
        if requirement.marker is None or any(
            requirement.marker.evaluate({"extra": extra}) for extra in (extras or frozenset({""}))
        ):
            yield requirement.name.lower(), frozenset(requirement.extras)
