"""Interface between a trainer and its fault tolerance: methods and attributes that the trainer implements.

Megatron's trainer implements it in ``megatron/moevement/binding.py``; ``examples/plain_torch/train.py`` is the smallest
implementation. Unless a method says otherwise, the main thread of every rank of the job calls it at the same point. An
exception in a method is a failure of this rank: all ranks are interrupted and form the job again.

Methods in the order of a job's life, and their callers:

============================  ==========================================================================================
``place``, ``operators``,     every rank, with usable process groups: at the start, and in every generation afterwards
``states``
``boundary``                  every rank, between two iterations
``commit_point``              every rank, once; its ``step`` in each iteration
``build_data``,               survivors, after a failure
``run_totals``
``regroup`` or ``build``      survivors (``regroup``) or replacements (``build``), after a failure
``clear_gradients``,          every rank, after ``regroup`` or ``build``
``put_progress``, ``resume``
``replaying``                 ranks that replay; it provides the ``Trainer`` of the replay
``gather_replicas``           ranks of a stage in which a rank repeated updates alone
``put_boundary``,             every rank, when all ranks have the state that training resumes from
``gradients_left``,
``replicas``, ``on_recovered``
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
from moevement_core.recovery.feed import Feeding
from moevement_core.recovery.replay import Trainer
from moevement_core.run.run_record import RunRecord
from moevement_core.trainer.commit import Commit, Vote

Replicas = tuple[str, tuple[int, ...], str]
"""Operator name, ranks that hold equal compute weights of this operator, and their digest on one rank.

An empty name stands for all compute weights of these ranks.
"""


@dataclass(frozen=True, slots=True)
class Place:
    """Position of this rank in the job; ranks are numbered as in the job's default process group."""

    stage: int = 0
    """Pipeline stage; 0 without a pipeline. The ranks of a stage roll back together."""
    replica: int = 0
    """Smallest rank of the model replica. Ranks of one replica clip gradients by the same norm."""
    same_state: int = 0
    """Smallest rank among this rank and its data-parallel peers, which hold the same state or shards of it."""
    pipeline: tuple[int, ...] = ()
    """Ranks of this rank's pipeline, in the order of stages; empty without a pipeline."""
    is_ring: bool = False
    """True if the last stage also sends to the first, as in interleaved schedules."""
    embedding_ranks: tuple[int, ...] = ()
    """Ranks that sum their gradients of an embedding with this rank; empty if the embedding has one copy."""
    step_spans_job: bool = False
    """True if each step ends with a reduction over all ranks. A rank that finishes the reduction knows that every rank
    has reached the commit point.
    """


class Counts(Protocol):
    """Counters of the routing decisions on this rank. Counting does not wait for the device."""

    paused: bool
    """True while tokens are not counted, so that a replay does not count them twice."""

    @property
    def tokens_of_run(self) -> int | None:
        """Tokens that each layer routes in the whole run, counting a token once for each of its experts.

        None if the length of the run is unknown.
        """

    def take(self) -> torch.Tensor:
        """Return the numbers of tokens that this rank counted since the last call, and reset the counters."""

    def by_operator(self, taken: list[torch.Tensor]) -> torch.Tensor:
        """Return the results of several calls of :meth:`take` as float64 ``[calls, operators]`` on the host."""


class ExpertRoom(Counts, Protocol):
    """Control of extra expert capacity, with counters of the tokens that used it."""

    def open(self, operators: Collection[str]) -> None:
        """Give extra capacity to these experts alone, from the next iteration on.

        All ranks of a stage pass the same experts.
        """


class Binding(ABC):
    """Description of one rank of a training job for its fault tolerance."""

    iteration: int = 0
    """Last committed iteration; 0 before the first. The trainer updates it, and :meth:`put_progress` sets it."""
    record: RunRecord | None = None
    """Record of the run that this rank writes events to; None on ranks that write none."""
    boundary_log: BoundaryLog | None = None
    """Log to which the trainer adds all tensors that it sends to other stages. The session sets it; None without a
    pipeline.
    """

    @cached_property
    def losses(self) -> dict[int, Mapping[str, Any]]:
        """Losses by name for each recent iteration of this rank, trained or replayed."""
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
        """Return the live tensors of each operator that this rank saves; they stay valid for the whole job.

        Data-parallel replicas with the same state may each save a part of it.
        """

    @abstractmethod
    def boundary(self) -> dict[str, Any]:
        """Return all state that an iteration changes beside :meth:`states`, as plain data and live tensors.

        Examples are random states, router buffers, loss scalers and the learning rate schedule. The entry ``progress``
        is required. It maps names, ``iteration`` among them, to whole numbers.
        """

    def boundary_copy(self) -> dict[str, Any]:
        """Return :meth:`boundary` with copies of its tensors, which the next iteration does not change."""
        return {name: _copied(part) for name, part in self.boundary().items()}

    def replicated_state(self, boundary: Mapping[str, Any]) -> dict[str, Any]:
        """Return the rank-independent part of a boundary, which a rank may take from another rank after a failure."""
        return {"progress": boundary["progress"]}

    @abstractmethod
    def put_boundary(self, boundary: Mapping[str, Any]) -> None:
        """Restore the values of :meth:`boundary`, random states last, because restoring the rest may change them."""

    @abstractmethod
    def put_progress(self, progress: Mapping[str, int]) -> None:
        """Restore the entry ``progress`` of :meth:`boundary` alone, before the trainer opens its data."""

    def counts(self, table: OperatorTable, ordering: Ordering) -> Counts | None:
        """Return counters of the tokens that each expert gets; None if this trainer counts no tokens.

        Args:
            table: operators of the stage.
            ordering: ordering that decides what is counted.
        """
        return None

    def expert_capacities(self, table: OperatorTable) -> Mapping[str, float]:
        """Return the most tokens that each expert takes. Without it, ``--moevement-order capacity`` is refused.

        The order depends on the ratios of capacities only, so any batch may be the unit, if it is the same for all
        experts of the stage. The capacities stay equal for the whole job, also after a failure.

        Args:
            table: operators of the stage.

        Returns:
            A number above 0 for each expert in ``table``, on this rank and on others, by operator name.
        """
        raise NotImplementedError

    def expert_room(self, table: OperatorTable, share: float) -> ExpertRoom:
        """Return the control of extra expert capacity. Without this method, ``--moevement-capacity-boost`` is refused.

        Args:
            table: operators of the stage.
            share: extra capacity of an expert, as a share of its capacity.
        """
        raise NotImplementedError

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank sends to other stages in an iteration."""
        return 0

    # An iteration

    @abstractmethod
    def commit_point(self, vote: Vote) -> Commit:
        """Return the commit point that surrounds the optimizer step; called once.

        Args:
            vote: function that returns when every rank of the job has called it; see
                :class:`~moevement_core.trainer.commit.Commit`.
        """

    def plan_exit(self, committed: int, *, is_winding_down: bool) -> None:
        """Plan to save all state and end the job after the next iteration, or cancel that plan.

        Called before each iteration.

        Args:
            committed: last committed iteration.
            is_winding_down: True if the job is to end; False cancels an earlier plan.
        """

    # After a failure

    def build_data(self) -> Any:
        """Return data of a survivor from which a replacement can build model and optimizer without communication."""
        return None

    def run_totals(self) -> Any:
        """Return running totals of a survivor, which a replacement continues; they do not affect the training state."""
        return None

    @abstractmethod
    def regroup(self) -> None:
        """Switch all objects of a survivor to the current process groups."""

    @abstractmethod
    def build(self, build_data: Any) -> bool:
        """Build model and optimizer on a replacement, without communication, because other ranks do not build theirs.

        Args:
            build_data: result of :meth:`build_data` on a survivor.

        Returns:
            True if the built state is the one that the job started from.
        """

    @abstractmethod
    def clear_gradients(self) -> None:
        """Drop all gradients of the interrupted iteration, including those in reduction buffers."""

    def resume(self, until: int, run_totals: Any) -> None:
        """Set records and counters to ``until``, the iteration that training resumes from.

        Args:
            until: resume iteration.
            run_totals: result of :meth:`run_totals` on a survivor.
        """

    def gradients_left(self) -> list[str]:
        """Return descriptions of gradients that an interrupted iteration has left behind; empty if there are none."""
        return []

    def replicas(self) -> list[Replicas]:
        """Return, without communication, digests of all compute weights that must be equal on several ranks."""
        return []

    def live_replicas(self) -> Collection[int]:
        """Return the live replicas of this rank: other ranks that hold all of its state and boundary record."""
        return ()

    def states_of_replica(self, rank: int) -> Mapping[str, OperatorState]:
        """Return the tensors of this rank that equal the :meth:`states` of its live replica ``rank``.

        Called only if there are live replicas.
        """
        raise NotImplementedError

    def stages_are_tied_by(self) -> str | None:
        """Return the reason why a stage cannot roll back alone; None if it can."""
        return None

    def iterations_left_out(self) -> Collection[int]:
        """Return iterations that the job never executes, so that ranks have no logs and no updates of them."""
        return ()

    @abstractmethod
    def replaying(self, shared_from: int | None, feeding: Feeding | None) -> AbstractContextManager[Trainer]:
        """Return a context for re-executed iterations, which change the state but no other records of training.

        The ranks that replay call it, and drive the replay by the returned :class:`Trainer`.

        Args:
            shared_from: first iteration in which a copy of an embedding is active on any stage. From then on all copies
                compute gradients, and the active copy uses their sum. None without copies.
            feeding: neighbours that feed this rank, if other stages keep their state and wait; otherwise None.
        """

    def gather_replicas(self) -> None:
        """Gather the parts of the state from data-parallel replicas, and make compute weights from the whole state.

        All ranks of a stage call it after a rank of the stage has repeated its updates alone. Without this method,
        ``--moevement-recovery redo`` and ``auto`` are refused.
        """
        raise NotImplementedError

    def on_recovered(self, until: int, outcome: Mapping[str, Any], *, is_between: bool) -> None:
        """Do work scheduled after ``until`` that a failure may have prevented. ``state@until`` is live on every rank.

        Args:
            until: resume iteration.
            outcome: outcome of the step of ``until``.
            is_between: True if an evaluation or dense checkpoint scheduled after ``until`` may be missing.
        """

    # Windows on disk

    def settings(self) -> dict[str, Any]:
        """Return the flags that replayed iterations depend on; a job that loads a window must have equal values."""
        return {}

    def newest_checkpoint(self) -> int | None:
        """Return the iteration that a restart would begin from without windows on disk; called on rank 0 alone."""
        return None

    # Drills

    def wipe(self) -> None:
        """Overwrite all state of this rank, for ``--moevement-wipe-at``. Without this method, the flag is refused."""
        raise NotImplementedError


def _copied(part: Any) -> Any:
    if isinstance(part, torch.Tensor):
        return part.clone()
    if isinstance(part, Mapping):
        return {name: _copied(value) for name, value in part.items()}
    if isinstance(part, list | tuple):
        return type(part)(_copied(value) for value in part)
    return part
