"""Tests of jobs of Megatron-Bridge run with its wheel, which the pinned environment does not have.

Its requirements are installed into a folder of their own, because two of them are older than the pinned ones.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.packaging.environments import overlay
from tests.training import ROOT

pytestmark = pytest.mark.builds

REQUIREMENTS = Path(__file__).with_name("bridge_wheels.txt")
TESTS = ("tests/functional/test_bridge.py", "tests/unit/megatron/bridge")


@pytest.mark.slow("five jobs, whose ranks each import Bridge")
def test_the_tests_of_bridge_pass_with_its_wheel(tmp_path: Path) -> None:
    """Run them in a process of their own, and see that none was skipped because the wheel is missing."""
    folder = tmp_path / "bridge"
    overlay(folder, "-r", str(REQUIREMENTS))
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    # Each rank imports Bridge. With byte code this takes less than half of the time.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    words = ["-p", "no:cacheprovider", "-p", "no:xdist", "-rs", "--basetemp", str(tmp_path / "tests"), *TESTS]
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", *words], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=560
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "not installed" not in ended.stdout
