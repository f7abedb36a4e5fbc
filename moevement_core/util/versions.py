"""Versions of the packages on which a job's results and speed depend, read without importing the packages."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from contextlib import suppress
from importlib import metadata
from pathlib import Path

from moevement_core import __version__
from moevement_core.util.environment import MEGATRON_ENV

_PACKAGES = {"megatron-core": "megatron-core", "torch": "torch", "NVRx": "nvidia-resiliency-ext"}
"""Name of each package on PyPI, by the name under which :func:`versions` lists it."""
_PART = re.compile(r"^(MAJOR|MINOR|PATCH|PRE_RELEASE) *= *'?(\w*)'?", re.MULTILINE)
_GIT_S = 10.0
"""Limit in seconds on the time that git may take to name a revision."""


def versions() -> dict[str, str]:
    """Return the versions of MoEvement, of the installed packages of :data:`_PACKAGES`, and of Python.

    If a checkout of Megatron-LM replaces megatron-core, its version has the checkout's folder and revision.
    """
    versions = {"moevement": __version__}
    for name, distribution in _PACKAGES.items():
        try:
            versions[name] = metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    if checkout := os.environ.get(MEGATRON_ENV):
        versions["megatron-core"] = version_of_checkout(Path(checkout))
    return {**versions, "Python": platform.python_version()}


def version_line() -> str:
    """Return all versions in one line, in the form that a bug report needs."""
    own, *others = (f"{name} {version}" for name, version in versions().items())
    return f"{own} ({', '.join(others)})"


def version_of_checkout(folder: Path) -> str:
    """Return version, folder and git revision of a checkout of Megatron-LM, as far as they can be read."""
    parts: dict[str, str] = {}
    with suppress(OSError, UnicodeDecodeError):
        text = (folder / "megatron" / "core" / "package_info.py").read_text(encoding="utf-8")
        parts = {part[1]: part[2] for part in _PART.finditer(text)}
    numbers = ".".join(parts.get(name, "?") for name in ("MAJOR", "MINOR", "PATCH"))
    revision = revision_of(folder)
    return f"{numbers}{parts.get('PRE_RELEASE', '')} from {folder}" + (f" at {revision}" if revision else "")


def revision_of(folder: Path) -> str | None:
    """Return the git revision of a checkout, 12 hexadecimal digits; None if git cannot tell."""
    if not (folder / ".git").exists():  # Git would otherwise name the revision of a repository around the folder.
        return None
    with suppress(OSError, subprocess.SubprocessError):
        command = ["git", "-C", str(folder), "rev-parse", "--short=12", "HEAD"]
        return (
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=_GIT_S).stdout.strip() or None
        )
    return None
