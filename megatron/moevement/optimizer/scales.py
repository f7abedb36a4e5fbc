"""The scales of FP8 that a forward or backward pass leaves behind for the next one (delayed scaling)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from megatron.moevement.fp8.delayed import DelayedScales
from moevement_core.errors import RecoveryError

KEY = "fp8_scales"
"""Where they are in the boundary between iterations."""
_DIRECTIONS = ("scaling_fwd", "scaling_bwd")


class Scales:
    """Those of a rank's virtual stages.

    Args:
        chunks: in their wrappers, or without.
    """

    def __init__(self, chunks: Iterable[Any]) -> None:
        self._live = fp8_scales(chunks)

    def state(self) -> dict[str, list[dict[str, torch.Tensor]]]:
        """Live tensors, as a part of the boundary."""
        return {KEY: self._live}

    def copies(self) -> dict[str, list[dict[str, torch.Tensor]]]:
        """The same, as it stays."""
        return {KEY: [{name: tensor.clone() for name, tensor in chunk.items()} for chunk in self._live]}

    @torch.no_grad()
    def put(self, boundary: Mapping[str, Any]) -> None:
        """The inverse of both; a boundary without scales is one of a recipe that has none.

        Raises:
            RecoveryError: it is the boundary of another job.
        """
        saved = boundary.get(KEY, [{} for _ in self._live])
        if [list(chunk) for chunk in self._live] != [list(chunk) for chunk in saved]:
            raise RecoveryError("the scales of FP8 are not those of this model; recover with the flags of that run")
        for chunk, its_saved in zip(self._live, saved, strict=True):
            for name, tensor in chunk.items():
                tensor.copy_(its_saved[name])


def fp8_scales(chunks: Iterable[Any]) -> list[dict[str, torch.Tensor]]:
    """Live scales and histories of amaxes of each virtual stage, by name; empty for recipes that do not look back.

    Those of our layers, and those that Transformer Engine keeps in a layer's ``fp8_meta``.
    """
    return [dict(_of_chunk(chunk)) for chunk in chunks]


def _of_chunk(chunk: Any) -> Iterator[tuple[str, torch.Tensor]]:
    config = getattr(chunk, "config", None)
    if getattr(config, "fp8", None) is None or getattr(config, "fp8_recipe", None) != "delayed":
        return  # without a walk over the modules, in every iteration
    for name, module in chunk.named_modules():
        if isinstance(module, DelayedScales):
            yield f"{name}.scale", module.scale
            yield f"{name}.amax_history", module.amax_history
            yield f"{name}.made", module.made
        meta = getattr(module, "fp8_meta", None)
        if isinstance(meta, dict):  # not tested on GPUs
            for direction in _DIRECTIONS:
                for what in ("scale", "amax_history"):
                    if torch.is_tensor(tensor := getattr(meta.get(direction), what, None)):
                        yield f"{name}.{direction}.{what}", tensor
