"""Commit point: the order of an optimizer step, in which a failure leaves the step either complete or not begun.

1. Ranks finish all reductions. A restart may interrupt them.
2. The rank updates its weights and sets its mark (:class:`Mark`). No restart interrupts this, and the rank waits for no
   other rank.
3. Ranks gather parameters. A restart may interrupt this, and ranks can repeat it.

Between 1 and 2 ranks vote. So when a rank makes an update, every rank has already finished all reductions of the step.
A rank that was interrupted before its update can therefore make the update later from its own reduced gradients
(:meth:`Commit.follow`).

After another rank has aborted a reduction, the reduction may seem to end successfully on this rank. So after all ranks
have voted, one of them asks the coordinator if the generation was interrupted. If it was, no rank makes the update.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, override

from moevement_core.audit.observe import before_reductions
from moevement_core.restart import injection
from moevement_core.restart.faults import Phase
from moevement_core.restart.generation import atomic

Vote = Callable[[], None]
"""Function that returns when every rank of the job has called it, unless a rank was interrupted.

It then raises :class:`~moevement_core.restart.generation.GenerationInterrupted`.
"""


@dataclass(frozen=True, slots=True)
class Mark:
    """Mark of the newest iteration that this rank has committed."""

    iteration: int
    boundary: Mapping[str, Any]
    """Boundary record right after the iteration: a copy of ``Binding.boundary``."""
    outcome: Mapping[str, Any]
    """Results of the step's reductions, such as the gradient norm. With them, the update can be repeated. Empty if
    there was no step."""
    resumed: Mapping[str, Any] | None = None
    """Boundary record at the beginning of the next iteration; None if that iteration has not begun.

    It differs from :attr:`boundary` if an evaluation or save between the two iterations has changed state.
    """


class Commit(ABC):
    """Optimizer step of one rank around its commit point, in the order that the module's docstring gives."""

    def __init__(self) -> None:
        self.mark: Mark | None = None
        self.torn = False
        """True if an update has begun and not ended. The rank's state is then of no iteration and cannot be used."""
        self.updating: Callable[[], None] = lambda: None
        """Hook that is called at the beginning of an update, when all gradients are final and no state has changed.

        The hook may neither wait nor raise. A commit point whose update also changes gradients does not call the hook.
        """
        self.updated: Callable[[int], None] = lambda iteration: None
        """Hook that is called after the update of an iteration, while its gradients are still in memory."""
        self.overwriting: Callable[[], None] = lambda: None
        """Hook that is called before a gather overwrites gradients; it returns when the gradients have been copied."""

    @abstractmethod
    def step(self, iteration: int) -> Any:
        """Make the optimizer step of ``iteration``, and return what the trainer's own step function returned.

        Raises:
            GenerationInterrupted: a rank was interrupted before the update began. No state has changed.
        """

    @abstractmethod
    def follow(self, iteration: int, outcome: Mapping[str, Any], common: Mapping[str, Any]) -> None:
        """Make the update of ``iteration``, which other ranks have made, from this rank's reduced gradients.

        After a failure, ranks that lack this last update call the method, with usable process groups. It waits for no
        other rank.

        Args:
            iteration: iteration after this rank's mark.
            outcome: results of the step's reductions, from a rank of the same model replica; see :attr:`Mark.outcome`.
            common: rank-independent part of the boundary record after the iteration.
        """

    def gather(self, *, now: bool = False) -> None:
        """Gather the new weights from the data-parallel ranks, of which each has updated a part; may be called again.

        Args:
            now: True to gather even if the next forward pass would do it.
        """

    def interrupted(self) -> None:
        """Forget an unfinished step, which the exception of the restart guard has interrupted at an unknown point."""


class Stepping(Protocol):
    """Methods that :class:`UpdateCommit` needs of a trainer."""

    iteration: int

    def reduce(self) -> Mapping[str, Any]:
        """Reduce gradients over ranks, and return all other inputs of the update as plain data on the host.

        No reduction may be under way when this method returns, because an update waits for no other rank.
        """

    def update(self, outcome: Mapping[str, Any]) -> None:
        """Make the update from reduced gradients, without communication."""

    def boundary_copy(self) -> dict[str, Any]:
        """Return a copy of the boundary record; see :meth:`~moevement_core.trainer.binding.Binding.boundary_copy`."""


class UpdateCommit(Commit):
    """Commit point of a trainer that makes its step itself, as a reduction and an update.

    Args:
        trainer: trainer that makes the step.
        vote: vote of all ranks between reductions and update; see :data:`Vote`.
    """

    def __init__(self, trainer: Stepping, vote: Vote) -> None:
        super().__init__()
        self._trainer, self._vote = trainer, vote

    @override
    def step(self, iteration: int) -> None:
        injection.at(Phase.REDUCE)
        before_reductions()
        outcome = self._trainer.reduce()
        injection.at(Phase.COMMIT)
        self._vote()
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
