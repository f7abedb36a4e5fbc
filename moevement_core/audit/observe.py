"""Observation of an iteration, by hooks on modules and a call of the trainer before it reduces gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from moevement_core.audit.evidence import AuditedModel, AuditEvidence
from moevement_core.snapshot.whole import begin_whole

_at_gradients: dict[object, Callable[[], None]] = {}
"""Functions of this process that are called before gradients are reduced, by an object of their owner."""


def before_reductions() -> None:
    """Note that the gradients of an iteration are complete and not reduced over ranks yet.

    A trainer calls the function in training and in replays. Without such a call, an audit cannot tell on which of the
    data-parallel ranks a gradient was wrong.
    """
    for call in list(_at_gradients.values()):
        call()


def call_at_gradients(owner: object, call: Callable[[], None] | None) -> None:
    """Call a function in each :func:`before_reductions`, until the next call of this function for the same owner.

    Args:
        owner: object that the function belongs to.
        call: the function; None for none.
    """
    _at_gradients.pop(owner, None)
    if call is not None:
        _at_gradients[owner] = call


class IterationObserver:
    """Observer of executions of an iteration on one rank.

    Args:
        model: model of the rank; None if the trainer names none, so that only the state is compared.
    """

    def __init__(self, model: AuditedModel | None) -> None:
        self._model = model
        self._operators = operators_by_module(model)
        self._pending: list[tuple[tuple[str, ...], Callable[[], str]]] = []
        self._gradients: Callable[[], Mapping[str, str]] = dict
        self._handles: list[Any] = []

    def begin(self) -> None:
        """Begin to observe an execution."""
        self.end()
        self._pending, self._gradients = [], dict
        self._handles = [
            module.register_forward_hook(self._observing(operators)) for module, operators in self._operators.items()
        ]
        call_at_gradients(self, self._observe_gradients)

    def end(self) -> AuditEvidence:
        """End the observation; return what was observed, without the state after the update."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        call_at_gradients(self, None)
        outputs = [(operators, digest()) for operators, digest in self._pending]
        return AuditEvidence(outputs=outputs, gradients=dict(self._gradients()))

    @contextmanager
    def observing(self) -> Iterator[list[AuditEvidence]]:
        """Return a context that observes an execution; its list has the evidence after the end of the context."""
        evidence = list[AuditEvidence]()
        self.begin()
        try:
            yield evidence
        finally:
            evidence.append(self.end())

    def _observing(self, operators: tuple[str, ...]) -> Callable[..., None]:
        def observe(module: nn.Module, arguments: Any, output: Any) -> None:
            digests = digests_now({"": tensors_of(output)})
            self._pending.append((operators, lambda: digests()[""]))

        return observe

    def _observe_gradients(self) -> None:
        if (model := self._model) is None:
            return
        by_operator: dict[str, list[torch.Tensor]] = {}
        for name, parameters in model.operators.items():
            gradients = [model.gradient(parameter) for parameter in parameters]
            by_operator[name] = [gradient for gradient in gradients if gradient is not None]
        by_operator = {name: gradients for name, gradients in by_operator.items() if gradients}
        self._gradients = digests_now(by_operator)


def operators_by_module(model: AuditedModel | None) -> dict[nn.Module, tuple[str, ...]]:
    """Return the modules that have parameters of their own, each with the operators of these parameters."""
    if model is None:
        return {}
    names = {id(parameter): name for name, parameters in model.operators.items() for parameter in parameters}
    by_module = {}
    for module in (module for root in model.roots for module in root.modules()):
        own = dict.fromkeys(names[id(each)] for each in module.parameters(recurse=False) if id(each) in names)
        if own:
            by_module[module] = tuple(own)
    return by_module


def tensors_of(output: Any) -> list[torch.Tensor]:
    """Return the tensors in the output of a module."""
    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]


def digests_now(tensors: Mapping[str, Sequence[torch.Tensor]]) -> Callable[[], Mapping[str, str]]:
    """Return a function that returns digests of the present values, by name. On a GPU, this call does not wait."""
    digests = begin_whole(tensors)
    if any(tensor.is_cuda for named in tensors.values() for tensor in named):
        return digests
    finished = digests()  # host memory may change after this call
    return lambda: finished
