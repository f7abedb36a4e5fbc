"""Interface between a trainer and its fault tolerance: methods and attributes that the trainer implements.

Megatron's trainer implements it in ``megatron/moevement/binding.py``; ``examples/plain_torch/train.py`` is the smallest
implementation. Unless a method says otherwise, the main thread of every rank of the job calls it at the same point. An
exception in a method is a failure of this rank: the restart guard interrupts all ranks, and they form the job again.

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
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch

from moevement_core.audit.evidence import AuditedModel
from moevement_core.engine.layout import OperatorState
from moevement_core.errors import ConfigError
from moevement_core.operators import Operator, OperatorTable
from moevement_core.policy.popularity import Ordering
from moevement_core.recovery.boundary_log import BoundaryLog
from moevement_core.recovery.feed import Feeding
from moevement_core.recovery.replay import Trainer
from moevement_core.run.run_record import RunRecord
from moevement_core.trainer.commit import Commit, Vote
from moevement_core.trainer.recut import Recut, WholeTensors

Replicas = tuple[str, tuple[int, ...], str]
"""Operator name, ranks on which the operator's compute weights must be equal, digest of these weights on this rank.

If the name is empty, the digest covers all compute weights that must be equal on these ranks.
"""


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


class Counts(Protocol):
    """Counters of the tokens (or gate probabilities) of each expert on this rank; they never wait for the device."""

    paused: bool
    """True while tokens are not counted, so that a replay does not count them twice."""

    @property
    def tokens_of_run(self) -> int | None:
        """Tokens that each layer routes in the whole run, counting a token once for each of its experts.

        None if the length of the run is unknown.
        """

    def take(self) -> torch.Tensor:
        """Return the numbers that this rank counted since the last call of this method, and reset the counters."""

    def by_operator(self, taken: list[torch.Tensor]) -> torch.Tensor:
        """Return the results of several calls of :meth:`take` as float64 ``[calls, operators]`` on the host."""


class ExpertRoom(Counts, Protocol):
    """Control of extra capacity for experts that lost tokens in a failure, with counters of tokens that used it.

    Used for ``--moevement-capacity-boost``.
    """

    def open(self, operators: Collection[str]) -> None:
        """Give extra capacity to the experts ``operators``, and to no others, from the next iteration on.

        All ranks of a stage pass the same experts.
        """


class Binding(ABC):
    """Description of one rank's trainer. Subclasses implement it, and the session and recovery call it."""

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
        """Losses by name, for each recent iteration. The trainer adds them in training and in a replay."""
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

    @abstractmethod
    def put_progress(self, progress: Mapping[str, int]) -> None:
        """Restore only the entry ``progress`` of :meth:`boundary`, before the trainer opens its data set."""

    def counts(self, table: OperatorTable, ordering: Ordering) -> Counts | None:
        """Return counters of the tokens that each expert gets; None if this trainer counts no tokens.

        Args:
            table: operators of the stage.
            ordering: rule by which the job orders experts; it decides what is counted.
        """
        return None

    def expert_capacities(self, table: OperatorTable) -> Mapping[str, float]:
        """Return the capacity of each expert: the most tokens that it takes.

        Without this method, ``--moevement-order capacity`` is refused.

        Capacities may count the tokens of a micro-batch, an iteration or any other batch that is the same for all
        experts of the stage, because the order of operators depends only on the ratios of capacities. Every call during
        the job returns the same capacities, also after a failure.

        Args:
            table: operators of the stage.

        Returns:
            A number above 0 for each expert in ``table``, on this rank and on others, by operator name.
        """
        raise NotImplementedError

    def expert_room(self, table: OperatorTable, share: float) -> ExpertRoom:
        """Return an object that gives experts extra capacity. Without it, ``--moevement-capacity-boost`` is refused.

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
        """Return the commit point, which makes the optimizer step. The session calls this method once.

        Args:
            vote: function that returns when every rank of the job has called it, and raises an error if a rank was
                interrupted; see :class:`~moevement_core.trainer.commit.Commit`.
        """

    def plan_exit(self, committed: int, *, is_winding_down: bool) -> None:
        """Plan to save all state and end the job after the next iteration, or cancel such a plan.

        The session calls this method before each iteration.

        Args:
            committed: last committed iteration.
            is_winding_down: True if the job is to end; False cancels an earlier plan.
        """

    # After a failure

    def build_data(self) -> Any:
        """Return data of a survivor from which a replacement can build model and optimizer without communication."""
        return None

    def run_totals(self) -> Any:
        """Return sums over the run, such as floating-point operations, which replacements take over from a survivor.

        The sums do not affect the training state.
        """
        return None

    @abstractmethod
    def regroup(self) -> None:
        """Make the model, the optimizer and all other objects of a survivor use the current process groups."""

    @abstractmethod
    def build(self, build_data: Any) -> bool:
        """Build model and optimizer on a replacement, without communication, because survivors do not call this method.

        Args:
            build_data: result of :meth:`build_data` on a survivor.

        Returns:
            True if model and optimizer now have the state in which the job started.
        """

    @abstractmethod
    def clear_gradients(self) -> None:
        """Drop all gradients of the interrupted iteration, including those in reduction buffers."""

    def resume(self, until: int, run_totals: Any) -> None:
        """Set the trainer's counters to ``until``, the iteration that training resumes from.

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

    def audited(self) -> AuditedModel | None:
        """Return the modules and gradients that an audit observes (``--moevement-audit-interval``).

        With None, an audit compares only the state after the update, so it may name a rank that got a wrong gradient
        from another one. The trainer calls :func:`moevement_core.before_reductions` when gradients are complete.
        """
        return None

    def live_replicas(self) -> Collection[int]:
        """Return the live replicas of this rank: other ranks with all state and the boundary record of this rank."""
        return ()

    def states_of_replica(self, rank: int) -> Mapping[str, OperatorState]:
        """Return those tensors of this rank that are equal to the :meth:`states` of its live replica ``rank``.

        Called after ``rank``, one of the :meth:`live_replicas`, has failed. Its replacement gets these tensors.
        """
        raise NotImplementedError

    def stages_are_tied_by(self) -> str | None:
        """Return the reason why a stage cannot roll back alone; None if it can."""
        return None

    def iterations_left_out(self) -> Collection[int]:
        """Return the iterations that the job skips; they have no updates and no logs."""
        return ()

    def leave_out(self, iterations: Collection[int]) -> None:
        """Skip further iterations from now on: consume their batches, and make no update.

        The call is the same on all ranks. It comes before the first of these iterations, and again in each start of the
        job and on each replacement.

        Args:
            iterations: iterations to add to :meth:`iterations_left_out`; empty to learn whether the trainer can.

        Raises:
            ConfigError: the trainer cannot leave out iterations.
        """
        raise ConfigError("this trainer cannot leave out iterations; implement Binding.leave_out")

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

    def gather_replicas(self) -> None:
        """Gather the shards of the full state from data-parallel ranks, and make the compute weights from them.

        All ranks of a stage call it after a failed rank of the stage has repeated its updates. Without this method,
        ``--moevement-recovery redo`` and ``auto`` are refused.
        """
        raise NotImplementedError

    def on_recovered(self, until: int, outcome: Mapping[str, Any], *, is_between: bool) -> None:
        """Do work, such as an evaluation, that was due after iteration ``until`` and that a failure may have prevented.

        ``state@until`` is live on every rank.

        Args:
            until: resume iteration.
            outcome: outcome of the step of ``until``.
            is_between: True if an evaluation or dense checkpoint due right after ``until`` may be missing.
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

    def newest_checkpoint(self) -> int | None:
        """Return the iteration of the newest dense checkpoint, None without one. Only rank 0 calls this method."""
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
