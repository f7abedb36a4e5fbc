"""Description of the machine and versions behind a number, for the end of a page."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import psutil


def measured_on(*packages: str) -> str:
    """Return the date, processor, cores, memory, commit and versions in one line."""
    versions = ", ".join([*_commit(), *(f"{name} {version(name)}" for name in packages)])
    return (
        f"{datetime.now(UTC):%Y-%m-%d}, {_processor()}, {os.cpu_count()} cores, "
        f"{psutil.virtual_memory().total / 2**30:.0f} GiB, Python {platform.python_version()}, {versions}"
    )


def _commit() -> list[str]:
    """Return the commit of the project as a list of one; an empty list outside of a git checkout."""
    command = ["git", "-C", str(Path(__file__).parents[1]), "rev-parse", "--short=10", "HEAD"]
    try:
        return [f"commit {subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()}"]
    except (OSError, subprocess.CalledProcessError):
        return []


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()
