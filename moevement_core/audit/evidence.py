"""Evidence of one rank on an iteration: digests of what the rank computed in it, in the order of the computation.

A rank whose second execution differs from the first compares both pieces of evidence. The first difference is nearest
to its cause: a wrong activation changes all later activations, gradients and weights, on this rank and on others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import torch
from torch import nn

from moevement_core.operators import HEAD, layer_of

HEAD_DEPTH = 1 << 30
"""Position of the head, after all layers."""


@dataclass(frozen=True, eq=False)
class AuditedModel:
    """Modules and parameters of a rank that an audit observes."""

    roots: Sequence[nn.Module]
    """Modules that the rank executes, with all modules inside."""
    operators: Mapping[str, Sequence[nn.Parameter]]
    """Parameters of each operator."""
    gradient: Callable[[nn.Parameter], torch.Tensor | None]
    """Function that returns the gradient of a parameter before it is reduced over ranks; None if there is none, or if
    the trainer reduces some gradients while it computes others."""


class Computed(IntEnum):
    """Result that evidence covers, in the order in which a rank computes them."""

    AT_REST = -1
    """Weights and optimizer state of an operator, between two updates."""
    OUTPUT = 0
    """Output of a module in the forward pass."""
    SENT = 1
    """Tensors that the rank sent to other stages."""
    GRADIENT = 2
    """Gradients of an operator, before they are reduced over ranks."""
    STATE = 3
    """Weights and optimizer state of an operator that the rank updates, after the update."""
    WEIGHTS = 4
    """Compute weights that other ranks hold as well, after the update."""

    @property
    def text(self) -> str:
        """Words for this result in a log line."""
        return _TEXTS[self]


_TEXTS = {
    Computed.AT_REST: "memory with the state", Computed.OUTPUT: "output", Computed.SENT: "tensors for other stages",
    Computed.GRADIENT: "gradient", Computed.STATE: "state after the update",
    Computed.WEIGHTS: "compute weights after the update",
}  # fmt: skip


@dataclass
class AuditEvidence:
    """Digests of what one rank computed in one execution of an iteration."""

    outputs: list[tuple[tuple[str, ...], str]] = field(default_factory=list)
    """Operators of a module, and the digest of its output, for each call of a module in order."""
    sent: str | None = None
    gradients: dict[str, str] = field(default_factory=dict)
    """Digests of gradients before the reduction, by operator."""
    state: Mapping[str, str] = field(default_factory=dict)
    """Digests of the state after the update, by operator."""
    weights: str = ""
    """Digest of the compute weights that other ranks hold as well."""


@dataclass(frozen=True)
class Difference:
    """First difference between two executions of an iteration on one rank."""

    computed: int
    """Result that differs first, a :class:`Computed`."""
    place: tuple[int, int]
    """Place of the result among those of its kind, on all ranks: a result depends only on results with smaller places.

    It is the layer, negative in the backward pass, and the number of the result on the rank.
    """
    operators: tuple[str, ...]
    """Operators with such a difference; empty if it cannot be assigned to operators."""


def first_difference(first: AuditEvidence, second: AuditEvidence, order: Sequence[str]) -> Difference | None:
    """Return the first difference between two executions; None if they are equal.

    Args:
        first: evidence of the first execution.
        second: evidence of the second execution.
        order: operators of the rank in the order of the forward pass.
    """
    for number, (before, after) in enumerate(zip(first.outputs, second.outputs, strict=False)):
        if before != after:
            operators = before[0]
            changed = _unequal(first.gradients, second.gradients) or _unequal(first.state, second.state)
            narrowed = tuple(name for name in operators if name in changed)
            return Difference(Computed.OUTPUT, (min(map(depth_of, operators)), number), narrowed or operators)
    if len(first.outputs) != len(second.outputs):
        return Difference(Computed.OUTPUT, (HEAD_DEPTH, min(len(first.outputs), len(second.outputs))), ())
    if first.sent != second.sent:
        return Difference(Computed.SENT, (0, 0), ())
    if unequal := _unequal(first.gradients, second.gradients):
        # The backward pass computes the gradients of the last layers first.
        return Difference(Computed.GRADIENT, (-max(map(depth_of, unequal)), 0), _sorted(unequal, order))
    if unequal := _unequal(first.state, second.state):
        return Difference(Computed.STATE, (0, 0), _sorted(unequal, order))
    return Difference(Computed.WEIGHTS, (0, 0), ()) if first.weights != second.weights else None


def depth_of(operator: str) -> int:
    """Return the position of an operator between input and output of the model, as far as its name gives one."""
    return HEAD_DEPTH if operator == HEAD else layer_of(operator)


def _unequal(first: Mapping[str, str], second: Mapping[str, str]) -> list[str]:
    return [name for name in first.keys() | second.keys() if first.get(name) != second.get(name)]


def _sorted(names: Iterable[str], order: Sequence[str]) -> tuple[str, ...]:
    places = {name: place for place, name in enumerate(order)}
    return tuple(sorted(names, key=lambda name: (places.get(name, len(places)), name)))
