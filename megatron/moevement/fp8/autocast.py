"""Regions of a forward pass that run in FP8, and their recomputation in the backward pass.

Delayed scaling depends on history. A forward pass that runs again during the backward pass needs the scales of its
first run, and must neither record its amaxes twice nor set scales. So a region keeps the calls of the first run in
order, and reuses them.
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
    """Product of a linear layer in one forward pass. It keeps the scales of the first pass for recomputations."""

    def __init__(self, region: Region, scales: DelayedScales | None) -> None:
        self._region = region
        self._scales = scales
        self._then = scales.scale.clone() if scales is not None else None
        self._sets_scales = scales is not None and region.trains and not region.layers

    def quantise(self, matrix: torch.Tensor, role: Role) -> Quantised:
        """Quantise a matrix ``[M, N]``: a gradient with the present scale, others with that of the first run."""
        recipe, scales = self._region.recipe, self._scales
        if scales is None:
            return recipe.quantise(matrix, role)
        assert self._then is not None
        if self._region.trains and not (self._region.is_recomputation and role is not Role.GRADIENT):
            scales.record(role, matrix)
        scale = scales.scale if role is Role.GRADIENT else self._then
        return by_scale(matrix, scale[role].clone(), recipe.dtype(role))

    def after_backward(self) -> None:
        """Set the scales of gradients after the backward pass of the region's first layer, which runs last."""
        if self._sets_scales:
            set_scales(self._region.layers, (Role.GRADIENT,), self._region.group)


class Region:
    """Region that runs in FP8: one micro-batch of a stage, or one layer of it.

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
        """Return a call for the next product; a repeated run gets the call of its first run."""
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
        """True while the region runs again, in a backward pass."""
        return self._again is not None

    @property
    def is_taped(self) -> bool:
        """True if the current operations will run again, or are running again now."""
        return bool(self._tapes) or self.is_recomputation

    @contextmanager
    def first_run(self, tape: deque[Call]) -> Iterator[None]:
        """Record the operations of a ``with`` block that will run again; parts of it may run again inside the block."""
        self._tapes.append(tape)
        try:
            yield
        finally:
            self._tapes.remove(tape)

    @contextmanager
    def second_run(self, tape: deque[Call]) -> Iterator[None]:
        """Repeat the operations that :meth:`first_run` recorded."""
        before = _regions[:], self._again, self._tapes
        _regions.append(self)
        self._again, self._tapes = tape, []
        try:
            yield
        finally:
            _regions[:], self._again, self._tapes = before


_regions: list[Region] = []
"""Regions that are entered and not left, the innermost last; one thread runs all passes and recomputations."""


def forget() -> None:
    """Drop all regions, which an interruption left open."""
    _regions.clear()


def current() -> Region | None:
    """Return the innermost region that runs; None outside of regions."""
    return _regions[-1] if _regions else None


@contextmanager
def autocast(recipe: Recipe, group: Any) -> Iterator[None]:
    """Run the linear layers inside the context in FP8; with delayed scaling, set the scales at its end.

    Collective over ``group``, over which amaxes are reduced.
    """
    if (outer := current()) is not None and outer.is_taped and outer.recipe == recipe:
        yield  # These operations will run again, or are running again, as a part of the outer region.
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
    """Checkpoint activations of a part of a region with Megatron's function; the signature is Transformer Engine's."""
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
