"""Binding of Megatron's trainer to the fault-tolerance engine."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from typing import Any, override

import torch.distributed as dist

from megatron.moevement.elastic.recut import MegatronRecut
from megatron.moevement.elastic.slots import slots
from megatron.moevement.operators import OperatorId
from megatron.moevement.optimizer.committed import CommittedOptimizer, check_supported
from megatron.moevement.optimizer.restore import Restore
from megatron.moevement.optimizer.scales import Scales
from megatron.moevement.optimizer.views import OperatorViews, live_replicas, operator_views, operators_of, part_of_rank
from megatron.moevement.pipeline_parallel.sent_bytes import bytes_sent_per_iteration
from megatron.moevement.restart import fault_points, leftovers
from megatron.moevement.restart.groups import Groups, move_to_groups
from megatron.moevement.restart.origin import newest_saved
from megatron.moevement.runtime.audited import audited_model
from megatron.moevement.runtime.boundary import (
    advanced,
    boundary_after,
    boundary_copy,
    boundary_state,
    put_boundary_state,
    put_progress,
)
from megatron.moevement.runtime.ledger import Ledger
from megatron.moevement.runtime.live import Live
from megatron.moevement.runtime.replay import MegatronTrainer
from megatron.moevement.runtime.replicas import replica_digests
from megatron.moevement.runtime.settings import settings_of
from megatron.moevement.runtime.wipe import wipe
from megatron.moevement.transformer.capacity import RouterRoom, expert_capacity
from megatron.moevement.transformer.popularity import RouterCounts
from moevement_core.audit.evidence import AuditedModel
from moevement_core.engine.layout import OperatorState
from moevement_core.operators import Operator, OperatorTable
from moevement_core.policy.popularity import Ordering
from moevement_core.recovery.boundary_log import BoundaryLog
from moevement_core.recovery.feed import Feeding
from moevement_core.recovery.replay import Trainer
from moevement_core.restart.generation import generation
from moevement_core.run.run_record import RunRecord
from moevement_core.trainer.capabilities import (
    Counts,
    ExpertRoom,
    Replicas,
    SupportsAudit,
    SupportsCapacities,
    SupportsCounts,
    SupportsDenseCheckpoints,
    SupportsExit,
    SupportsExtraCapacity,
    SupportsGather,
    SupportsGradientChecks,
    SupportsLateBuild,
    SupportsLiveReplicas,
    SupportsPipeline,
    SupportsRecoveryHook,
    SupportsRegroup,
    SupportsReplicaDigests,
    SupportsSkips,
    SupportsTotals,
    SupportsWipe,
)
from moevement_core.trainer.commit import Vote
from moevement_core.trainer.interface import BindingInterface, Place


class MegatronBinding(
    BindingInterface,
    SupportsCounts,
    SupportsCapacities,
    SupportsExtraCapacity,
    SupportsPipeline,
    SupportsExit,
    SupportsSkips,
    SupportsRegroup,
    SupportsLateBuild,
    SupportsTotals,
    SupportsGradientChecks,
    SupportsReplicaDigests,
    SupportsLiveReplicas,
    SupportsGather,
    SupportsRecoveryHook,
    SupportsAudit,
    SupportsDenseCheckpoints,
    SupportsWipe,
):
    """Binding of one rank of Megatron's trainer.

    Args:
        live: Megatron's objects on this rank.
        ledger: metrics of this rank's iterations.
    """

    def __init__(self, live: Live, ledger: Ledger) -> None:
        self.live, self.ledger = live, ledger
        self.on_step: Callable[[], Any] = lambda: None
        """Function that executes an optimizer step in training; ``restart/built.py`` sets it to the session's step."""
        self.on_build: Callable[[Any], bool] = lambda shared: False
        """Function that builds model and optimizer on a replacement, from the :attr:`parameter_keys` of a survivor.

        It returns True if the built objects have the state from which the job started.
        """
        self.on_resume: Callable[[int], None] = lambda until: None
        """Function that continues the run's record from the resume iteration, before Megatron opens data."""
        self.on_back: Callable[[int, Mapping[str, Any], bool], None] = lambda until, outcome, is_between: None
        """Function that is called after a recovery, inside Megatron's training loop, before the next iteration.

        Its arguments are those of :meth:`on_recovered`.
        """
        self.expert_loads: Callable[[], Mapping[int, Sequence[int]]] = dict
        """Function that returns recent token counts of the experts in this rank's layers, by layer, if experts are in
        slots.
        """
        self.parameter_keys: list[Any] = []
        """Parameter keys that all ranks gathered when Megatron built the optimizer.

        A replacement that builds its optimizer alone takes these keys from a survivor instead.
        """
        self.groups: list[Groups] = []
        """Process groups to which model and optimizer refer: one entry, with the groups of one generation.

        If a failure interrupted :meth:`regroup`, references to groups of earlier generations are left, and each of
        these generations has an entry as well.
        """
        self.groups_now: Groups | None = None
        """Process groups of this generation, recorded before model and optimizer are built."""
        self.job_name = ""
        self._plan: int | None = None
        self._commit: CommittedOptimizer | None = None

    # State of the rank

    @property
    def iteration(self) -> int:  # type: ignore[override]
        """Last iteration that this rank has committed."""
        return self.live.iteration

    @property
    def record(self) -> RunRecord | None:  # type: ignore[override]
        """Record to which this rank writes events; None if it writes none."""
        return self.live.record

    @property
    def boundary_log(self) -> BoundaryLog | None:
        """Log of what this rank sends to other stages; None without sparse checkpointing or with one stage."""
        return self.live.boundary_log

    @boundary_log.setter
    def boundary_log(self, log: BoundaryLog | None) -> None:
        self.live.boundary_log = log

    @cached_property
    def views(self) -> OperatorViews:
        """Views of the state of every operator, built at the first access.

        At that time, the optimizer must already hold the tensors that it updates in training.
        """
        check_supported(self.live.optimizer)
        return operator_views(self._chunks(), self.live.optimizer)

    def _chunks(self) -> list[Any]:
        from megatron.core.utils import unwrap_model

        return list(unwrap_model(self.live.model or []))

    @override
    def place(self) -> Place:
        from megatron.core import parallel_state

        args = self.live.args
        pipeline = dist.get_process_group_ranks(parallel_state.get_pipeline_model_parallel_group())
        return Place(
            stage=parallel_state.get_pipeline_model_parallel_rank(),
            replica=min(dist.get_process_group_ranks(parallel_state.get_model_parallel_group())),
            same_state=min(
                dist.get_process_group_ranks(parallel_state.get_data_parallel_group(with_context_parallel=True))
            ),
            pipeline=tuple(pipeline),
            is_ring=(args.virtual_pipeline_model_parallel_size or 1) > 1,
            embedding_ranks=_embedding_ranks(args),
        )

    @override
    def operators(self) -> Sequence[Operator]:
        return operators_of(self.views.states)

    @override
    def states(self) -> Mapping[str, OperatorState]:
        states: dict[OperatorId, OperatorState] = self.views.states
        return {operator.name: state for operator, state in states.items()}

    @override
    def boundary(self) -> dict[str, Any]:
        return boundary_state(self.live)

    @override
    def boundary_copy(self) -> dict[str, Any]:
        return boundary_copy(self.live)

    @override
    def replicated_state(self, boundary: Mapping[str, Any]) -> dict[str, Any]:
        return {name: boundary[name] for name in ("progress", "loss_scalers")}

    @override
    def put_boundary(self, boundary: Mapping[str, Any]) -> None:
        put_boundary_state(self.live, boundary)

    @override
    def put_progress(self, progress: Mapping[str, int]) -> None:
        from megatron.core.num_microbatches_calculator import update_num_microbatches

        args = self.live.args
        put_progress(self.live, progress)
        args.iteration = progress["iteration"]
        update_num_microbatches(args.consumed_train_samples, consistency_check=False)

    @override
    def counts(self, table: OperatorTable, ordering: Ordering) -> Counts | None:
        args = self.live.args
        samples = args.train_samples or args.train_iters * args.global_batch_size
        return RouterCounts(self._chunks(), table, ordering, samples * args.seq_length * args.moe_router_topk)

    @override
    def expert_capacities(self, table: OperatorTable) -> Mapping[str, float]:
        capacity = float(expert_capacity(self.live.args))
        return {name: capacity for name, is_expert in zip(table.names, table.is_expert, strict=True) if is_expert}

    @override
    def expert_room(self, table: OperatorTable, share: float) -> ExpertRoom:
        return RouterRoom(self._chunks(), table, share)

    @property
    @override
    def sent_bytes(self) -> int:
        from megatron.core import parallel_state

        return bytes_sent_per_iteration(self.live.args, parallel_state.get_pipeline_model_parallel_rank())

    # An iteration

    @override
    def commit_point(self, vote: Vote) -> CommittedOptimizer:
        def average_and_vote() -> None:
            if generation() is not None:  # in a job that can lose a rank
                self.ledger.average(self.live.iteration + 1)
            vote()

        commit = CommittedOptimizer(
            optimizer=self.live.optimizer,
            boundary=lambda: boundary_after(self.live),
            advance=advanced,
            vote=average_and_vote,
            step=lambda: self.on_step(),
            scales=Scales(self.live.model or []),
            num_tokens=lambda: None if self.live.num_tokens is None else int(self.live.num_tokens),
            validates=self.live.args.check_for_nan_in_loss_and_grad,
        )
        self._commit = commit
        fault_points.watch(self.live)
        return commit

    @override
    def plan_exit(self, committed: int, *, is_winding_down: bool) -> None:
        """Make Megatron exit after iteration ``committed + 1`` if ``is_winding_down``; otherwise cancel a planned exit.

        The method sets ``--exit-interval``. At the exit, Megatron saves a checkpoint if ``--save`` names a folder, and
        ends with code 0.
        """
        args = self.live.args
        if is_winding_down and self._plan is None:
            self._plan = args.exit_interval or 0
            args.exit_interval = committed + 1
        elif not is_winding_down and self._plan is not None:
            args.exit_interval, self._plan = self._plan or None, None

    # After a failure

    @override
    def build_data(self) -> list[Any]:
        return self.parameter_keys

    @override
    def run_totals(self) -> float:
        return float(self.live.args.num_floating_point_operations_so_far)

    @override
    def regroup(self) -> None:
        # A further failure may have interrupted a replacement of references, so objects may refer to groups of
        # several generations.
        assert self.groups_now is not None
        self.groups.append(self.groups_now)
        for old in self.groups[:-1]:
            move_to_groups(old, self.groups_now)
        self.groups = [self.groups_now]

    @override
    def build(self, build_data: Any) -> bool:
        is_as_at_start = self.on_build(build_data)
        assert self.groups_now is not None
        self.groups = [self.groups_now]
        return is_as_at_start

    @override
    def clear_gradients(self) -> None:
        leftovers.clear_gradients(self.live)

    @override
    def resume(self, until: int, run_totals: float) -> None:
        self.live.args.num_floating_point_operations_so_far = run_totals
        self.on_resume(until)

    @override
    def gradients_left(self) -> list[str]:
        return leftovers.gradients(self.live)

    @override
    def replicas(self) -> list[Replicas]:
        return replica_digests(self.live)

    @override
    def audited(self) -> AuditedModel:
        return audited_model(self._chunks(), self.views, is_overlapped=self.live.args.overlap_grad_reduce)

    @override
    def live_replicas(self) -> Collection[int]:
        args = self.live.args
        # Under these flags, replicas have different random states, or FP8 scales that each replica computed alone.
        if args.data_parallel_random_init or args.fp8:
            return ()
        return live_replicas(self._chunks(), self.live.optimizer)

    @override
    def states_of_replica(self, rank: int) -> Mapping[str, OperatorState]:
        states = operator_views(self._chunks(), self.live.optimizer, part_of_rank(rank)).states
        return {operator.name: state for operator, state in states.items()}

    @override
    def stages_are_tied_by(self) -> str | None:
        if self.live.args.calculate_per_token_loss and slots() is not None:
            return "gradients of experts in slots are summed after they are divided by the token count"
        return None

    @override
    def iterations_left_out(self) -> Collection[int]:
        return list(self.live.args.iterations_to_skip)

    @override
    def leave_out(self, iterations: Collection[int]) -> None:
        args = self.live.args
        args.iterations_to_skip = sorted({*args.iterations_to_skip, *iterations})
        self.ledger.forget_average()

    @override
    def replaying(self, shared_from: int | None, feeding: Feeding | None) -> AbstractContextManager[Trainer]:
        return self._replaying(shared_from, feeding)

    @contextmanager
    def _replaying(self, shared_from: int | None, feeding: Feeding | None) -> Iterator[Trainer]:
        assert self._commit is not None
        trainer = MegatronTrainer(
            live=self.live,
            ledger=self.ledger,
            views=self.views,
            commit=self._commit,
            shared_from=shared_from,
            feeding=feeding,
        )
        with trainer.replaying():
            yield trainer

    @override
    def gather_replicas(self) -> None:
        assert self._commit is not None
        assert self._commit.mark is not None
        Scales(self.live.model or []).put(self._commit.mark.boundary)
        with self._commit.making():
            Restore(self.live.model or [], self.live.optimizer, self.views).gather_replicas()

    def forget_loop(self) -> None:
        """Drop :attr:`on_back`, which refers to a training loop, once the recovery or the loop has ended."""
        self.on_back = lambda until, outcome, is_between: None

    @override
    def on_recovered(self, until: int, outcome: Mapping[str, Any], *, is_between: bool) -> None:
        self.on_back(until, outcome, is_between)

    # Elastic jobs

    @override
    def recut(self) -> MegatronRecut:
        return MegatronRecut(self.live, self.ledger, self.expert_loads)

    # Windows on disk

    @override
    def settings(self) -> dict[str, Any]:
        return settings_of(self.live.args)

    @override
    def newest_checkpoint(self) -> int | None:
        return newest_saved(self.live.args.save, self.job_name)

    # Drills

    @override
    def wipe(self) -> None:
        wipe(self.live, self.views)


def _embedding_ranks(args: Namespace) -> tuple[int, ...]:
    """Return the ranks, this one included, whose copies of an embedding share gradients; empty if there are no copies.

    Megatron sums the gradients of all copies when it finalizes gradients. Copies exist if output layers are tied to the
    embedding, or if the model predicts several tokens ahead.
    """
    from megatron.core import parallel_state

    groups = [parallel_state.get_position_embedding_group(check_initialized=False)]
    if not args.untie_embeddings_and_output_weights or args.mtp_num_layers:
        groups.append(parallel_state.get_embedding_group(check_initialized=False))
    ranks = {rank for group in groups if group is not None for rank in dist.get_process_group_ranks(group)}
    return tuple(sorted(ranks)) if len(ranks) > 1 else ()
