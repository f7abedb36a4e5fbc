"""Delayed scaling: the scale of a matrix is derived from amaxes of earlier matrices in the same role.

After the forward pass of a micro-batch through a stage, ranks that share matrices reduce the amaxes of inputs and
weights, and set new scales. After the backward pass, they do the same for gradients. Training continues from scales and
histories, so both are part of the boundary record.
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
    """Scales and amax histories of one linear layer.

    Attributes:
        scale: FP32 ``[3]``, by :class:`Role`.
        amax_history: FP32 ``[history, 3]``; the first row has the amaxes since the scales were last set.
        made: FP32 ``[1]``; scale with which the present codes of an FP8 weight were computed. It differs from ``scale``
            after an iteration whose update was skipped, because that iteration changed scales but not weights.
    """

    scale: torch.Tensor
    amax_history: torch.Tensor

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.recipe = recipe
        self.register_buffer("scale", torch.ones(len(Role)))
        self.register_buffer("amax_history", torch.zeros(recipe.history, len(Role)))
        self.register_buffer("made", torch.ones(1))

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> DelayedScales:
        """Move the buffers to the device of the model, but never convert their dtype."""
        for name, buffer in self._buffers.items():
            assert buffer is not None
            self._buffers[name] = buffer.to(fn(buffer).device)
        return self

    def record(self, role: Role, matrix: torch.Tensor) -> None:
        """Add the amax of ``matrix`` to the history of ``role``. Inside :func:`remaking`, do nothing."""
        self.count(role, formats.amax_of(matrix))

    def count(self, role: Role, amax: torch.Tensor) -> None:
        """Add ``amax`` to the history of ``role``. Inside :func:`remaking`, do nothing."""
        if not _remaking:
            place = self.amax_history[0, role]
            place.copy_(torch.maximum(place, amax.view(())))

    def for_codes(self) -> torch.Tensor:
        """Return the scale for the codes of a weight, ``[1]``.

        Inside :func:`remaking` this is the scale of the existing codes, otherwise the present scale.
        """
        if not _remaking:
            self.get_buffer("made").copy_(self.scale[Role.WEIGHT])
        return self.get_buffer("made")


_remaking: list[None] = []
"""List with one entry for each open context of :func:`remaking`."""


@contextmanager
def remaking() -> Iterator[None]:
    """Make FP8 weights that are computed in a ``with`` block keep the scales of their existing codes.

    The block records no amaxes. A recovery uses it to compute weights again as they were.
    """
    _remaking.append(None)
    try:
        yield
    finally:
        _remaking.pop()


@torch.no_grad()
def set_scales(layers: Sequence[DelayedScales], roles: Sequence[Role], group: Any) -> None:
    """Set the scales of the matrices in ``roles`` of all ``layers``, from amaxes that are reduced over ``group``.

    Collective over the group: all ranks pass the same number of layers, in the same order.
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
    """Return the scale that follows from an amax history; ``scale`` if the amax is 0 (none recorded) or not finite."""
    amax = history.max() if recipe.takes_max else history[0]
    largest = torch.finfo(recipe.dtype(role)).max
    next_scale = formats.quotient(largest, amax) / 2.0**recipe.margin
    next_scale = torch.where((amax > 0) & torch.isfinite(amax), next_scale, scale)
    return torch.where(torch.isinf(next_scale), torch.finfo(torch.float32).max, next_scale)
