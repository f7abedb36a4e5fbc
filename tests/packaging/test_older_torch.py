"""Tests of what depends on torch's internals run with the older version that is supported beside the pinned one.

Without a GPU the libraries of CUDA that the pinned torch needs serve both versions.
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

OLDER = "2.13.0"
CURAND = "nvidia-curand==10.4.0.35"
"""Library that the pinned torch no longer needs."""
FUNCTIONAL = "tests/functional"
TESTS = (
    "tests/unit/restart",
    "tests/unit/trainer",
    f"{FUNCTIONAL}/test_fsdp.py::test_a_lost_shard_comes_back",
    f"{FUNCTIONAL}/test_fsdp.py::test_a_shard_with_copies_is_taken_from_a_live_rank",
    f"{FUNCTIONAL}/test_fsdp.py::test_an_elastic_job_divides_the_rows_anew",
    f"{FUNCTIONAL}/test_kills.py::test_a_rank_killed_in_every_phase_of_an_iteration",
    f"{FUNCTIONAL}/test_torch_binding.py::test_experts_that_one_rank_holds_come_back",
    f"{FUNCTIONAL}/test_torch_binding.py::test_parameters_are_divided_between_two_optimizers",
    f"{FUNCTIONAL}/test_twins.py",
)


@pytest.mark.slow("a dozen jobs")
def test_tests_of_torch_pass_with_an_older_version(tmp_path: Path) -> None:
    folder = tmp_path / "torch"
    overlay(folder, f"torch=={OLDER}", CURAND)
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    # Each rank imports torch. With byte code this takes less than half of the time.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)

    def python(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *words]
        return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=560)

    used = python("-c", "import torch; print(torch.__version__)")
    assert used.stdout.startswith(f"{OLDER}+"), used.stderr
    options = ("-p", "no:cacheprovider", "-p", "no:xdist", "--basetemp", str(tmp_path / "tests"))
    ended = python("-m", "pytest", *options, *TESTS)
    assert ended.returncode == 0, ended.stdout + ended.stderr
