"""Torch's norms under sequence parallelism, for the local layer spec.

Megatron's ``WrappedTorchNorm`` refuses sequence parallelism, and without Apex or Transformer Engine the local spec has
no other norm, so tensor-parallel MoE (which needs sequence parallelism) could not run. A norm works on each token
alone; all it takes is that its weights' gradients, each rank's from its own part of the sequence, are summed over the
tensor-parallel ranks. Megatron does that for parameters marked ``sequence_parallel``.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch


def norm_with_sequence_parallel(original: Callable[..., torch.nn.Module]) -> Callable[..., torch.nn.Module]:
    """``WrappedTorchNorm.__new__`` that also builds norms for sequence parallelism."""

    @functools.wraps(original)
    def new(cls: type, config: Any, *args: Any, **kwargs: Any) -> torch.nn.Module:
        if not config.sequence_parallel:
            return original(cls, config, *args, **kwargs)
        without = copy.copy(config)
        without.sequence_parallel = False
        norm = original(cls, without, *args, **kwargs)
        for parameter in norm.parameters():
            parameter.sequence_parallel = True  # type: ignore[attr-defined]
        return norm

    return new
