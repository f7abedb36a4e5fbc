"""Functional regression tests in the layout of Megatron's own: a model_config.yaml and golden values beside it.

Golden values are rounded to five decimals and compared with Megatron's relative tolerance of 5%: arithmetic differs
from processor to processor. The data is Megatron's mock data, since the embedded corpus differs between Pythons.
``python -m tests.functional.test_golden_values`` makes them again.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron.moevement import worker
from moevement_core.launching import config_file
from moevement_core.run_record import RunRecord
from tests.harness import run_ranks
from tests.training import SCRIPT

CASES = sorted(Path(__file__).with_name("test_cases").glob("*/*/model_config.yaml"))
GOLDEN = "golden_values_dev_cpu.json"
KEYS = {"lm loss": "loss", "grad norm": "grad_norm"}
NPROC = 4


def run_case(case: Path, run_dir: Path) -> dict[str, Any]:
    """Train the case and return its metrics in the form of the golden files."""
    argv = [str(SCRIPT), *config_file.expand(["--config", str(case)]), "--run-dir", str(run_dir)]
    argv += ["--data-cache-path", str(run_dir / "cache")]
    run_ranks(
        worker.run_rank,
        NPROC,
        argv,
        init_process_group=False,
        environment=config_file.environment_of(["--config", str(case)]),
    )
    lines = RunRecord(run_dir).metrics()
    steps = [line["iteration"] for line in lines]
    return {
        metric: {
            "start_step": steps[0],
            "end_step": steps[-1],
            "step_interval": 1,
            "values": {str(line["iteration"]): round(line[KEYS[metric]], 5) for line in lines},
        }
        for metric in yaml.safe_load(case.read_text())["METRICS"]
    }


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.parent.name)
def test_a_case_has_its_golden_values(case: Path, tmp_path: Path) -> None:
    golden = json.loads(case.with_name(GOLDEN).read_text())
    found = run_case(case, tmp_path)
    assert found.keys() == golden.keys()
    for metric, series in golden.items():
        assert found[metric]["values"] == pytest.approx(series["values"], rel=0.05), metric


if __name__ == "__main__":
    for one in CASES:
        with tempfile.TemporaryDirectory() as folder:
            values = run_case(one, Path(folder))
        one.with_name(GOLDEN).write_text(json.dumps(values, indent=4) + "\n")
        print(one.with_name(GOLDEN))
