"""Optimizers whose state is narrow, killed: all five rows of table 7, and what is between them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.functional.test_fp8 import KILLS
from tests.functional.test_kills import LAYOUTS, SPARSE, reference
from tests.launching import survive

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
QUICK = {"FP8/FP16/FP8+FP16"}
FROM_THE_START = "rank=1,iteration=2,phase=forward"
"""Masters that are narrower than weights are made before the first iteration, on a rank that is new later, too."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.full]) for name in REGIMES]
)
@pytest.mark.parametrize("recovery", ["replay", pytest.param("redo", marks=pytest.mark.full)])
def test_killed_in_every_regime(name: str, recovery: str, tmp_path: Path) -> None:
    _, layout = LAYOUTS["PP2xEP2"]
    flags_ = SPARSE | layout | {"bf16": True} | REGIMES[name]
    wanted = reference(4, tmp_path / "failure_free", **flags_)
    survived = survive(
        4, 2, tmp_path / "recovered", inject=(FROM_THE_START, *KILLS), **flags_, moevement_recovery=recovery
    )
    assert survived.digest == wanted
    survived.check_metrics(20)
