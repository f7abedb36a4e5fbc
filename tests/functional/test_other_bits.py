"""Replays may reach other last bits, as on a GPU without deterministic kernels; the job reports it and goes on."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from tests.failure_free import failure_free, failure_free_digest
from tests.functional.jobs import LAYOUTS, SPARSE
from tests.launching import Survived, survive
from tests.training import SCRIPT, losses

NPROC, LAYOUT = LAYOUTS["PP2"]
JOB: dict[str, Any] = {**SPARSE, **LAYOUT, "bf16": False, "use_distributed_optimizer": False, "lr": 1e-3}
KILLS = ("rank=1,iteration=8,phase=backward", "rank=1,iteration=9,phase=forward", "rank=0,iteration=14,phase=forward")

GPU = """
import os
import sys

import torch

from moevement_core.session import recoverer
from moevement_core.trainer import equal_bits

sys.argv[0] = {script!r}
source = open({script!r}).read()
exec(compile(source.replace('if __name__ == "__main__":', "if False:"), {script!r}, "exec"), globals())

equal_bits.is_repeatable = recoverer.is_repeatable = lambda: {repeatable}
equal_bits.sums_follow_places = lambda: {follow}
noise = torch.Generator().manual_seed(int.from_bytes(os.urandom(4), "big"))
original_forward_step = forward_step


def forward_step(data_iterator, model):
    output, loss = original_forward_step(data_iterator, model)
    return output * (1 + {noise} * torch.randn(output.shape, generator=noise)), loss


main()
"""


def train_as_on_a_gpu(folder: Path, *, repeatable: bool, follow: bool = True, noise: float = 0.0) -> Survived:
    """Train as on a GPU while ranks are killed one after the other.

    Args:
        folder: folder of the test.
        repeatable: True if ranks report that a repeated computation has the same bits.
        follow: True if ranks report that the order of sums over ranks depends on the nodes and devices of the ranks.
        noise: relative size of the random change of a stage's output in each computation.
    """
    script = folder / "gpu.py"
    script.write_text(GPU.format(script=str(SCRIPT), repeatable=repeatable, follow=follow, noise=noise))
    return survive(NPROC, 1, folder / "run", inject=KILLS, script=script, **JOB)


def recoveries(survived: Survived) -> list[dict[str, Any]]:
    return [failure["recovery"] for failure in survived.failures()]


def test_kernels_that_add_in_no_fixed_order_end_no_recovery(tmp_path: Path) -> None:
    # The noise is far above the last bit of a loss, as recoveries may compare only two iterations.
    survived = train_as_on_a_gpu(tmp_path, repeatable=False, noise=1e-4)
    done = recoveries(survived)
    assert [recovery["replayed"] > 0 for recovery in done] == [True] * len(KILLS), "and none began again"
    assert all(0 < recovery["largest_difference"] < 1e-2 for recovery in done), done
    disturbed, undisturbed = losses(survived.record), losses(failure_free(NPROC, **JOB))
    assert disturbed.keys() == undisturbed.keys()
    assert all(math.isclose(disturbed[iteration], undisturbed[iteration], rel_tol=0.02) for iteration in disturbed)


@pytest.mark.full
@pytest.mark.parametrize("repeatable", [False, True])
def test_where_bits_may_differ_and_do_not_all_is_as_it_would_be(repeatable: bool, tmp_path: Path) -> None:
    survived = train_as_on_a_gpu(tmp_path, repeatable=repeatable)
    assert survived.digest == failure_free_digest(NPROC, **JOB)
    assert [recovery["largest_difference"] for recovery in recoveries(survived)] == [0] * len(KILLS)
    assert all(recovery["verified_until"] is not None for recovery in recoveries(survived))


@pytest.mark.full
def test_sums_in_rank_order_survive_a_loss_with_equal_bits(tmp_path: Path) -> None:
    job = SPARSE | {"use_distributed_optimizer": True, "global_batch_size": 6, "moevement_sums_in_rank_order": True}
    survived = survive(3, 1, tmp_path / "run", inject=("rank=1,iteration=8,phase=backward",), **job)
    assert survived.digest == failure_free_digest(3, **job)
    assert [recovery["largest_difference"] for recovery in recoveries(survived)] == [0]
