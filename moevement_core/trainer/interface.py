"""Interface between a trainer and its fault tolerance: the methods that the session and a recovery call on every rank.

Trainers that compute gradients, reduce and update inherit from :class:`~moevement_core.trainer.binding.Binding`, which
implements the commit point and the replay. Megatron's trainer, whose own training step has these parts, implements this
interface directly (``megatron/moevement/binding.py``). What only some trainers can is in
:mod:`moevement_core.trainer.capabilities`.

Unless a method says otherwise, the main thread of every rank of the job calls it at the same point. An exception in a
method is a failure of this rank: the restart guard interrupts all ranks, and they form the job again.

Methods in the order of a job's life, and the ranks that call them:

============================  ==========================================================================================
``place``, ``operators``,     every rank, with usable process groups: at the start, and in every generation afterwards
``states``
``boundary``                  every rank, between two iterations
``commit_point``              every rank, once; the commit point's ``step`` in each iteration
``build_data``,               survivors, after a failure
``run_totals``
``regroup`` or ``build``      survivors (``regroup``) or replacements (``build``), after a failure
``clear_gradients``,          every rank, after ``regroup`` or ``build``
``put_progress``, ``resume``
``replaying``                 ranks that replay; it provides the ``Trainer`` of the replay
``gather_replicas``           all ranks of a stage in which a failed rank repeated its updates (redo)
``put_boundary``,             every rank, when all ranks have the state that training resumes from
``gradients_left``,
``replicas``, ``on_recovered``
``recut``                     every rank of an elastic job, when its number of ranks changes
============================  ==========================================================================================
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from moevement_core.engine.layout import OperatorState
from moevement_core.operators import Operator
from moevement_core.recovery.boundary_log import BoundaryLog
from moevement_core.recovery.feed import Feeding
from moevement_core.recovery.replay import Trainer
from moevement_core.run.run_record import RunRecord
from moevement_core.trainer.commit import Commit, Vote
from moevement_core.trainer.recut import Recut, WholeTensors


@dataclass(frozen=True, slots=True)
class Place:
    """Position of this rank in the job; ranks are numbered as in the job's default process group."""

    stage: int = 0
    """Pipeline stage; 0 without a pipeline. The ranks of a stage roll back together."""
    replica: int = 0
    """Smallest rank of this rank's model replica. All ranks of a model replica clip gradients by the same norm."""
    same_state: int = 0
    """Smallest rank of a group: this rank, and all ranks that hold the same state or another shard of that state."""
    pipeline: tuple[int, ...] = ()
    """Ranks of this rank's pipeline, in the order of stages; empty without a pipeline."""
    is_ring: bool = False
    """True if the last pipeline stage also sends to the first stage, as in interleaved pipeline schedules."""
    embedding_ranks: tuple[int, ...] = ()
    """Ranks whose gradients of an embedding are summed with those of this rank; empty if the embedding has one copy."""


class BindingInterface(ABC):
    """Description of one rank's trainer, as the session and a recovery see it."""

    iteration: int = 0
    """Last committed iteration; 0 before the first. The trainer updates it, and :meth:`put_progress` sets it."""
    record: RunRecord | None = None
    """Record to which this rank writes the events of the run; None on ranks that write no events."""
    boundary_log: BoundaryLog | None = None
    """Log to which the trainer adds all tensors that it sends to other stages. The session sets it; None without a
    pipeline.
    """

    @cached_property
    def losses(self) -> dict[int, Mapping[str, Any]]:
        """Losses by name, for each recent iteration. The trainer adds them in training and in a replay.

        After the losses, the mapping may have ``grad_norm`` and ``learning_rate``, which go to the metrics, too.
        """
        return {}

    # The rank and its state

    @abstractmethod
    def place(self) -> Place:
        """Return the position of this rank in the current process groups."""

    @abstractmethod
    def operators(self) -> Sequence[Operator]:
        """Return the operators that this rank holds, with their sizes. Names are unique in the model, across ranks."""

    @abstractmethod
    def states(self) -> Mapping[str, OperatorState]:
        """Return, for each operator, the live tensors that this rank saves; they stay valid for the whole job.

        Data-parallel replicas with the same state may each save a part of it.
        """

    @abstractmethod
    def boundary(self) -> dict[str, Any]:
        """Return all state that an iteration changes in addition to :meth:`states`, as plain data and live tensors.

        Examples are random states, router buffers, loss scalers and the learning rate schedule. The entry ``progress``
        is required. It maps names, ``iteration`` among them, to whole numbers.
        """

    def boundary_copy(self) -> dict[str, Any]:
        """Return :meth:`boundary` with copies of its tensors, which the next iteration does not change."""
        return {name: _copied(part) for name, part in self.boundary().items()}

    def replicated_state(self, boundary: Mapping[str, Any]) -> dict[str, Any]:
        """Return the entries of ``boundary`` that are equal on all ranks; a replacement takes them from a survivor."""
        return {"progress": boundary["progress"]}

    @abstractmethod
    def put_boundary(self, boundary: Mapping[str, Any]) -> None:
        """Restore the values of :meth:`boundary`; random states last, as restoring other values may change them."""

    def put_progress(self, progress: Mapping[str, int]) -> None:
        """Restore only the entry ``progress`` of :meth:`boundary`, before the trainer opens its data set."""
        self.iteration = progress["iteration"]

    # An iteration

    @abstractmethod
    def commit_point(self, vote: Vote) -> Commit:
        """Return the commit point, which makes the optimizer step. The session calls this method once.

        Args:
            vote: function that returns when every rank of the job has called it, and raises an error if a rank was
                interrupted; see :class:`~moevement_core.trainer.commit.Commit`.
        """

    # After a failure

    @abstractmethod
    def replaying(self, shared_from: int | None, feeding: Feeding | None) -> AbstractContextManager[Trainer]:
        """Return a context for a replay. Iterations that run in it change the state, but not the job's counters.

        Only ranks that replay call this method. They execute iterations with the :class:`Trainer` that the context
        provides.

        Args:
            shared_from: first replayed iteration in which any copy of an embedding that several stages hold is active.
                From then on all copies compute gradients, and each active copy is updated with their sum. None if there
                is no such iteration.
            feeding: neighbours that send logged tensors to this rank, if other stages keep their state and wait; None
                if all stages replay.
        """

    # Elastic jobs

    def recut(self) -> Recut:
        """Return the object that divides the state anew when an elastic job changes its number of ranks.

        The default suits a trainer whose ranks hold whole tensors, with operator names and keys that do not depend on
        the number of ranks.
        """
        return WholeTensors(self.states, lambda: self.place().stage, self.losses)

    # Windows on disk

    def settings(self) -> dict[str, Any]:
        """Return the flags on which the results of a replay depend.

        A job that loads a window from disk must have the same values as the job that wrote the window.
        """
        return {}


def _copied(part: Any) -> Any:
    if isinstance(part, torch.Tensor):
        return part.clone()
    if isinstance(part, Mapping):
        return {name: _copied(value) for name, value in part.items()}
    if isinstance(part, list | tuple):
        return type(part)(_copied(value) for value in part)
    return part
