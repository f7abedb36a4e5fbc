"""Weights that are kept in FP8 (``--fp8-param-gather``): tensors that report BF16 as dtype, but hold codes and scales.

The buffers of a weight have Transformer Engine's names, because Megatron's data-parallel buffers, distributed optimizer
and checkpoints access the weights through :mod:`megatron.core.fp8_utils`.
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
    """Weight ``[N, K]`` in E4M3 with one scale; subclasses have a scale for each block.

    Operations that read the weight get its dequantised values, in the dtype that the weight reports. ``copy_`` and
    fills quantise the new values. No other operation may change the weight in place.

    Attributes:
        buffers: ``uint8`` codes and inverse scales, by Transformer Engine's names.
        recipe: recipe that quantises the weight.
        scales: scales of the layer if scaling is delayed; None otherwise.
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
        """Return a weight with the quantised ``values``, ``[N, K]``, that reports the dtype of ``values``."""
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
        """Return codes and inverse scales of ``values``, by buffer name."""
        if self.scales is not None:
            quantised = by_scale(values.reshape(1, -1), self.scales.for_codes(), self.recipe.dtype(Role.WEIGHT))
        else:
            quantised = self.recipe.quantise(values, Role.WEIGHT)
        return {self.codes_name: quantised.row.codes.view(torch.uint8), self.scales_name: quantised.row.scale_inv}

    def part(self, codes: torch.Tensor) -> QuantisedTensor:
        """Return a weight that is a view of some of this weight's codes: the shard that an optimizer updates.

        Only delayed scaling permits such views, because its scale does not depend on the values of the shard.
        """
        like = torch.empty(1, dtype=self.dtype, device=codes.device).expand(
            codes.shape
        )  # The expansion needs no memory.
        return type(self)(like, self.recipe, self.scales, {**self.buffers, self.codes_name: codes})

    def quantised(self) -> Quantised:
        """Return the matrix in the form that products need. The result shares the buffers of this weight."""
        form = self._form(self.codes_name, self.scales_name, (1, 1))
        return Quantised(form, form)

    def _form(self, codes: str, scales: str, block: tuple[int, int]) -> Form:
        return Form(self.buffers[codes].view(E4M3), self.buffers[scales], block)

    def dequantised(self) -> torch.Tensor:
        """Return the dequantised values, ``[N, K]``, in the dtype that the tensor reports."""
        return self.quantised().row.dequantised().to(self.dtype).view(self.shape)

    def from_float8(self) -> torch.Tensor:
        """Return the dequantised values; Megatron calls :meth:`dequantised` by this name."""
        return self.dequantised()

    @torch.no_grad()
    def update(self, values: torch.Tensor) -> None:
        """Quantise ``values`` into this weight.

        A flat weight is a shard that an optimizer updates, so delayed scaling records the amax for the next scale. A
        whole weight is set when state is loaded. Its amax is not recorded, because the amax history is loaded as well.
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
        """Execute an operation of torch.

        With delayed scaling, a view or a slice of the weight is a view of its codes. ``copy_`` and fills quantise the
        new values. All other operations get dequantised values.
        """
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
            raise NotImplementedError(f"{func} cannot change a weight in FP8; use copy_, which quantises the values")
        plain = torch.utils._pytree.tree_map_only(
            QuantisedTensor, QuantisedTensor.dequantised, (args, dict(kwargs or {}))
        )
        return func(*plain[0], **plain[1])


class BlockQuantisedTensor(QuantisedTensor):
    """Weight in FP8 with a power-of-two scale for every block of 128 x 128 elements."""

    codes_name, scales_name = "_rowwise_data", "_rowwise_scale_inv"

    def quantised(self) -> Quantised:
        """Return the matrix in the form that products need. The result shares the buffers of this weight."""
        form = self._form(self.codes_name, self.scales_name, (BLOCK, BLOCK))
        return Quantised(form, form)


class MXQuantisedTensor(BlockQuantisedTensor):
    """Weight in MXFP8, with codes twice: for blocks of 32 elements in a row, and for blocks of 32 in a column."""

    def _quantise(self, values: torch.Tensor) -> dict[str, torch.Tensor]:
        quantised = self.recipe.quantise(values, Role.WEIGHT)
        return {
            "_rowwise_data": quantised.row.codes.view(torch.uint8),
            "_rowwise_scale_inv": quantised.row.scale_inv,
            "_columnwise_data": quantised.column.codes.view(torch.uint8),
            "_columnwise_scale_inv": quantised.column.scale_inv,
        }

    def quantised(self) -> Quantised:
        """Return the matrix in the two forms that products need. The result shares the buffers of this weight."""
        return Quantised(
            self._form("_rowwise_data", "_rowwise_scale_inv", (1, MX_BLOCK)),
            self._form("_columnwise_data", "_columnwise_scale_inv", (MX_BLOCK, 1)),
        )


def keep_in_fp8(layer: Any, recipe: Recipe) -> None:
    """Replace the weight of a linear layer by a weight in FP8.

    The original values stay available in ``get_high_precision_init_val``, from which the distributed optimizer creates
    master weights.
    """
    values = layer.weight.detach()
    weight = torch.nn.Parameter(QuantisedTensor.of(values, recipe, getattr(layer, "fp8", None)))
    kept = [values]
    weight.get_high_precision_init_val = lambda: kept[0]  # type: ignore[attr-defined]
    weight.clear_high_precision_init_val = kept.clear  # type: ignore[attr-defined]
    for name, value in vars(layer.weight).items():
        setattr(weight, name, value)
    layer.weight = weight
