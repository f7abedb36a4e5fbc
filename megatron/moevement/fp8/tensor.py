"""Weights that are kept in FP8 (``--fp8-param-gather``), as tensors that show a BF16 dtype and hold codes and scales.

Their buffers have the names of Transformer Engine's tensors, because Megatron's data-parallel buffers, distributed
optimizer and checkpoints handle them through :mod:`megatron.core.fp8_utils`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from megatron.moevement.fp8.delayed import DelayedScales
from megatron.moevement.fp8.formats import BLOCK, E4M3, MX_BLOCK, Form, Quantised, by_scale
from megatron.moevement.fp8.recipe import Recipe, Role

_RANGES = {torch.ops.aten.view.default, torch.ops.aten.slice.Tensor}
_ALIASES = {torch.ops.aten.detach.default, torch.ops.aten.alias.default}


class QuantisedTensor(torch.Tensor):
    """Weight ``[N, K]`` in E4M3 with one scale, or one for each 128 x 128 elements.

    Operations that read it get the represented values, in the dtype that it shows. ``copy_`` and fills quantise. No
    other operation changes it in place.

    Attributes:
        buffers: raw buffers by the names of Transformer Engine's tensors: ``uint8`` codes, and inverse scales.
        recipe: recipe by which it is quantised.
        scales: scales of its layer with delayed scaling; None otherwise.
    """

    buffers: dict[str, torch.Tensor]
    recipe: Recipe
    scales: DelayedScales | None
    codes_name, scales_name = "_data", "_scale_inv"

    @staticmethod
    def __new__(
        cls, like: torch.Tensor, recipe: Recipe, scales: DelayedScales | None, buffers: dict[str, torch.Tensor]
    ) -> QuantisedTensor:
        """Create a tensor with the shape, dtype and device of ``like``."""
        self = torch.Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype, device=like.device)
        self.buffers, self.recipe, self.scales = buffers, recipe, scales
        return self

    @classmethod
    def of(cls, values: torch.Tensor, recipe: Recipe, scales: DelayedScales | None) -> QuantisedTensor:
        """Quantise ``values``, ``[N, K]`` in the dtype that the result shows."""
        kind = (
            MXQuantisedTensor if recipe.name == "mxfp8" else BlockQuantisedTensor if recipe.name == "blockwise" else cls
        )
        self = kind(values, recipe, scales, {})
        if scales is not None:
            scales.record(Role.WEIGHT, values)
        for name, tensor in self._quantise(values).items():
            self.buffers[name] = (tensor.view(values.shape) if tensor.numel() == values.numel() else tensor).clone()
        return self

    def _quantise(self, values: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the buffers that represent ``values``."""
        if self.scales is not None:
            quantised = by_scale(values.reshape(1, -1), self.scales.for_codes(), self.recipe.dtype(Role.WEIGHT))
        else:
            quantised = self.recipe.quantise(values, Role.WEIGHT)
        return {self.codes_name: quantised.row.codes.view(torch.uint8), self.scales_name: quantised.row.scale_inv}

    def part(self, codes: torch.Tensor) -> QuantisedTensor:
        """Return a weight that is a view of some of this weight's codes: the shard that an optimizer updates.

        It exists only with delayed scaling, whose scale does not depend on the part that is quantised.
        """
        like = torch.empty(1, dtype=self.dtype, device=codes.device).expand(
            codes.shape
        )  # The expansion needs no memory.
        return type(self)(like, self.recipe, self.scales, {**self.buffers, self.codes_name: codes})

    def quantised(self) -> Quantised:
        """Return the matrix in the form that products need, with the buffers and not copies."""
        form = self._form(self.codes_name, self.scales_name, (1, 1))
        return Quantised(form, form)

    def _form(self, codes: str, scales: str, block: tuple[int, int]) -> Form:
        return Form(self.buffers[codes].view(E4M3), self.buffers[scales], block)

    def dequantised(self) -> torch.Tensor:
        """Return the represented values, ``[N, K]``, in the dtype that the tensor shows."""
        return self.quantised().row.dequantised().to(self.dtype).view(self.shape)

    def from_float8(self) -> torch.Tensor:
        """Return the represented values; Megatron's name for :meth:`dequantised`."""
        return self.dequantised()

    @torch.no_grad()
    def update(self, values: torch.Tensor) -> None:
        """Change the represented values to ``values``.

        An optimizer changes a shard, whose amax then counts for the next scale. Loading changes a whole weight, and
        counts for nothing, because the history is loaded too.
        """
        if self.scales is not None and self.dim() == 1:
            self.scales.record(Role.WEIGHT, values.to(self.dtype))
        for name, tensor in self._quantise(values.to(self.dtype).view(self.shape)).items():
            self.buffers[name].copy_(tensor.view(self.buffers[name].shape))

    def __getattr__(self, name: str) -> torch.Tensor:
        if name.startswith("_") and "buffers" in self.__dict__ and name in self.__dict__["buffers"]:
            return self.buffers[name]
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({self.recipe.name}, {list(self.shape)}, looks like {self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Dispatch an operation, as the class describes."""
        first: Any = args[0] if args else None
        if func in _RANGES and isinstance(first, QuantisedTensor) and first.scales is not None:
            return first.part(func(first.buffers[first.codes_name].view(first.shape), *args[1:]))
        if func in _ALIASES:
            return type(first)(first, first.recipe, first.scales, first.buffers)
        if isinstance(first, QuantisedTensor) and func is torch.ops.aten.copy_.default:
            source = args[1]
            first.update(source.dequantised() if isinstance(source, QuantisedTensor) else source)
            return first
        if isinstance(first, QuantisedTensor) and func in (torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default):
            first.update(torch.full(first.shape, args[1] if len(args) > 1 else 0.0, dtype=first.dtype))
            return first
        if isinstance(first, QuantisedTensor) and func._schema.is_mutable:
            raise NotImplementedError(f"{func} on a weight in FP8; copy_ quantises, and nothing else changes it")
        plain = torch.utils._pytree.tree_map_only(
            QuantisedTensor, QuantisedTensor.dequantised, (args, dict(kwargs or {}))
        )
        return func(*plain[0], **plain[1])


class BlockQuantisedTensor(QuantisedTensor):
    """Weight in FP8 with a power of two for every 128 x 128 elements."""

    codes_name, scales_name = "_rowwise_data", "_rowwise_scale_inv"

    def quantised(self) -> Quantised:
        """Return the matrix in the form that products need, with the buffers and not copies."""
        form = self._form(self.codes_name, self.scales_name, (BLOCK, BLOCK))
        return Quantised(form, form)


class MXQuantisedTensor(BlockQuantisedTensor):
    """Weight in FP8 with an exponent for every 32 elements of a row, and separate codes for those of a column."""

    def _quantise(self, values: torch.Tensor) -> dict[str, torch.Tensor]:
        quantised = self.recipe.quantise(values, Role.WEIGHT)
        return {
            "_rowwise_data": quantised.row.codes.view(torch.uint8),
            "_rowwise_scale_inv": quantised.row.scale_inv,
            "_columnwise_data": quantised.column.codes.view(torch.uint8),
            "_columnwise_scale_inv": quantised.column.scale_inv,
        }

    def quantised(self) -> Quantised:
        """Return the matrix in the forms that products need, with the buffers and not copies."""
        return Quantised(
            self._form("_rowwise_data", "_rowwise_scale_inv", (1, MX_BLOCK)),
            self._form("_columnwise_data", "_columnwise_scale_inv", (MX_BLOCK, 1)),
        )


def keep_in_fp8(layer: Any, recipe: Recipe) -> None:
    """Replace the weight of a linear layer by one in FP8.

    The distributed optimizer creates its master weights once, from the original values
    (``get_high_precision_init_val``).
    """
    values = layer.weight.detach()
    weight = torch.nn.Parameter(QuantisedTensor.of(values, recipe, getattr(layer, "fp8", None)))
    kept = [values]
    weight.get_high_precision_init_val = lambda: kept[0]  # type: ignore[attr-defined]
    weight.clear_high_precision_init_val = kept.clear  # type: ignore[attr-defined]
    for name, value in vars(layer.weight).items():
        setattr(weight, name, value)
    layer.weight = weight
