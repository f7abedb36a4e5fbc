"""Flips of bits in what a rank computes with (``--moevement-inject-corruption``), as a faulty device makes them.

A flip changes the result of an iteration and leaves no trace: no digest covers the tensor at that moment. Only audits
can find it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from moevement_core import log
from moevement_core.audit.evidence import AuditedModel
from moevement_core.audit.observe import call_at_gradients, operators_by_module, tensors_of
from moevement_core.engine.layout import OperatorState
from moevement_core.policy.schedule import Saved
from moevement_core.rendezvous.value_client import is_first_to_claim
from moevement_core.restart.faults import CorruptedPart, Corruption
from moevement_core.snapshot.snapshot import StateTensor

_CLAIM = "corrupted/{}"
_MANTISSA_BITS = {torch.float64: 52, torch.float32: 23, torch.float16: 10, torch.bfloat16: 7}
_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16}
_WEIGHTS = ("master", "upper", "weight", "lower")
"""Last parts of the keys of tensors that are not moments of the optimizer."""


class Corrupter:
    """Injector of the corruptions of this process.

    Args:
        corruptions: corruptions from the flags.
        rank: number of this rank.
        states: live tensors of this rank's operators.
        model: model of this rank; None if the trainer names none.
    """

    def __init__(
        self,
        corruptions: Sequence[Corruption],
        rank: int,
        states: Mapping[str, OperatorState],
        model: AuditedModel | None,
    ) -> None:
        self._left = [(number, each) for number, each in enumerate(corruptions) if each.rank == rank]
        self._lasting: list[Corruption] = []
        """Corruptions that this process makes in each iteration from now on."""
        self._states, self._model = states, model
        self._executions = 0
        self._handles: list[Any] = []

    def begin(self, iteration: int) -> None:
        """Make the corruptions of an execution of ``iteration``, now or at their moment in it."""
        self._executions += 1
        self._end()
        due = list(self._lasting)
        for number, corruption in list(self._left):
            if corruption.iteration <= iteration and is_first_to_claim(_CLAIM.format(number)):
                due.append(corruption)
                if corruption.is_lasting:
                    self._lasting.append(corruption)
            if corruption.iteration <= iteration:
                self._left.remove((number, corruption))
        gradients = []
        """Random choices of the flips in gradients."""
        for corruption in due:
            draw = random.Random(f"{corruption.seed}/{iteration}/{self._executions}")
            match corruption.part:
                case CorruptedPart.WEIGHT:
                    self._flip_state(Saved.COMPUTE, draw, iteration)
                case CorruptedPart.MOMENT:
                    self._flip_state(Saved.FULL, draw, iteration)
                case CorruptedPart.GRADIENT:
                    gradients.append(draw)
                case CorruptedPart.ACTIVATION:
                    self._flip_output(draw, iteration)
        if gradients:
            call_at_gradients(self, partial(self._flip_gradients, gradients, iteration))

    def _end(self) -> None:
        call_at_gradients(self, None)
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _flip_state(self, saved: Saved, draw: random.Random, iteration: int) -> None:
        entries = [
            (name, entry) for name, state in self._states.items()
            for entry in (state.compute if saved is Saved.COMPUTE else _moments(state.full))
            if entry.tensor.numel() and entry.tensor.dtype in _MANTISSA_BITS
        ]  # fmt: skip
        if entries:
            name, entry = draw.choice(entries)
            _flip(entry.tensor, draw, f"{entry.key} of {name}, iteration {iteration}")

    def _flip_gradients(self, draws: Sequence[random.Random], iteration: int) -> None:
        call_at_gradients(self, None)
        if (model := self._model) is None:
            return
        nonzero = [
            (name, gradient) for name, parameters in model.operators.items()
            for gradient in map(model.gradient, parameters) if gradient is not None and bool(gradient.count_nonzero())
        ]  # fmt: skip
        for draw in draws if nonzero else ():
            name, gradient = draw.choice(nonzero)
            _flip(gradient, draw, f"a gradient of {name}, iteration {iteration}")

    def _flip_output(self, draw: random.Random, iteration: int) -> None:
        modules = operators_by_module(self._model)
        if not modules:
            return
        module, operators = draw.choice(list(modules.items()))

        def flip(module: nn.Module, arguments: Any, output: Any) -> None:
            handle.remove()
            for tensor in tensors_of(output):
                if tensor.dtype in _MANTISSA_BITS and tensor.numel():
                    _flip(tensor.data, draw, f"the output of {', '.join(operators)}, iteration {iteration}")
                    break

        # The flip comes before the hooks that observe the iteration.
        handle = module.register_forward_hook(flip, prepend=True)
        self._handles.append(handle)


def _moments(full: Sequence[StateTensor]) -> Iterator[StateTensor]:
    return (entry for entry in full if entry.key.rpartition("/")[2] not in (*_WEIGHTS, "step"))


def _flip(tensor: torch.Tensor, draw: random.Random, place: str) -> None:
    """Flip one of the upper bits of an element's mantissa: the value stays finite, and rounding does not hide it."""
    bits = _MANTISSA_BITS[tensor.dtype]
    index, bit = draw.randrange(tensor.numel()), draw.randrange(bits // 2, bits)
    at = torch.unravel_index(torch.tensor(index), tensor.shape)
    words = tensor.detach()[at].reshape(1).view(_WORDS[tensor.element_size()])
    tensor.detach()[at] = (words ^ (1 << bit)).view(tensor.dtype)[0]
    log.info(f"flipping bit {bit} of element {index} in {place}")
