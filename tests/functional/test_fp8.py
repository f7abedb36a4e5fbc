"""Jobs that train in FP8 survive kills with the bits of a failure-free run: every recipe, weights in BF16 or FP8.

The CPU emulates the FP8 numbers and the state of each recipe exactly. Only the order of sums in products is the CPU's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.failure_free import failure_free_digest
from tests.functional.jobs import KILLS, LAYOUTS, SPARSE, WIDTHS, among
from tests.launching import survive
from tests.training import train

WEIGHTS: dict[str, dict[str, Any]] = {
    "replicas": {"use_distributed_optimizer": False},
    "shards": {"use_distributed_optimizer": True},
    "weights in FP8": {"use_distributed_optimizer": True, "fp8_param_gather": True},
}


def recipe(layout: str, name: str, weights: str, **others: Any) -> dict[str, Any]:
    """Return the flags of a layout in FP8."""
    chosen = (
        SPARSE
        | LAYOUTS[layout][1]
        | {"bf16": True, "fp8_format": "hybrid", "fp8_recipe": name, **WEIGHTS[weights], **others}
    )
    if name == "mxfp8" and "fp8_param_gather" in chosen:
        chosen["reuse_grad_buf_for_mxfp8_param_ag"] = True
    return chosen


CASES = [(name, weights) for name in ("delayed", "tensorwise", "blockwise", "mxfp8") for weights in WEIGHTS]
QUICK = {("mxfp8", "weights in FP8")}


@pytest.mark.parametrize(
    ("name", "weights"),
    [pytest.param(*case, marks=[] if case in QUICK else [pytest.mark.full], id="-".join(case)) for case in CASES],
)
@pytest.mark.parametrize(
    "recovery", [pytest.param("replay"), pytest.param("redo", marks=pytest.mark.full)]
)  # fmt: skip
@WIDTHS
@pytest.mark.slow("five kills in emulated FP8")
def test_killed_in_every_recipe(layout: str, name: str, weights: str, recovery: str, tmp_path: Path) -> None:
    nproc, flags_ = LAYOUTS[layout][0], recipe(layout, name, weights)
    wanted = failure_free_digest(nproc, **flags_)
    kills = among(nproc, KILLS, every=2)
    survived = survive(nproc, 2, tmp_path / "recovered", inject=kills, **flags_, moevement_recovery=recovery)
    assert survived.digest == wanted
    survived.check_metrics(20)
    assert len(survived.failures()) == len(kills)


@pytest.mark.full
@WIDTHS
@pytest.mark.slow("five kills in emulated FP8")
def test_scales_look_back_over_several_iterations_and_recompute(layout: str, tmp_path: Path) -> None:
    """Kill ranks of a job with a history of amaxes and recomputed activations, which recovers by redo."""
    history = {"fp8_amax_history_len": 4, "fp8_amax_compute_algo": "max"}
    again = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    nproc, flags_ = LAYOUTS[layout][0], recipe(layout, "delayed", "weights in FP8", **history)
    wanted = failure_free_digest(nproc, **flags_)
    kills = among(nproc, KILLS, every=2)
    survived = survive(nproc, 2, tmp_path / "recovered", inject=kills, **flags_ | again, moevement_recovery="redo")
    assert survived.digest == wanted, "activations that are made again have the scales that they had"


@pytest.mark.full
@pytest.mark.parametrize("recovery", ["replay", pytest.param("redo", marks=pytest.mark.full)])
@WIDTHS
@pytest.mark.slow("six kills in emulated FP8")
def test_skipped_updates_move_scales_and_not_weights(layout: str, recovery: str, tmp_path: Path) -> None:
    """Kill ranks after updates, and after skipped updates, when weights still have codes of earlier scales."""
    scaled = {"bf16": False, "fp16": True, "initial_loss_scale": 2**22, "hysteresis": 1}
    nproc, flags_ = LAYOUTS[layout][0], recipe(layout, "delayed", "weights in FP8", **scaled)
    wanted = failure_free_digest(nproc, **flags_)
    kills = among(nproc, ("rank=3,iteration=9,phase=forward", *KILLS), every=3)
    survived = survive(nproc, 2, tmp_path / "recovered", inject=kills, **flags_, moevement_recovery=recovery)
    assert survived.digest == wanted
    skipped = [line["iteration"] for line in survived.record.metrics() if line["skipped"]]
    assert {2, 8} <= set(skipped), skipped
    assert {6, 7, 9} & set(skipped) == set(), skipped


@pytest.mark.parametrize(
    "name",
    ["blockwise", *(pytest.param(name, marks=pytest.mark.full) for name in ("tensorwise", "mxfp8"))],
)  # fmt: skip
def test_weights_in_fp8_train_like_weights_that_are_quantised_in_each_iteration(name: str, tmp_path: Path) -> None:
    """Compare the losses of both runs: they must be equal.

    Both round masters to BF16 before they quantise, as Transformer Engine does according to Megatron.
    """
    plain = {"train_iters": 4, "pipeline_model_parallel_size": 1, **dict.fromkeys(SPARSE.keys() - {"train_iters"})}
    runs = [
        train(2, tmp_path / weights, **(recipe("PP2xEP2", name, weights) | plain))
        for weights in ("shards", "weights in FP8")
    ]
    losses = [[line["loss"] for line in run.metrics()] for run in runs]  # norms are summed in the order of the shards
    assert losses[0] == losses[1]
    assert len(losses[0]) == 4
