"""Versions of what a job's bits and speed depend on, read without importing any of it."""

from __future__ import annotations

import platform
from importlib import metadata

from moevement_core import __version__

_PACKAGES = {"megatron-core": "megatron-core", "torch": "torch", "NVRx": "nvidia-resiliency-ext"}
"""The distribution of each name that is shown."""


def versions() -> dict[str, str]:
    """Return the version of each package that is installed, MoEvement's first and Python's last."""
    versions = {"moevement": __version__}
    for name, distribution in _PACKAGES.items():
        try:
            versions[name] = metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return {**versions, "Python": platform.python_version()}


def version_line() -> str:
    """Return all versions in one line, as a bug report needs them."""
    own, *others = (f"{name} {version}" for name, version in versions().items())
    return f"{own} ({', '.join(others)})"
