"""Regions of a forward pass that run in FP8, and their recomputation in the backward pass.

With delayed scaling, scales depend on earlier passes. A recomputed forward pass needs the scales of the first forward
pass. It must not record amaxes a second time, and must not set scales. A region therefore keeps a :class:`Call` for
each matrix product of the first forward pass, in order, and uses these objects again in the recomputation.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from megatron.moevement.fp8.delayed import DelayedScales, set_scales
from megatron.moevement.fp8.formats import Quantised, by_scale
from megatron.moevement.fp8.recipe import Recipe, Role


class Call:
    """Matrix product of a linear layer in one forward pass, with the scales that a recomputation has to use again."""

    def __init__(self, region: Region, scales: DelayedScales | None) -> None:
        self._region = region
        self._scales = scales
        self._then = scales.scale.clone() if scales is not None else None
        self._sets_scales = scales is not None and region.trains and not region.layers

    def quantise(self, matrix: torch.Tensor, role: Role) -> Quantised:
        """Quantise a matrix ``[M, N]`` of this product.

        With delayed scaling, a gradient gets the present scale. An input or a weight gets the scale that it had in the
        first forward pass.
        """
        recipe, scales = self._region.recipe, self._scales
        if scales is None:
            return recipe.quantise(matrix, role)
        assert self._then is not None
        if self._region.trains and not (self._region.is_recomputation and role is not Role.GRADIENT):
            scales.record(role, matrix)
        scale = scales.scale if role is Role.GRADIENT else self._then
        return by_scale(matrix, scale[role].clone(), recipe.dtype(role))

    def after_backward(self) -> None:
        """Set the gradient scales of the region's layers, if this product is the region's first.

        The backward pass visits products in reverse, so at the first product it has recorded all gradients' amaxes.
        """
        if self._sets_scales:
            set_scales(self._region.layers, (Role.GRADIENT,), self._region.group)


class Region:
    """Part of a forward pass that runs in FP8: one micro-batch of a stage, or one layer.

    Attributes:
        trains: True if a backward pass will follow.
        layers: scales of the linear layers that ran, in order.
    """

    def __init__(self, recipe: Recipe, group: Any) -> None:
        self.recipe = recipe
        self.group = group
        self.trains = torch.is_grad_enabled()
        self.layers: list[DelayedScales] = []
        self._again: deque[Call] | None = None
        self._tapes: list[deque[Call]] = []

    def call(self, scales: DelayedScales | None) -> Call:
        """Return the :class:`Call` of the next matrix product; a recomputation gets the objects of the first pass."""
        if self._again is not None:
            call = self._again.popleft()
        else:
            call = Call(self, scales)
            if scales is not None:
                self.layers.append(scales)
        for tape in self._tapes:
            tape.append(call)
        return call

    @property
    def is_recomputation(self) -> bool:
        """True while a backward pass recomputes the region."""
        return self._again is not None

    @property
    def is_taped(self) -> bool:
        """True in a block that the backward pass will recompute, and while it recomputes the block."""
        return bool(self._tapes) or self.is_recomputation

    @contextmanager
    def first_run(self, tape: deque[Call]) -> Iterator[None]:
        """Append each :class:`Call` of a ``with`` block to ``tape``, for a recomputation. Blocks may be nested."""
        self._tapes.append(tape)
        try:
            yield
        finally:
            self._tapes.remove(tape)

    @contextmanager
    def second_run(self, tape: deque[Call]) -> Iterator[None]:
        """Execute a ``with`` block again, with each :class:`Call` that :meth:`first_run` appended to ``tape``."""
        before = _regions[:], self._again, self._tapes
        _regions.append(self)
        self._again, self._tapes = tape, []
        try:
            yield
        finally:
            _regions[:], self._again, self._tapes = before


_regions: list[Region] = []
"""Open regions, the innermost last. A list for the process suffices, because one thread runs all passes."""


def forget() -> None:
    """Drop all regions that an interruption has left open."""
    _regions.clear()


def current() -> Region | None:
    """Return the innermost region that runs; None outside of regions."""
    return _regions[-1] if _regions else None


@contextmanager
def autocast(recipe: Recipe, group: Any) -> Iterator[None]:
    """Run the linear layers of a ``with`` block in FP8. With delayed scaling, set scales at the end of the block.

    Collective over ``group``, over which amaxes are reduced.
    """
    if (outer := current()) is not None and outer.is_taped and outer.recipe == recipe:
        yield  # The outer region records these operations for a recomputation, or is recomputing them now.
        return
    region = Region(recipe, group)
    _regions.append(region)
    try:
        yield
    finally:
        _regions.pop()
    if region.trains:
        set_scales(region.layers, (Role.INPUT, Role.WEIGHT), group)


def checkpoint(
    function: Callable[..., Any], distribute: bool, tracker: Any, tp_group: Any, *args: Any, **kwargs: Any
) -> Any:
    """Run ``function`` by Megatron's activation checkpointing, so that the backward pass recomputes it in FP8.

    The signature is that of Transformer Engine's function, in whose place Megatron calls this function.
    """
    from megatron.core import tensor_parallel

    region = current()
    if region is None:
        return tensor_parallel.checkpoint(functools.partial(function, **kwargs), distribute, *args)
    tape: deque[Call] = deque()
    runs = 0

    def in_region(*inputs: Any) -> Any:
        nonlocal runs
        runs += 1
        with region.first_run(tape) if runs == 1 else region.second_run(tape):
            return function(*inputs, **kwargs)

    return tensor_parallel.checkpoint(in_region, distribute, *args)
