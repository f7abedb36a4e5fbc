"""Description of a trainer that computes gradients, reduces them, and updates: eight methods.

``examples/plain_torch/own_binding.py`` is a complete implementation. If the model is an ``nn.Module`` with an optimizer
of torch, :class:`~moevement_core.trainer.torch_binding.TorchBinding` has implemented it already. Everything else that a
trainer can do is a capability (:mod:`moevement_core.trainer.capabilities`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, override, runtime_checkable

import torch

from moevement_core.audit.observe import before_reductions
from moevement_core.policy.schedule import Saved
from moevement_core.recovery.feed import Feeding
from moevement_core.recovery.replay import Trainer
from moevement_core.snapshot.snapshot import Snapshot
from moevement_core.trainer.capabilities import SupportsGather, iterations_left_out
from moevement_core.trainer.commit import Commit, UpdateCommit, Vote
from moevement_core.trainer.interface import BindingInterface


class Binding(BindingInterface):
    """Description of one rank's trainer.

    A subclass defines :meth:`place`, :meth:`operators`, :meth:`states`, :meth:`boundary`, :meth:`put_boundary`,
    :meth:`run`, :meth:`reduce` and :meth:`update`. The job has no pipeline: all ranks roll back together.
    """

    @abstractmethod
    def run(self, iteration: int, frozen: frozenset[str] = frozenset()) -> None:
        """Compute the gradients of this rank's share of the batch of ``iteration``, and add its losses to ``losses``.

        The training loop calls the method before ``session.step``, and a replay calls it again with the same result.
        So batch and random numbers depend only on the iteration and on :meth:`boundary`. The method first drops
        gradients that an interrupted iteration has left.

        Args:
            iteration: number of the iteration, from 1.
            frozen: operators whose weights get no gradients in a replay; empty in training. Even then, all ranks make
                the same collective calls.
        """

    @abstractmethod
    def reduce(self) -> Mapping[str, Any]:
        """Reduce gradients over ranks, and return everything else that the update needs, as plain data on the host.

        The method does all communication of the step, and changes neither weights nor optimizer state. No reduction may
        be under way when it returns.
        """

    @abstractmethod
    def update(self, outcome: Mapping[str, Any]) -> None:
        """Make the optimizer's step from reduced gradients, without communication.

        Parameters without a gradient keep their weights and optimizer state, because they are frozen.

        Args:
            outcome: result of :meth:`reduce`. In a replay it comes from the first execution, because a norm of
                gradients needs those of frozen operators, too.
        """

    @override
    def commit_point(self, vote: Vote) -> Commit:
        return UpdateCommit(self, vote)

    @override
    @contextmanager
    def replaying(self, shared_from: int | None, feeding: Feeding | None) -> Iterator[Trainer]:
        yield BindingReplay(self)


@runtime_checkable
class SupportsRedo(SupportsGather, Protocol):
    """Trainer of eight methods that can repeat updates from logged gradients (``--moevement-recovery redo``)."""

    def redo(self, gradients: Mapping[str, Sequence[tuple[str, torch.Tensor]]], outcome: Mapping[str, Any]) -> None:
        """Repeat an update for some operators, without communication; other operators stay unchanged.

        Args:
            gradients: keys and values of the gradients of the update, by operator; flat, on the host.
            outcome: result of :meth:`Binding.reduce` in the first execution.
        """


class BindingReplay(Trainer):
    """Replay of a trainer of eight methods: it executes iterations again while some operators are frozen."""

    def __init__(self, binding: Binding) -> None:
        self._binding, self._frozen = binding, frozenset[str]()
        self._outcome: Mapping[str, Any] = {}
        tensors = (entry for state in binding.states().values() for entry in (*state.compute, *state.full))
        self._live = {(entry.operator, entry.saved, entry.key): entry.tensor for entry in tensors}

    @override
    def load(self, snapshot: Snapshot, loads: Mapping[str, Saved], *, is_shared: bool = True) -> None:
        for entry, tensor in snapshot.tensors_of(loads):
            self._live[entry.operator, entry.saved, entry.key].copy_(tensor)

    @override
    def redo(self, iteration: int, gradients: Mapping[str, Sequence[tuple[str, torch.Tensor]]], outcome: Any) -> None:
        assert isinstance(self._binding, SupportsRedo)
        self._binding.redo(gradients, outcome["step"])

    @override
    def gather_replicas(self) -> None:
        assert isinstance(self._binding, SupportsGather)
        self._binding.gather_replicas()

    @override
    def put_boundary(self, boundary: Any) -> None:
        self._binding.put_boundary(boundary)

    @override
    def freeze(self, iteration: int, frozen: frozenset[str]) -> None:
        self._frozen = frozen

    @override
    def run(self, iteration: int, outcome: Mapping[str, Any] | None) -> Mapping[str, Any]:
        binding = self._binding
        if iteration in iterations_left_out(binding):
            self._outcome, binding.iteration = {}, iteration
            return {}
        binding.iteration = iteration - 1
        binding.run(iteration, self._frozen)
        before_reductions()
        reduced = binding.reduce()
        self._outcome = reduced if outcome is None else outcome["step"]
        binding.update(self._outcome)
        binding.iteration = iteration
        return binding.losses[iteration]

    @override
    def record(self) -> Mapping[str, Any]:
        return {"step": self._outcome} if self._outcome else {}
