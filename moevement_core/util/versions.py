"""Versions of the packages on which a job's results and speed depend, read without importing the packages."""

from __future__ import annotations

import platform
from importlib import metadata

from moevement_core import __version__

_PACKAGES = {"megatron-core": "megatron-core", "torch": "torch", "NVRx": "nvidia-resiliency-ext"}
"""Name of each package on PyPI, by the name under which :func:`versions` lists it."""


def versions() -> dict[str, str]:
    """Return the versions of MoEvement, of the installed packages of :data:`_PACKAGES`, and of Python."""
    versions = {"moevement": __version__}
    for name, distribution in _PACKAGES.items():
        try:
            versions[name] = metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return {**versions, "Python": platform.python_version()}


def version_line() -> str:
    """Return all versions in one line, in the form that a bug report needs."""
    own, *others = (f"{name} {version}" for name, version in versions().items())
    return f"{own} ({', '.join(others)})"
