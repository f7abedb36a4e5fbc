"""The interface between a trainer and its fault tolerance: calls that the trainer makes, and methods that it
implements.

Megatron's trainer implements it in ``megatron/moevement/binding.py``; ``examples/plain_torch/train.py`` is the smallest
implementation there is. Unless a method says otherwise, it is called on the main thread, by every rank of the job at
the same point, and whatever it raises is a failure of this rank: all ranks are interrupted and meet again.

In the order of a job's life:

============================  ==========================================================================================
``place``, ``operators``,     when process groups are there: at the start, and in every generation after a failure
``states``
``boundary``                  before every iteration, between two of them
``commit_point``              once; its ``step`` once an iteration
``shared``, ``books``         after a failure, on ranks that survived it
``regroup`` or ``build``      after a failure: ``regroup`` on a survivor, ``build`` on a replacement
``clear_gradients``,          after it, on all
``put_progress``, ``resume``
``replaying``                 where state was lost: gives the ``Trainer`` of a replay
``complete``                  where a rank made updates again by itself: on those of its stage
``put_boundary``,             when all ranks have the state that training goes on from
``gradients_left``,
``replicas``, ``back``
============================  ==========================================================================================
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch

from moevement_core.engine.layout import OperatorState
from moevement_core.operators import Operator, OperatorTable
from moevement_core.policy.popularity import Ordering
from moevement_core.recovery.boundary_log import BoundaryLog
from moevement_core.recovery.feed import Alone
from moevement_core.recovery.replay import Trainer
from moevement_core.run.run_record import RunRecord
from moevement_core.trainer.commit import Commit, Vote

Replicas = tuple[str, tuple[int, ...], str]
"""Operator name (empty: all compute weights of these ranks), the ranks that hold it alike, and the digest of one of
them.
"""


@dataclass(frozen=True, slots=True)
class Place:
    """Position of this rank in the job; ranks are numbered as in the job's default process group."""

    stage: int = 0
    """Pipeline stage; 0 without a pipeline. The ranks of a stage roll back together."""
    replica: int = 0
    """The smallest rank of its model replica: ranks of one replica clip gradients by the same norm."""
    same_state: int = 0
    """The smallest rank that holds the same state, or shards of it: its data-parallel peers."""
    pipeline: tuple[int, ...] = ()
    """The ranks of its pipeline, by stage; nothing without a pipeline."""
    is_ring: bool = False
    """True if the last stage also sends to the first, as in interleaved schedules."""
    embedding_ranks: tuple[int, ...] = ()
    """Ranks whose gradients of an embedding are summed with this rank's; empty where there is one copy."""
    step_spans_job: bool = False
    """True if each step ends with a reduction over all ranks; finishing it proves that every rank reached the commit
    point.
    """


class Counts(Protocol):
    """Counts what routers decide, without waiting for the device."""

    paused: bool
    """True while nothing counts: a replay does not count tokens twice."""

    def take(self) -> torch.Tensor:
        """Returns this rank's sums since the last call, and starts over."""

    def by_operator(self, taken: list[torch.Tensor]) -> torch.Tensor:
        """Returns what several calls of :meth:`take` gave, float64 ``[calls, operators]`` on the host."""


class ExpertRoom(Counts, Protocol):
    """Gives experts room for more tokens than their capacity, and counts those that came in by it."""

    def open(self, operators: Collection[str]) -> None:
        """Give these experts more room from the next iteration on, and no others; the same on all ranks of a stage."""


class Binding(ABC):
    """Description of one rank of a training job for its fault tolerance."""

    iteration: int = 0
    """The last committed iteration; 0 before the first. Kept by the trainer, put by :meth:`put_progress`."""
    record: RunRecord | None = None
    """Record of the run that this rank writes events to; None on ranks that write none."""
    boundary_log: BoundaryLog | None = None
    """Set by the session where there is a pipeline: what this rank sends to other stages is to be noted in it."""

    @cached_property
    def losses(self) -> dict[int, Mapping[str, Any]]:
        """Return losses by name for each recent iteration of this rank, trained or replayed."""
        return {}

    # The rank and its state

    @abstractmethod
    def place(self) -> Place:
        """Returns where this rank stands, from the process groups of now."""

    @abstractmethod
    def operators(self) -> Sequence[Operator]:
        """Returns the operators that this rank holds, weighed; names are those of the model, the same on all ranks."""

    @abstractmethod
    def states(self) -> Mapping[str, OperatorState]:
        """Returns the live tensors of each operator that this rank saves; they stay valid for the whole job.

        Where data-parallel replicas have the same state, each may save a part of it.
        """

    @abstractmethod
    def boundary(self) -> dict[str, Any]:
        """Returns everything that an iteration changes outside of :meth:`states`: plain data and live tensors.

        Random states, router buffers, loss scalers, the schedule; and ``progress``, a mapping of names to whole numbers
        with ``iteration`` among them.
        """

    def boundary_copy(self) -> dict[str, Any]:
        """Returns :meth:`boundary` with tensors that the next iteration does not change."""
        return {name: _copied(part) for name, part in self.boundary().items()}

    def common(self, boundary: Mapping[str, Any]) -> dict[str, Any]:
        """Returns what of a boundary is the same on all ranks; a rank takes it from another one after a failure."""
        return {"progress": boundary["progress"]}

    @abstractmethod
    def put_boundary(self, boundary: Mapping[str, Any]) -> None:
        """The inverse of :meth:`boundary`; random states last, because anything before may draw from them."""

    @abstractmethod
    def put_progress(self, progress: Mapping[str, int]) -> None:
        """Set ``progress`` alone, before data is opened."""

    def counts(self, table: OperatorTable, ordering: Ordering) -> Counts | None:
        """Returns counters of the tokens that each expert gets; None where nothing is counted.

        Args:
            table: the operators of the stage.
            ordering: what is counted.
        """
        return None

    def expert_room(self, table: OperatorTable, share: float) -> ExpertRoom:
        """Returns what gives experts more room; ``--moevement-capacity-boost`` is refused where it is not defined.

        Args:
            table: the operators of the stage.
            share: of its capacity, that an expert is given more.
        """
        raise NotImplementedError

    @property
    def sent_bytes(self) -> int:
        """Return the bytes that this rank sends to other stages in an iteration."""
        return 0

    # An iteration

    @abstractmethod
    def commit_point(self, vote: Vote) -> Commit:
        """Returns what surrounds the optimizer step; called once.

        Args:
            vote: returns when every rank of the job has called it; see :class:`~moevement_core.trainer.commit.Commit`.
        """

    def plan_exit(self, committed: int, *, is_winding_down: bool) -> None:
        """Plan the end of the job. Called before each iteration; the job may end after the next one, with everything
        saved.
        """

    # After a failure

    def shared(self) -> Any:
        """Returns what a replacement has to know of a survivor to build itself without asking anybody."""
        return None

    def books(self) -> Any:
        """Returns totals that a survivor keeps and a replacement goes on with; they are no part of the state."""
        return None

    @abstractmethod
    def regroup(self) -> None:
        """Use the process groups of now, in every object that survived."""

    @abstractmethod
    def build(self, shared: Any) -> bool:
        """Build model and optimizer on a rank that is new, without communication: others do not build theirs.

        Args:
            shared: what :meth:`shared` gave on a survivor.

        Returns:
            Whether their state is the one that the job started from.
        """

    @abstractmethod
    def clear_gradients(self) -> None:
        """Drop all gradients of the interrupted iteration, those in reduction buffers too."""

    def resume(self, until: int, books: Any) -> None:
        """Training will go on from ``until``: records and counters are to be taken up there."""

    def gradients_left(self) -> list[str]:
        """Returns gradients that are there and should not be, in words."""
        return []

    def replicas(self) -> list[Replicas]:
        """Returns digests of the compute weights that several ranks have alike; no communication."""
        return []

    def twins(self) -> Collection[int]:
        """Returns the other ranks that hold all of the state that this one holds, and everything beside it; none by
        default.
        """
        return ()

    def states_of_twin(self, rank: int) -> Mapping[str, OperatorState]:
        """Returns :meth:`states` as ``rank``, one of the :meth:`twins`, has them: of this rank's tensors the part that
        it saves. Only asked where there are twins.
        """
        raise NotImplementedError

    def stages_are_tied_by(self) -> str | None:
        """Returns why a stage cannot be rolled back alone, in words; None if it can."""
        return None

    def iterations_left_out(self) -> Collection[int]:
        """Returns iterations that never run, so that nothing was sent in them."""
        return ()

    @abstractmethod
    def replaying(self, shared_from: int | None, alone: Alone | None) -> AbstractContextManager[Trainer]:
        """Returns a context in which iterations are run again, and nothing that training keeps beside its state moves.

        Called by the ranks that replay.

        Args:
            shared_from: the first iteration in which a copy of an embedding is active on any stage. From then on all
                copies compute gradients, of which the active one's is a sum. None without copies.
            alone: who feeds this rank, where other stages keep their state and wait.
        """

    def complete(self) -> None:
        """Bring to all replicas of a state what each of them has of it, and make compute weights from it.

        Called where a rank has made updates again by itself, by all ranks of its stage; those that kept their state
        have what they bring already. ``--moevement-recovery redo`` and ``auto`` are refused where it is not defined.
        """
        raise NotImplementedError

    def back(self, until: int, outcome: Mapping[str, Any], *, is_between: bool) -> None:
        """State is that of ``until`` on every rank: do what is due there and the failure may have prevented.

        Args:
            until: the iteration.
            outcome: of its step.
            is_between: whether what is due after it (evaluation, dense checkpoint) may not have been done.
        """

    # Windows on disk

    def settings(self) -> dict[str, Any]:
        """Returns the flags that replayed iterations depend on: a job that loads a window has the same."""
        return {}

    def newest_checkpoint(self) -> int | None:
        """Returns the iteration that a restart would begin from without windows on disk; asked on rank 0."""
        return None

    # Drills

    def wipe(self) -> None:
        """Overwrite all state of this rank, for ``--moevement-wipe-at``, which is refused where this is not defined."""
        raise NotImplementedError


def _copied(part: Any) -> Any:
    if isinstance(part, torch.Tensor):
        return part.clone()
    if isinstance(part, Mapping):
        return {name: _copied(value) for name, value in part.items()}
    if isinstance(part, list | tuple):
        return type(part)(_copied(value) for value in part)
    return part
