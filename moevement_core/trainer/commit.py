"""The commit point: in which order a step reduces, updates and gathers, so that a failure leaves it whole or undone.

Every reduction comes first and may be interrupted. Then, in a section that no restart interrupts and that waits for
nobody, the update is made and marked. Then parameters are gathered, which may be interrupted and done again.

So if any rank has made an update, every rank had finished the reductions before it: the others can follow with what
came of them (:meth:`Commit.follow`), without a gradient of anybody else.

Between the two a rank asks the job's store whether the generation was interrupted, and then makes no update: a
reduction that another rank has aborted may end here as if nothing had happened
(:func:`~moevement_core.restart.generation.refuse_if_interrupted`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, override

from moevement_core.restart import injection
from moevement_core.restart.faults import Phase
from moevement_core.restart.generation import atomic, refuse_if_interrupted

Vote = Callable[[], None]
"""Returns when every rank of the job has called it; at once where a reduction of the step made sure of it."""


@dataclass(frozen=True, slots=True)
class Mark:
    """The newest iteration that this rank has committed."""

    iteration: int
    boundary: Mapping[str, Any]
    """Boundary record between this iteration and the next (``Binding.boundary``); copies."""
    outcome: Mapping[str, Any]
    """Outcome of the iteration's step; empty if there was no step."""
    resumed: Mapping[str, Any] | None = None
    """The boundary where the next iteration began, if it did: after everything that was due between the two."""


class Commit(ABC):
    """Surrounds the optimizer step of one rank."""

    def __init__(self) -> None:
        self.mark: Mark | None = None
        self.torn = False
        """An update was begun and not ended: what this rank holds is no state of any iteration."""
        self.updating: Callable[[], None] = lambda: None
        """Called inside the section where all gradients are final and nothing of the state has changed; it may neither
        wait nor raise. Not called by a commit whose update changes gradients, too.
        """
        self.updated: Callable[[int], None] = lambda iteration: None
        """Called when the update of an iteration is made, while its gradients are still there."""
        self.overwriting: Callable[[], None] = lambda: None
        """Called before a gather that overwrites them, where it does: returns when they have been copied."""

    @abstractmethod
    def step(self, iteration: int) -> Any:
        """Make the step of ``iteration`` in order; returns what the trainer's own step returns.

        Raises:
            GenerationInterrupted: a rank was interrupted before the update began. Nothing is torn.
        """

    @abstractmethod
    def follow(self, iteration: int, outcome: Mapping[str, Any], common: Mapping[str, Any]) -> None:
        """Make the update of ``iteration`` that others have made; this rank had finished every reduction of it.

        Called after a failure, with groups usable, by the ranks that are one update behind. Waits for nobody.

        Args:
            iteration: the one after this rank's mark.
            outcome: what came of it on a rank of the same model replica.
            common: what of the boundary after it is the same on all ranks.
        """

    def gather(self, *, now: bool = False) -> None:
        """Bring each rank's part of the new weights to those that have the same; may be done again.

        Args:
            now: also where the next forward pass would do it.
        """

    def interrupted(self) -> None:
        """An exception from outside came at any moment: a step that was under way no longer is."""


class Stepping(Protocol):
    """Methods that :class:`UpdateCommit` needs of a trainer."""

    iteration: int

    def reduce(self) -> Mapping[str, Any]:
        """Reduce gradients over ranks; returns what the update depends on beside them, as plain data on the host.

        When it returns, no reduction may be under way any more: an update waits for nobody.
        """

    def update(self, outcome: Mapping[str, Any]) -> None:
        """Make the update from reduced gradients, without communication."""

    def boundary_copy(self) -> dict[str, Any]:
        """See :meth:`~moevement_core.trainer.binding.Binding.boundary_copy`."""


class UpdateCommit(Commit):
    """Commit of a trainer whose step is a reduction and an update, both made by itself.

    Args:
        trainer: whose step it is.
        vote: see :data:`Vote`.
    """

    def __init__(self, trainer: Stepping, vote: Vote) -> None:
        super().__init__()
        self._trainer, self._vote = trainer, vote

    @override
    def step(self, iteration: int) -> None:
        injection.at(Phase.REDUCE)
        outcome = self._trainer.reduce()
        injection.at(Phase.COMMIT)
        self._vote()
        refuse_if_interrupted()
        with atomic():
            self._update(iteration, outcome)
        self.updated(iteration)
        injection.at(Phase.GATHER, iteration)
        self.gather()

    @override
    def follow(self, iteration: int, outcome: Mapping[str, Any], common: Mapping[str, Any]) -> None:
        self._update(iteration, outcome)

    def _update(self, iteration: int, outcome: Mapping[str, Any]) -> None:
        self.torn = True
        injection.at(Phase.STEP)
        self._trainer.update(outcome)
        self._trainer.iteration = iteration
        self.mark = Mark(iteration, self._trainer.boundary_copy(), outcome)
        self.torn = False
