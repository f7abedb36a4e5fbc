"""Check of FP8 with Transformer Engine.

The check compares our quantisers (docs/fp8.md) with Transformer Engine's byte for byte, for each recipe that the GPU
has. (MXFP8 needs Blackwell.) It also checks that the scales of a survivor keep changing after the abort of a failure.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.gpu.check import NotRun, Report
from megatron.moevement.fp8 import formats
from megatron.moevement.fp8.formats import E4M3, Form


def fp8(report: Report) -> None:
    """Compare quantisers, and check scales of a layer with delayed scaling after an abort."""
    if importlib.util.find_spec("transformer_engine") is None:
        raise NotRun("Transformer Engine is not installed")
    _survivor(report)
    values = (torch.randn(1024, 2048, generator=torch.Generator().manual_seed(0)) / 32).bfloat16()
    for name, (quantise, quantise_here) in _cases().items():
        try:
            quantised = quantise(values.cuda())
        except Exception as error:  # the GPU does not have the recipe
            report.figure(name, f"not run: {str(error).splitlines()[0][:100]}")
            continue
        codes, scales = _buffers(quantised)
        shares = _compared(codes.cpu(), scales.cpu(), quantise_here(values))
        report.figure(f"{name}: equal codes, equal inverse scales", ", ".join(f"{share:.6%}" for share in shares))
        report.claim(f"{name}: all bytes are Transformer Engine's", shares == (1.0, 1.0))


def _survivor(report: Report) -> None:
    import transformer_engine.pytorch as te
    from nvidia_resiliency_ext.inprocess.state import State
    from transformer_engine.common.recipe import DelayedScaling

    from moevement_core.restart.abort import AbortAll
    from moevement_core.restart.connections import listening
    from moevement_core.restart.leaving import Leaving

    layer = te.Linear(256, 256, params_dtype=torch.bfloat16).cuda()

    def histories() -> list[torch.Tensor]:
        for number in range(3):
            x = (1 + number) * torch.randn(128, 256, device="cuda", dtype=torch.bfloat16)
            with te.fp8_autocast(enabled=True, fp8_recipe=DelayedScaling()):
                layer(x).float().square().sum().backward()
        return [layer.fp8_meta[part].amax_history.clone() for part in ("scaling_fwd", "scaling_bwd")]

    first, second = histories(), histories()
    AbortAll(store=set(), groups=set(), before=lambda: None, leaving=Leaving(), listeners=listening())(
        State(0, 1).freeze()
    )
    third = histories()
    moves = [not torch.equal(before, after) for before, after in zip(first, second, strict=True)]
    still = [not torch.equal(before, after) for before, after in zip(second, third, strict=True)]
    report.figure("histories that move: before the abort, after it", f"{sum(moves)}, {sum(still)}")
    report.claim("scales go on moving after an abort", still == moves)


def _cases() -> dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[torch.Tensor], Form]]]:
    import transformer_engine_torch as tex
    from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer
    from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer, Float8Quantizer
    from transformer_engine.pytorch.tensor.mxfp8_tensor import MXFP8Quantizer

    dtype = tex.DType.kFloat8E4M3
    scale = torch.full((1,), 448.0 / 0.2)

    def delayed(values: torch.Tensor) -> Any:
        return Float8Quantizer(scale.cuda(), torch.zeros(1, device="cuda"), dtype)(values)

    return {
        "delayed": (delayed, lambda values: formats.by_scale(values, scale, E4M3).row),
        "tensorwise": (
            lambda values: Float8CurrentScalingQuantizer(dtype, device=values.device)(values),
            lambda values: formats.by_tensor(values, E4M3).row,
        ),
        "blockwise": (
            lambda values: Float8BlockQuantizer(
                dtype, rowwise=True, columnwise=False, force_pow_2_scales=True, block_scaling_dim=2
            )(values),
            lambda values: formats.by_squares(values, E4M3).row,
        ),
        "mxfp8": (
            lambda values: MXFP8Quantizer(dtype, rowwise=True, columnwise=False)(values),
            lambda values: formats.by_exponents(values, E4M3).row,
        ),
    }


def _buffers(quantised: Any) -> tuple[torch.Tensor, torch.Tensor]:
    from megatron.moevement.optimizer.quantised import quantised_buffers

    buffers = quantised_buffers(quantised)
    assert buffers is not None
    return buffers.codes, next(iter(buffers.scales.values()))


def _compared(codes: torch.Tensor, scales: torch.Tensor, form: Form) -> tuple[float, float]:
    """Return the shares of equal codes and inverse scales, without the padding of Transformer Engine's scales."""
    rows, columns = form.scale_inv.shape
    scales_unpadded = scales.reshape(1, 1) if scales.numel() == 1 else scales[:rows, :columns]
    return (
        float((codes.view(torch.uint8) == form.codes.view(torch.uint8)).double().mean()),
        float((scales_unpadded == form.scale_inv).double().mean()),
    )
