"""Torch's norms under sequence parallelism, for the local layer spec.

Megatron's ``WrappedTorchNorm`` refuses sequence parallelism. Without Apex or Transformer Engine, the local spec has no
other norm, so tensor-parallel MoE, which needs sequence parallelism, could not run. A norm processes each token alone,
so only the weight gradients need care. Each rank has the weight gradients for a part of the sequence, and
tensor-parallel ranks have to sum them. Megatron does this for parameters marked ``sequence_parallel``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch


def norm_with_sequence_parallel(
    original: Callable[..., torch.nn.Module], cls: type, config: Any, *args: Any, **kwargs: Any
) -> torch.nn.Module:
    """Build norms for sequence parallelism too, in ``WrappedTorchNorm.__new__``."""
    if not config.sequence_parallel:
        return original(cls, config, *args, **kwargs)
    without = copy.copy(config)
    without.sequence_parallel = False
    norm = original(cls, without, *args, **kwargs)
    for parameter in norm.parameters():
        parameter.sequence_parallel = True  # type: ignore[attr-defined]
    return norm
