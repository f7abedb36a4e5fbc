"""Results that are not finite are never committed, and the process that computes them is replaced."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from moevement_core.run.run_record import RunRecord
from moevement_core.util.exit_codes import USAGE_ERROR
from tests.failure_free import failure_free_digest
from tests.functional.jobs import SPARSE
from tests.launching import finished, launch, logs, survive
from tests.training import SCRIPT, flags

TWO_STAGES: dict[str, Any] = {**SPARSE, "train_iters": 10, "pipeline_model_parallel_size": 2}
TWO_REPLICAS: dict[str, Any] = {**SPARSE, "train_iters": 10, "expert_model_parallel_size": 2}

BROKEN = """
import os
import sys

import torch
from megatron.training import get_args

sys.argv[0] = {script!r}
source = open({script!r}).read()
exec(compile(source.replace('if __name__ == "__main__":', "if False:"), {script!r}, "exec"), globals())

original_forward_step = forward_step
passes = 0


def is_first_process(marker):
    if not os.path.exists(marker):
        open(marker, "w").write(str(os.getpid()))
    return open(marker).read() == str(os.getpid())


def is_broken():
    global passes
    if get_args().curr_iteration + 1 != {iteration} or torch.distributed.get_rank() != {rank}:
        return False
    passes += 1
    return {condition}


def forward_step(data_iterator, model):
    output, loss = original_forward_step(data_iterator, model)
    if torch.is_grad_enabled() and is_broken():
        output = output + float("nan")
    return output, loss


main()
"""


def broken(folder: Path, rank: int, condition: str = "True", iteration: int = 6) -> Path:
    """Write a training script in which a rank computes NaN in an iteration if a condition holds; return its path."""
    script = folder / "broken.py"
    script.write_text(BROKEN.format(script=str(SCRIPT), rank=rank, condition=condition, iteration=iteration))
    return script


def in_first_process(folder: Path) -> str:
    """Return a condition that holds only in the process that evaluates it first, as if its device were broken."""
    return f"is_first_process({str(folder / 'first_process')!r})"


def check_finite(record: RunRecord, iterations: int) -> None:
    lines = record.metrics()
    assert [line["iteration"] for line in lines] == list(range(1, iterations + 1))
    assert all(math.isfinite(line["loss"]) and math.isfinite(line["grad_norm"]) for line in lines)


@pytest.mark.parametrize(
    ("layout", "rank", "extra"),
    [
        (TWO_STAGES, 0, {}),
        pytest.param(TWO_STAGES, 1, {}, marks=pytest.mark.full),
        pytest.param(TWO_REPLICAS, 1, {}, marks=pytest.mark.full),
        pytest.param(TWO_STAGES, 1, {"rerun_mode": "disabled"}, marks=pytest.mark.full),
    ],
    ids=["first stage", "last stage", "expert parallel", "without second pass"],
)
def test_a_process_that_computes_no_numbers_is_replaced(
    layout: dict[str, Any], rank: int, extra: dict[str, Any], tmp_path: Path
) -> None:
    script = broken(tmp_path, rank, in_first_process(tmp_path))
    survived = survive(2, 1, tmp_path / "run", script=script, **layout, **extra)
    check_finite(survived.record, 10)
    assert survived.digest == failure_free_digest(2, **layout)
    lost = [failure["failures"][0] for failure in survived.failures() if failure["recovery"] is not None]
    assert len(lost) == 1, survived.failures()
    assert lost[0].startswith(f"rank {rank} (pid ")


def test_a_result_that_does_not_come_again_is_an_interruption(tmp_path: Path) -> None:
    script = broken(tmp_path, 1, "passes == 1")
    survived = survive(2, 0, tmp_path / "run", script=script, **TWO_STAGES)
    check_finite(survived.record, 10)
    assert survived.digest == failure_free_digest(2, **TWO_STAGES)
    (failure,) = survived.failures()
    assert failure["recovery"] is None, "every rank kept its state"
    assert failure["failures"][0].startswith("rank 1:")


@pytest.mark.parametrize("iteration", [1, pytest.param(6, marks=pytest.mark.full)])
def test_a_batch_that_gives_no_numbers_on_any_process_is_blamed(iteration: int, tmp_path: Path) -> None:
    script = broken(tmp_path, 1, iteration=iteration)
    words = ("--nproc", "2", "--spares", "1", str(script), *flags(**TWO_STAGES), "--run-dir", str(tmp_path / "run"))
    code, out, err = finished(launch(*words))
    assert code not in (0, USAGE_ERROR), f"{out}\n{err}"
    record = RunRecord(tmp_path / "run")
    assert [line["iteration"] for line in record.metrics()] == list(range(1, iteration)), logs(tmp_path / "run")
    assert f"--iterations-to-skip {iteration}" in out + err
