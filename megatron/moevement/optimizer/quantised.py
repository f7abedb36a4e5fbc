"""Codes and scales of FP8 parameters, in attributes that Transformer Engine's and this project's tensors name alike."""

from __future__ import annotations

import torch

from moevement_core.util.quantised import QuantisedBuffers

_FORMS = (("_data", "_scale_inv"), ("_rowwise_data", "_rowwise_scale_inv"))
_COLUMNS = ("_columnwise_data", "_columnwise_scale_inv")


def quantised_buffers(parameter: torch.Tensor) -> QuantisedBuffers[torch.Tensor] | None:
    """Return the codes and scales of a parameter that is kept in FP8, as live tensors; None for any other parameter.

    Codes by columns are included only for MXFP8. For all other recipes, Transformer Engine computes them from the codes
    by rows after every gather.
    """
    for codes_name, scales_name in _FORMS:
        codes, scale = getattr(parameter, codes_name, None), getattr(parameter, scales_name, None)
        if torch.is_tensor(codes):
            scales = {scales_name: scale} if torch.is_tensor(scale) else {}
            columns = {name: getattr(parameter, name, None) for name in _COLUMNS} if _is_mx(scale) else {}
            return QuantisedBuffers(
                codes, scales, {name: buffer for name, buffer in columns.items() if torch.is_tensor(buffer)}
            )
    return None


def _is_mx(scale: object) -> bool:
    """Return True if the scales are exponents (E8M0), one for 32 elements of a row or of a column."""
    return torch.is_tensor(scale) and scale.dtype == torch.uint8
