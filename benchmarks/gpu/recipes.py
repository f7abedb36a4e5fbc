"""Our quantisers (docs/fp8.md) against Transformer Engine's, byte for byte: codes and inverse scales of a weight, for each
recipe that the GPU has; MXFP8 needs Blackwell.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch

from megatron.moevement.fp8 import formats
from megatron.moevement.fp8.formats import E4M3, Form


def measure() -> dict[str, Any]:
    """How many codes and scales are equal."""
    if importlib.util.find_spec("transformer_engine") is None or not torch.cuda.is_available():
        return {"skipped": "needs a GPU and Transformer Engine"}
    values = (torch.randn(1024, 2048, generator=torch.Generator().manual_seed(0)) / 32).bfloat16()
    rows = []
    for name, (theirs, ours) in _cases().items():
        try:
            made = theirs(values.cuda())
        except Exception as error:  # a recipe that this GPU does not have
            rows.append([name, "not run", str(error).splitlines()[0][:100]])
            continue
        codes, scales = _buffers(made)
        rows.append([name, *_compared(codes.cpu(), scales.cpu(), ours(values))])
    return {"header": ["recipe", "equal codes", "equal inverse scales"], "rows": rows}


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


def _buffers(made: Any) -> tuple[torch.Tensor, torch.Tensor]:
    from megatron.moevement.optimizer.quantised import quantised_buffers

    buffers = quantised_buffers(made)
    assert buffers is not None
    return buffers.codes, next(iter(buffers.scales.values()))


def _compared(codes: torch.Tensor, scales: torch.Tensor, ours: Form) -> list[str]:
    """Transformer Engine pads scales to multiples that its kernels want; what is there of ours is compared."""
    rows, columns = ours.scale_inv.shape
    theirs = scales.reshape(1, 1) if scales.numel() == 1 else scales[:rows, :columns]
    return [
        f"{(codes.view(torch.uint8) == ours.codes.view(torch.uint8)).double().mean():.6%}",
        f"{(theirs == ours.scale_inv).double().mean():.6%}",
    ]
