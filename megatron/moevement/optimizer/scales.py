"""FP8 scales of delayed scaling, which an iteration leaves for the next iteration."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from megatron.moevement.fp8.delayed import DelayedScales
from moevement_core.errors import RecoveryError

KEY = "fp8_scales"
"""Key of the scales in the boundary state."""
_FORWARD = "scaling_fwd"
_DIRECTIONS = (_FORWARD, "scaling_bwd")
_SCALE = ".scale"
_MADE_IN_FORWARD = tuple(f"{direction}.{what}" for direction in _DIRECTIONS for what in ("scale", "amax_history"))
"""Endings of the names of tensors that Transformer Engine creates in a module's first forward pass."""
_PER_PRODUCT = 3
"""Number of scales that Transformer Engine has for each matrix product of the forward pass: input, weight, output."""


class Scales:
    """Scales and amax histories of a rank's virtual stages.

    Each method looks the tensors up again, because Transformer Engine creates a module's tensors in the first forward
    pass of the module.

    Args:
        chunks: virtual stages, with or without their wrappers.
    """

    def __init__(self, chunks: Iterable[Any]) -> None:
        self._chunks = list(chunks)

    def state(self) -> dict[str, list[dict[str, torch.Tensor]]]:
        """Return the live scales and amax histories, as a part of the boundary state."""
        return {KEY: fp8_scales(self._chunks)}

    def copies(self) -> dict[str, list[dict[str, torch.Tensor]]]:
        """Return copies of the scales and amax histories, as a part of the boundary state."""
        return {KEY: [{name: tensor.clone() for name, tensor in chunk.items()} for chunk in fp8_scales(self._chunks)]}

    @torch.no_grad()
    def put(self, boundary: Mapping[str, Any]) -> None:
        """Set scales and amax histories to those in the boundary state ``boundary``.

        On a replacement, modules have not run yet, so the method creates their tensors first. A module that ran for the
        first time after ``boundary`` was recorded gets its initial values. Only delayed scaling has these tensors.

        Raises:
            RecoveryError: the boundary state is from a job with another model.
        """
        every = boundary.get(KEY, [{} for _ in self._chunks])
        for chunk, saved in zip(self._chunks, every, strict=False):
            _make_tensors(chunk, saved)
        live = fp8_scales(self._chunks)
        if len(every) != len(live) or not all(map(_fits, every, live)):
            raise RecoveryError("the saved FP8 scales do not fit this model; use the flags of the job that saved them")
        for chunk, saved in zip(live, every, strict=True):
            for name, tensor in chunk.items():
                if name in saved:
                    tensor.copy_(saved[name])
                else:
                    tensor.fill_(1.0 if name.endswith(_SCALE) else 0.0)


def _fits(saved: Mapping[str, Any], live: Mapping[str, Any]) -> bool:
    """Return True if ``saved`` has all names of ``live``, except names of modules that had not run before the save."""
    return list(saved) == [name for name in live if name in saved or not name.endswith(_MADE_IN_FORWARD)]


def _make_tensors(chunk: Any, saved: Mapping[str, torch.Tensor]) -> None:
    """Make Transformer Engine's modules create the tensors in ``saved``, as their first forward pass would."""
    for name, module in chunk.named_modules():
        meta = getattr(module, "fp8_meta", None)
        scale = saved.get(f"{name}.{_FORWARD}{_SCALE}")
        if scale is None or not isinstance(meta, dict) or _FORWARD in meta:
            continue
        from megatron.core.fp8_utils import get_fp8_recipe

        meta["recipe"], meta["num_gemms"] = get_fp8_recipe(chunk.config), scale.numel() // _PER_PRODUCT
        module.init_fp8_meta_tensors(meta["recipe"])


def fp8_scales(chunks: Iterable[Any]) -> list[dict[str, torch.Tensor]]:
    """Return live scales and amax histories of each virtual stage, by name; empty unless scaling is delayed.

    The tensors belong to this project's layers, or to the ``fp8_meta`` of Transformer Engine's layers.
    """
    return [dict(_of_chunk(chunk)) for chunk in chunks]


def _of_chunk(chunk: Any) -> Iterator[tuple[str, torch.Tensor]]:
    config = getattr(chunk, "config", None)
    if getattr(config, "fp8", None) is None or getattr(config, "fp8_recipe", None) != "delayed":
        return  # The return saves a walk over all modules in every iteration.
    for name, module in chunk.named_modules():
        if isinstance(module, DelayedScales):
            yield f"{name}.scale", module.scale
            yield f"{name}.amax_history", module.amax_history
            yield f"{name}.made", module.get_buffer("made")
        meta = getattr(module, "fp8_meta", None)
        if isinstance(meta, dict):  # not tested on GPUs
            for direction in _DIRECTIONS:
                for what in ("scale", "amax_history"):
                    if torch.is_tensor(tensor := getattr(meta.get(direction), what, None)):
                        yield f"{name}.{direction}.{what}", tensor
