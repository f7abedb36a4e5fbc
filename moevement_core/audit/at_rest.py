"""Watch over weights and optimizer state between two updates, while no code may change them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from moevement_core.audit.observe import call_at_gradients, digests_now
from moevement_core.engine.layout import OperatorState

_QUANTISED = 1
"""Bytes of an element of FP8 weights, whose scales training changes in the forward pass."""


class StateAtRest:
    """Comparison of this rank's state at the beginning of an iteration with the state before the next update.

    Args:
        states: live tensors of this rank's operators.
    """

    def __init__(self, states: Mapping[str, OperatorState]) -> None:
        self._tensors: dict[str, list[torch.Tensor]] = {}
        for name, state in states.items():
            is_quantised = any(entry.tensor.element_size() == _QUANTISED for entry in state.compute)
            entries = state.full if is_quantised else (*state.compute, *state.full)
            self._tensors[name] = [entry.tensor for entry in entries]
        self._digests: list[Callable[[], Mapping[str, str]]] = []

    def begin(self) -> None:
        """Digest the state now, and once more when the gradients of the iteration are complete."""
        self._digests = []
        self._digest()
        call_at_gradients(self, self._digest)

    def end(self) -> tuple[str, ...]:
        """Return the operators whose state has changed between the two digests; wait for the device."""
        call_at_gradients(self, None)
        digests, self._digests = [digest() for digest in self._digests], []
        if len(digests) < 2:  # the trainer does not say when its gradients are complete, or skipped the iteration
            return ()
        return tuple(name for name in digests[0] if digests[0][name] != digests[1][name])

    def _digest(self) -> None:
        self._digests.append(digests_now(self._tensors))
