"""Jobs that several test modules train, and functions that kill ranks of them."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from moevement_core.run.run_record import RunRecord
from tests.launching import Survived, finished, launch, logs

SPARSE: dict[str, Any] = {
    "moevement_sparse_ckpt": True,
    "moevement_window": 3,
    "moevement_replicas_on_same_node": True,
    "train_iters": 20,
    "global_batch_size": 4,
}
"""Flags of sparse checkpoints for short iterations: two micro-batches, or one for each of two replicas."""
SAMPLES: dict[str, Any] = {"global_batch_size": SPARSE["global_batch_size"]}
"""Batch size of :data:`SPARSE`, for a recount of the tokens that its job trained on."""
MICRO_BATCHES: dict[str, Any] = {"global_batch_size": 8}
"""Batch size of four micro-batches, or two for each of two replicas, which keeps the pipeline full for a while."""
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "PP2": (
        2,
        {
            "pipeline_model_parallel_size": 2, "num_layers": 2, "use_distributed_optimizer": True, "bf16": True,
            "moevement_replicas": 1,
        },
    ),
    "PP2xEP2": (
        4,
        {
            "pipeline_model_parallel_size": 2, "expert_model_parallel_size": 2, "use_distributed_optimizer": True,
            "bf16": True,
        },
    ),
    "PP4": (4, {"pipeline_model_parallel_size": 4}),
    "VPP2": (
        2,
        {
            "pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": 1, "moevement_replicas": 1,
            "fp16": True, "initial_loss_scale": 2**16,
        },
    ),
    "PP2xDP2": (
        4,
        {
            "pipeline_model_parallel_size": 2, "use_distributed_optimizer": True, "overlap_grad_reduce": True,
            "overlap_param_gather": True, "hidden_dropout": 0.1,
        },
    ),
    "TP2xPP2": (
        4, {"pipeline_model_parallel_size": 2, "tensor_model_parallel_size": 2, "sequence_parallel": True},
    ),
}  # fmt: skip


BOTH = pytest.mark.parametrize("recovery", ["replay", pytest.param("redo", marks=pytest.mark.full)])

EP2XDP2: dict[str, Any] = {
    "expert_model_parallel_size": 2, "use_distributed_optimizer": True, "bf16": True, **MICRO_BATCHES,
}  # fmt: skip
PHASES = (
    "rank=0,iteration=5,phase=forward", "rank=3,iteration=8,phase=backward", "rank=1,iteration=11,phase=reduce",
    "rank=2,iteration=13,phase=commit", "rank=1,iteration=15,phase=step", "rank=3,iteration=17,phase=gather",
    "rank=0,iteration=19,phase=snapshot",
)  # fmt: skip

EIGHT_PHASES = (
    "rank=0,iteration=5,phase=forward", "rank=3,iteration=8,phase=backward", "rank=1,iteration=11,phase=reduce",
    "rank=2,iteration=14,phase=commit", "rank=1,iteration=17,phase=step", "rank=3,iteration=20,phase=gather",
    "rank=0,iteration=23,phase=snapshot", "rank=2,iteration=26,phase=replicate",
)  # fmt: skip

KILLS = (
    "rank=1,iteration=3,phase=forward", "rank=3,iteration=7,phase=backward", "rank=0,iteration=10,phase=gather",
    "rank=2,iteration=13,phase=commit", "rank=3,iteration=17,phase=snapshot",
)  # fmt: skip

AWARE: dict[str, Any] = {"use_precision_aware_optimizer": True}
FP8_WEIGHTS: dict[str, Any] = {"fp8_format": "hybrid", "fp8_param_gather": True}
REGIMES: dict[str, dict[str, Any]] = {
    "FP16/FP16/FP16+FP16": {
        "bf16": False, "fp16": True, "initial_loss_scale": 2**12, **AWARE, "main_params_dtype": "fp16",
        "exp_avg_dtype": "fp16", "exp_avg_sq_dtype": "fp16", "accumulate_allreduce_grads_in_fp32": True,
    },
    "FP8/FP32/FP32+FP32": {**FP8_WEIGHTS, "fp8_recipe": "tensorwise"},
    "FP8/FP16/FP32+FP32": {**FP8_WEIGHTS, "fp8_recipe": "delayed", **AWARE, "main_params_dtype": "fp16"},
    "FP8/FP16/FP8+FP16": {
        **FP8_WEIGHTS, "fp8_recipe": "delayed", **AWARE, "main_params_dtype": "fp16", "exp_avg_dtype": "fp8",
        "exp_avg_sq_dtype": "fp16",
    },
    "FP8/FP8/FP8+FP16": {
        **FP8_WEIGHTS, "fp8_recipe": "delayed", **AWARE, "main_params_dtype": "fp8", "exp_avg_dtype": "fp8",
        "exp_avg_sq_dtype": "fp16",
    },
    "BF16 and remainders, BF16+BF16": {**AWARE, "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"},
    "BF16 gradients": {**AWARE, "exp_avg_dtype": "fp8", "main_grads_dtype": "bf16"},
    "blockwise, FP8+FP32": {**FP8_WEIGHTS, "fp8_recipe": "blockwise", **AWARE, "exp_avg_dtype": "fp8"},
}  # fmt: skip


WIDTHS = pytest.mark.parametrize("layout", ["PP2", pytest.param("PP2xEP2", marks=pytest.mark.full)])
"""Layouts: two ranks in every test run, and four ranks, whose kills take twice as long, in the full matrix only."""


def among(nproc: int, faults: Sequence[str], every: int = 1) -> tuple[str, ...]:
    """Return faults of four ranks as faults of ``nproc`` ranks; with two ranks, rank 3 becomes rank 1.

    Args:
        nproc: number of ranks of the job.
        faults: faults for four ranks.
        every: with two ranks, only each ``every``-th fault is kept.
    """
    chosen = faults if nproc == 4 else faults[::every]
    return tuple(re.sub(r"rank=(\d+)", lambda match: f"rank={int(match[1]) % nproc}", fault) for fault in chosen)


def assert_alone(survived: Survived, stages: int) -> None:
    """Check that fewer than ``stages`` stages replayed in each recovery.

    Stages that lost no state must not replay.
    """
    for failure in survived.failures():
        if failure["recovery"] is None:
            continue
        replayed = {stage for stage, count in failure["recovery"]["replayed_by_stage"].items() if count}
        assert len(replayed) < stages, failure["scope"]


def killed_from_outside(run_dir: Path, ranks: tuple[int, ...], when: Callable[[int], bool], *words: str) -> Survived:
    """Run a job; kill several of its ranks at once, when ``when`` returns True for the newest iteration."""
    job = launch(*words, "--run-dir", str(run_dir))
    record, is_done = RunRecord(run_dir), False
    while job.poll() is None:
        time.sleep(0.005)
        newest = (record.newest_metric() or {"iteration": 0})["iteration"]
        if not is_done and newest and when(newest):
            pids = {process["rank"]: process["pid"] for process in json.loads(record.ranks_path.read_text())}
            for rank in ranks:
                os.kill(pids[rank], signal.SIGKILL)
            is_done = True
    code, out, err = finished(job)
    assert code == 0, f"{out}\n{err}\n{logs(run_dir)}"
    return Survived(run_dir, out)
