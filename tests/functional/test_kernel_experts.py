"""Experts on the project's kernels compute Megatron's numbers; a model that they cannot run is refused in one line."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.launching import finished, launch
from tests.training import SCRIPT, flags, train

ON: dict[str, Any] = {"moevement_frozen_kernels": "triton"}
OFF: dict[str, Any] = {"moevement_frozen_kernels": "off"}
SWIGLU: dict[str, Any] = {}
SQUARED_RELU: dict[str, Any] = {"swiglu": False, "squared_relu": True}
GELU: dict[str, Any] = {"swiglu": False}


@pytest.mark.parametrize(
    ("ranks", "job"),
    [
        (1, SWIGLU),
        (2, SWIGLU | {"expert_model_parallel_size": 2, "overlap_grad_reduce": True, "use_distributed_optimizer": True}),
        pytest.param(1, SQUARED_RELU, marks=pytest.mark.full),
        pytest.param(1, GELU, marks=pytest.mark.full),
        pytest.param(
            2,
            {"tensor_model_parallel_size": 2, "sequence_parallel": True, "moe_token_dispatcher_type": "allgather"},
            marks=pytest.mark.full,
        ),
    ],
)
def test_losses_and_gradients_are_megatrons(ranks: int, job: dict[str, Any], tmp_path: Path) -> None:
    """Compare losses and gradient norms in FP32 up to rounding, as sums have another order."""
    lines = [train(ranks, tmp_path / name, **job, **kernels).metrics() for name, kernels in (("on", ON), ("off", OFF))]
    for with_kernels, without_kernels in zip(*lines, strict=True):
        assert with_kernels["loss"] == pytest.approx(without_kernels["loss"], rel=1e-6)
        assert with_kernels["grad_norm"] == pytest.approx(without_kernels["grad_norm"], rel=1e-5)


def run(**job: Any) -> tuple[int, str, str]:
    return finished(launch("--nproc", "1", str(SCRIPT), *flags(train_iters=1, **job)))


@pytest.mark.full
def test_what_runs_is_said() -> None:
    code, out, err = run(**ON)
    assert code == 0, err
    assert re.search(r"\bINFO rank 0: .*\bexperts\b.*\breference\b.*\bGPU\b", out), out


@pytest.mark.parametrize(
    ("job", "named"),
    [
        ({"moe_ffn_hidden_size": 44}, r"--moe-ffn-hidden-size 44\b.*\b8\b"),
        pytest.param(
            {"moe_apply_probs_on_input": True, "moe_router_topk": 1, "moe_router_pre_softmax": True},
            "--moe-apply-probs-on-input",
            marks=pytest.mark.full,
        ),
        pytest.param(
            {"swiglu": False, "quick_geglu": True}, r"\bquick_gelu\b.*\bswiglu\b.*\bgeglu\b", marks=pytest.mark.full
        ),
    ],
)
def test_what_the_kernels_cannot_run_is_one_line(job: dict[str, Any], named: str) -> None:
    code, _, err = run(**ON, **job)
    assert code == 2
    assert re.search(rf"--moevement-frozen-kernels triton\b.*{named}.*\boff\b", err), err
    assert "Traceback" not in err
