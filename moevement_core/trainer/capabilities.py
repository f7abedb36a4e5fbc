"""Capabilities of a trainer beside the methods that every binding has.

Each capability is a protocol. The engine asks with ``isinstance`` whether the binding of this rank has it, so a binding
defines the methods of those capabilities that its trainer has, and inherits from no protocol. Flags that need a missing
capability are refused at the start of the job. Unless a protocol says otherwise, the main thread of every rank calls
its methods at the same point.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch

from moevement_core.audit.evidence import AuditedModel
from moevement_core.engine.layout import OperatorState
from moevement_core.errors import ConfigError
from moevement_core.operators import OperatorTable
from moevement_core.policy.popularity import Ordering

if TYPE_CHECKING:
    from moevement_core.trainer.interface import BindingInterface

Replicas = tuple[str, tuple[int, ...], str]
"""Operator name, ranks on which the operator's compute weights must be equal, digest of these weights on this rank.

If the name is empty, the digest covers all compute weights that must be equal on these ranks.
"""


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


# Experts


@runtime_checkable
class SupportsCounts(Protocol):
    """Trainer that counts the tokens of its experts. Without counts, popularity does not order operators."""

    def counts(self, table: OperatorTable, ordering: Ordering) -> Counts | None:
        """Return counters of the tokens that each expert gets; None if this model has nothing to count.

        Args:
            table: operators of the stage.
            ordering: rule by which the job orders experts; it decides what is counted.
        """


@runtime_checkable
class SupportsCapacities(Protocol):
    """Trainer whose experts take a limited number of tokens. ``--moevement-order capacity`` needs it."""

    def expert_capacities(self, table: OperatorTable) -> Mapping[str, float]:
        """Return the capacity of each expert: the most tokens that it takes.

        Capacities may count the tokens of a micro-batch, an iteration or any other batch that is the same for all
        experts of the stage, because the order of operators depends only on the ratios of capacities. Every call during
        the job returns the same capacities, also after a failure.

        Args:
            table: operators of the stage.

        Returns:
            A number above 0 for each expert in ``table``, on this rank and on others, by operator name.
        """


@runtime_checkable
class SupportsExtraCapacity(Protocol):
    """Trainer that can give experts extra capacity. ``--moevement-capacity-boost`` needs it."""

    def expert_room(self, table: OperatorTable, share: float) -> ExpertRoom:
        """Return an object that gives experts extra capacity.

        Args:
            table: operators of the stage.
            share: extra capacity of an expert, as a share of its capacity.
        """


# Training


@runtime_checkable
class SupportsPipeline(Protocol):
    """Trainer with pipeline stages. It adds all tensors that it sends to other stages to its ``boundary_log``."""

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank sends to other stages in an iteration."""

    def stages_are_tied_by(self) -> str | None:
        """Return the reason why a stage cannot roll back alone; None if it can."""


@runtime_checkable
class SupportsExit(Protocol):
    """Trainer that can save all state and end the job on request."""

    def plan_exit(self, committed: int, *, is_winding_down: bool) -> None:
        """Plan to save all state and end the job after the next iteration, or cancel such a plan.

        The session calls this method before each iteration.

        Args:
            committed: last committed iteration.
            is_winding_down: True if the job is to end; False cancels an earlier plan.
        """


@runtime_checkable
class SupportsSkips(Protocol):
    """Trainer that can leave out iterations. ``--moevement-rollback-on-spike`` needs it."""

    def iterations_left_out(self) -> Collection[int]:
        """Return the iterations that the job skips; they have no updates and no logs."""

    def leave_out(self, iterations: Collection[int]) -> None:
        """Skip further iterations from now on: consume their batches, and make no update.

        The call is the same on all ranks. It comes before the first of these iterations, and again in each start of the
        job and on each replacement.

        Args:
            iterations: iterations to add to :meth:`iterations_left_out`; empty to learn whether the trainer can.

        Raises:
            ConfigError: the trainer cannot leave out iterations.
        """


# After a failure


@runtime_checkable
class SupportsRegroup(Protocol):
    """Trainer whose objects refer to process groups."""

    def regroup(self) -> None:
        """Make the model, the optimizer and all other objects of a survivor use the current process groups."""


@runtime_checkable
class SupportsLateBuild(Protocol):
    """Trainer whose constructor does not build model and optimizer."""

    def build_data(self) -> Any:
        """Return data of a survivor from which a replacement can build model and optimizer without communication."""

    def build(self, build_data: Any) -> bool:
        """Build model and optimizer on a replacement, without communication, because survivors do not call this method.

        Args:
            build_data: result of :meth:`build_data` on a survivor.

        Returns:
            True if model and optimizer now have the state in which the job started.
        """


@runtime_checkable
class SupportsTotals(Protocol):
    """Trainer with counters of the run that are not in its boundary record."""

    def run_totals(self) -> Any:
        """Return sums over the run, such as floating-point operations, which replacements take over from a survivor.

        The sums do not affect the training state.
        """

    def resume(self, until: int, run_totals: Any) -> None:
        """Set the trainer's counters to ``until``, the iteration that training resumes from.

        Args:
            until: resume iteration.
            run_totals: result of :meth:`run_totals` on a survivor.
        """


@runtime_checkable
class SupportsGradientChecks(Protocol):
    """Trainer that can drop the gradients of an interrupted iteration at once, and not only in the next iteration."""

    def clear_gradients(self) -> None:
        """Drop all gradients of the interrupted iteration, including those in reduction buffers."""

    def gradients_left(self) -> list[str]:
        """Return descriptions of gradients that an interrupted iteration has left behind; empty if there are none."""


@runtime_checkable
class SupportsReplicaDigests(Protocol):
    """Trainer that knows which ranks must have equal weights, so that a recovery and an audit compare them."""

    def replicas(self) -> list[Replicas]:
        """Return, without communication, digests of all compute weights that must be equal on several ranks."""


@runtime_checkable
class SupportsLiveReplicas(Protocol):
    """Trainer in which other ranks have all state of a rank, so that its loss needs no snapshot and no replay."""

    def live_replicas(self) -> Collection[int]:
        """Return the live replicas of this rank: other ranks with all state and the boundary record of this rank."""

    def states_of_replica(self, rank: int) -> Mapping[str, OperatorState]:
        """Return those tensors of this rank that are equal to the ``states`` of its live replica ``rank``.

        Called after ``rank``, one of the :meth:`live_replicas`, has failed. Its replacement gets these tensors.
        """


@runtime_checkable
class SupportsGather(Protocol):
    """Trainer that can repeat updates from logged gradients. ``--moevement-recovery redo`` and ``auto`` need it."""

    def gather_replicas(self) -> None:
        """Gather the shards of the full state from data-parallel ranks, and make the compute weights from them.

        All ranks of a stage call it after a failed rank of the stage has repeated its updates.
        """


@runtime_checkable
class SupportsRecoveryHook(Protocol):
    """Trainer with work to do after a recovery."""

    def on_recovered(self, until: int, outcome: Mapping[str, Any], *, is_between: bool) -> None:
        """Do work, such as an evaluation, that was due after iteration ``until`` and that a failure may have prevented.

        ``state@until`` is live on every rank.

        Args:
            until: resume iteration.
            outcome: outcome of the step of ``until``.
            is_between: True if an evaluation or dense checkpoint due right after ``until`` may be missing.
        """


# Audits, windows on disk, drills


@runtime_checkable
class SupportsAudit(Protocol):
    """Trainer whose gradients an audit observes (``--moevement-audit-interval``).

    Without it, an audit compares only the state after the update, so it may name a rank that got a wrong gradient from
    another one.
    """

    def audited(self) -> AuditedModel | None:
        """Return the modules and gradients that an audit observes.

        The trainer calls :func:`moevement_core.before_reductions` when gradients are complete.
        """


@runtime_checkable
class SupportsDenseCheckpoints(Protocol):
    """Trainer that writes dense checkpoints of its own."""

    def newest_checkpoint(self) -> int | None:
        """Return the iteration of the newest dense checkpoint, None without one. Only rank 0 calls this method."""


@runtime_checkable
class SupportsWipe(Protocol):
    """Trainer that can lose its state on purpose. ``--moevement-wipe-at`` needs it."""

    def wipe(self) -> None:
        """Overwrite all state of this rank."""


CAPABILITIES: tuple[Any, ...] = (
    SupportsCounts, SupportsCapacities, SupportsExtraCapacity, SupportsPipeline, SupportsExit, SupportsSkips,
    SupportsRegroup, SupportsLateBuild, SupportsTotals, SupportsGradientChecks, SupportsReplicaDigests,
    SupportsLiveReplicas, SupportsGather, SupportsRecoveryHook, SupportsAudit, SupportsDenseCheckpoints, SupportsWipe,
)  # fmt: skip
"""Protocols of this module."""


def refuse_half_capabilities(binding: BindingInterface) -> None:
    """Refuse a binding that defines some methods of a capability, and lacks others. Every rank calls it at the start.

    Raises:
        ConfigError: a method of a capability is missing.
    """
    for capability in CAPABILITIES:
        names = sorted(capability.__protocol_attrs__)
        missing = [name for name in names if not hasattr(type(binding), name)]
        if missing and len(missing) < len(names):
            defined = next(name for name in names if name not in missing)
            raise ConfigError(
                f"{type(binding).__name__} defines {defined}, but not {missing[0]}; {capability.__name__} needs both: "
                "define the other, too"
            )


def refuse_without_progress(binding: BindingInterface) -> None:
    """Refuse a binding whose boundary record lacks the number of its iteration. Every rank calls it at the start.

    Raises:
        ConfigError: the record has no entry ``progress`` with the iteration.
    """
    if "iteration" not in binding.boundary().get("progress", {}):
        raise ConfigError(
            f"{type(binding).__name__}.boundary() has no entry progress with the iteration; return "
            '{"progress": {"iteration": self.iteration}, ...}, or in a subclass {**super().boundary(), ...}'
        )


# Answers of trainers without a capability


def iterations_left_out(binding: BindingInterface) -> Collection[int]:
    """Return the iterations that the job skips; empty if the trainer cannot leave out iterations."""
    return binding.iterations_left_out() if isinstance(binding, SupportsSkips) else ()


def replica_digests(binding: BindingInterface) -> list[Replicas]:
    """Return digests of all weights that must be equal on several ranks; empty if the trainer does not know them."""
    return binding.replicas() if isinstance(binding, SupportsReplicaDigests) else []


def tie_of_stages(binding: BindingInterface) -> str | None:
    """Return the reason why a stage cannot roll back alone; None if it can."""
    return binding.stages_are_tied_by() if isinstance(binding, SupportsPipeline) else None


def regroup(binding: BindingInterface) -> None:
    """Make all objects of the trainer use the current process groups, if they refer to any."""
    if isinstance(binding, SupportsRegroup):
        binding.regroup()


def leave_out(binding: BindingInterface, iterations: Collection[int]) -> None:
    """Skip further iterations from now on; see :meth:`SupportsSkips.leave_out`. Every rank calls it.

    Raises:
        ConfigError: the trainer cannot leave out iterations.
    """
    if not isinstance(binding, SupportsSkips):
        raise ConfigError(
            f"{type(binding).__name__} cannot leave out iterations; define iterations_left_out() and leave_out()"
        )
    binding.leave_out(iterations)


def run_totals(binding: BindingInterface) -> Any:
    """Return sums over the run that replacements take over from a survivor; None if the trainer has none."""
    return binding.run_totals() if isinstance(binding, SupportsTotals) else None
