"""Delayed scaling: the scale of a matrix comes from amaxes of earlier ones in its place.

After every forward pass of a microbatch through a stage the amaxes of its inputs and weights are reduced over the
ranks that share them, and scales follow; after its backward pass likewise those of gradients. Scales and histories
are state that training goes on with: they are part of the boundary between iterations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from megatron.moevement.fp8 import formats
from megatron.moevement.fp8.recipe import Recipe, Role


class DelayedScales(torch.nn.Module):
    """Scales and histories of one linear layer.

    Attributes:
        scale: FP32 ``[3]``, by :class:`Role`.
        amax_history: FP32 ``[history, 3]``; the first row is of what has run since scales were last set.
        made: FP32 ``[1]``; by which the codes of a weight that is kept in FP8 were made. Not the scale of now where an
            update was skipped, which moves scales and not weights.
    """

    scale: torch.Tensor
    amax_history: torch.Tensor
    made: torch.Tensor

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.recipe = recipe
        self.register_buffer("scale", torch.ones(len(Role)))
        self.register_buffer("amax_history", torch.zeros(recipe.history, len(Role)))
        self.register_buffer("made", torch.ones(1))

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> DelayedScales:
        """Moved with the model, never converted with it."""
        for name, buffer in self._buffers.items():
            assert buffer is not None
            self._buffers[name] = buffer.to(fn(buffer).device)
        return self

    def record(self, role: Role, matrix: torch.Tensor) -> None:
        """Another matrix had this place."""
        self.count(role, formats.amax_of(matrix))

    def count(self, role: Role, amax: torch.Tensor) -> None:
        """Another matrix had this place, whose largest magnitude is ``amax``."""
        if not _remaking:
            place = self.amax_history[0, role]
            place.copy_(torch.maximum(place, amax.view(())))

    def for_codes(self) -> torch.Tensor:
        """Return the scale by which the codes of a weight are made, ``[1]``: the current one, unless they are made once
        more.
        """
        if not _remaking:
            self.made.copy_(self.scale[Role.WEIGHT])
        return self.made


_remaking: list[None] = []
"""Entries of :func:`remaking` that are open."""


@contextmanager
def remaking() -> Iterator[None]:
    """Codes that are made in here are those that there were, and count for no scale."""
    _remaking.append(None)
    try:
        yield
    finally:
        _remaking.pop()


@torch.no_grad()
def set_scales(layers: Sequence[DelayedScales], roles: Sequence[Role], group: Any) -> None:
    """New scales of all ``layers`` in these ``roles``, from amaxes that are reduced over ``group``.

    Called by every rank of the group, with as many layers in the same order.
    """
    if not layers:
        return
    latest = torch.stack([layer.amax_history[0, list(roles)] for layer in layers])
    if group is not None and group.size() > 1:
        dist.all_reduce(latest, op=dist.ReduceOp.MAX, group=group)
    for layer, amaxes in zip(layers, latest, strict=True):
        for role, amax in zip(roles, amaxes, strict=True):
            history = layer.amax_history[:, role]
            history[0] = amax
            layer.scale[role] = _next_scale(history, layer.scale[role], layer.recipe, role)
            history.copy_(history.roll(-1))
            history[0] = 0.0


def _next_scale(history: torch.Tensor, scale: torch.Tensor, recipe: Recipe, role: Role) -> torch.Tensor:
    """The scale before, where nothing has been seen or what was seen is not finite."""
    amax = history.max() if recipe.takes_max else history[0]
    largest = torch.finfo(recipe.dtype(role)).max
    found = formats.quotient(largest, amax) / 2.0**recipe.margin
    found = torch.where((amax > 0) & torch.isfinite(amax), found, scale)
    return torch.where(torch.isinf(found), torch.finfo(torch.float32).max, found)
