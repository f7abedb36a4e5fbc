"""The benchmark beside other systems runs its jobs, kills a rank, and takes the time from outside."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers.systems import PLAIN, SYSTEMS
from tests.training import ROOT

ENVIRONMENT = ROOT / ".venv.peers"
OTHERS = [system.name for system in SYSTEMS if system.packages]


def measured(tmp_path: Path, system: str) -> dict[str, Any]:
    """Run a very small benchmark of one system, and return the record."""
    words = ["--size", "tiny", "--rounds", "1", "--kills", "1", "--iterations", "16", "--peers", str(ENVIRONMENT)]
    paths = ["--records", str(tmp_path / "records"), "--page", str(tmp_path / "page.md")]
    command = [sys.executable, "-m", "benchmarks.peers", "--systems", system, *words, *paths]
    subprocess.run(command, cwd=ROOT, check=True, timeout=600)
    assert f"| {system} |" in (tmp_path / "page.md").read_text()
    return dict(json.loads((tmp_path / "records").read_text()))


@pytest.mark.slow("three jobs of fresh interpreters")
def test_this_project_repeats_nothing_after_a_kill(tmp_path: Path) -> None:
    system = "this project, replay"
    record = measured(tmp_path, system)["systems"]
    (plain,), result = record[PLAIN]["rounds"], record[system]
    assert result["error"] is None
    (kill,) = result["kills"]["kills"]
    assert kill["repeated"] == 0
    assert 0 < kill["next_s"] <= kill["all_s"]
    (phases,) = result["kills"]["phases"]
    assert phases["total"] < kill["all_s"]
    assert {job["digest"] for job in (plain, *result["rounds"], result["kills"])} == {plain["digest"]}
    assert all(job[name] > 0 for job in (plain, *result["rounds"]) for name in ("iteration_cpu_s", "rank_bytes"))


@pytest.mark.builds  # many fresh interpreters
@pytest.mark.skipif(not ENVIRONMENT.exists(), reason="benchmarks/peers/setup.sh has not made the environment")
@pytest.mark.parametrize("system", OTHERS)
def test_other_systems_run_the_same_job(tmp_path: Path, system: str) -> None:
    record = measured(tmp_path, system)["systems"]
    assert record[system]["error"] is None
    (kill,) = record[system]["kills"]["kills"]
    assert 0 < kill["next_s"] <= kill["all_s"]
