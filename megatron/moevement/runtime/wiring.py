"""Everything of sparse checkpointing that is made of process groups: made once at the start and anew after a failure.

What survives a failure (snapshots, popularity, logs) is kept elsewhere and is handed the new wiring.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from megatron.moevement.operators import OperatorId
from megatron.moevement.optimizer.commit import norm_spans_job
from megatron.moevement.optimizer.views import operators_of
from megatron.moevement.restart.injection import InjectingTransport
from megatron.moevement.runtime import wind_down
from megatron.moevement.runtime.ranks import tell_all
from megatron.moevement.runtime.replay import Neighbour, Neighbours
from megatron.moevement.sparse_config import SparseConfig
from moevement_core.engine.layout import OperatorState
from moevement_core.operators import OperatorTable
from moevement_core.recovery.scope import Pipeline
from moevement_core.replication.placement import Copies, Placement, allowed_copies, place, sources_of
from moevement_core.replication.transport import GlooTransport, Transport
from moevement_core.snapshot.agreement import Agreement, Alone, GroupAgreement


@dataclass(frozen=True)
class _Rank:
    """What every rank tells all others."""

    stage: int
    node: str
    operators: list[Any]
    group: int
    """The smallest rank that holds the same state: data-parallel peers have the same."""
    peers: tuple[int, ...] | None
    """That have kept its copies until now; nothing on a rank that is new."""
    sources: tuple[int, ...]
    """Whose copies it has kept until now."""
    embedding_ranks: tuple[int, ...]
    """Those whose gradients of the embedding Megatron sums with this rank's; nobody where there is one copy."""
    norm_spans_job: bool


@dataclass(frozen=True, eq=False)
class Wiring:
    """Who this rank is, whom it talks to, and through what."""

    rank: int
    world: int
    stage: int
    stages: tuple[int, ...]
    """The pipeline stage of every rank."""
    nodes: tuple[str, ...]
    """The node of every rank."""
    table: OperatorTable
    """Of this rank's stage."""
    most_operators: int
    """Of any rank of the job."""
    peers: Placement
    warning: str | None
    """What an operator should know of where copies are kept."""
    job_group: Any
    """All ranks, for host tensors."""
    stage_group: Any
    """The ranks of this stage, for host tensors."""
    agreement: Agreement
    snapshots: Transport | None
    """For copies of snapshots; nothing without peers."""
    fetches: Transport | None
    """Of their own: senders and receivers go on using theirs."""
    feeds: Transport | None
    """For what a stage that replays alone is fed; nothing where there is one stage."""
    pipeline: Pipeline
    neighbours: Neighbours
    norm_spans_job: bool
    """Whether every rank contributes to every norm of a step, on every rank the same answer."""

    @property
    def sources(self) -> list[int]:
        """The ranks whose snapshots this one keeps."""
        return list(sources_of(self.peers, self.rank))

    @property
    def speaks_for_stage(self) -> bool:
        """Whether this is the first rank of its stage."""
        return self.rank == self.stages.index(self.stage)


def wire(
    config: SparseConfig,
    states: dict[OperatorId, OperatorState],
    optimizer: Any,
    before: Wiring | None = None,
    *,
    is_running: bool = False,
) -> Wiring:
    """Make it; every rank of the job calls it at the same point.

    Args:
        config: the flags.
        states: this rank's tensors by operator, of which the operators are told.
        optimizer: this rank's, of whose norms the group is asked.
        before: that of the last generation; nothing on a rank that is new.
        is_running: whether the job has begun, so that it goes on with the nodes that are left.
    """
    from megatron.core import parallel_state

    rank, world = dist.get_rank(), dist.get_world_size()
    told: list[_Rank] = tell_all(
        _Rank(
            parallel_state.get_pipeline_model_parallel_rank(),
            config.node_of(rank),
            operators_of(states),
            min(dist.get_process_group_ranks(parallel_state.get_data_parallel_group(with_context_parallel=True))),
            before.peers[rank] if before is not None else None,
            tuple(before.sources) if before is not None else (),
            _embedding_ranks(),
            norm_spans_job(optimizer, world),
        )
    )
    stages = tuple(one.stage for one in told)
    stage = stages[rank]
    nodes = tuple(one.node for one in told)
    copies = allowed_copies(nodes, config.replicas, same_node=config.same_node, is_running=is_running)
    pipeline, neighbours = _find_neighbours(rank, stages, tied_stages(stages, [one.embedding_ranks for one in told]))
    return Wiring(
        rank=rank,
        world=world,
        stage=stage,
        stages=stages,
        nodes=nodes,
        table=OperatorTable(ranks=[one.operators for one in told if one.stage == stage]),
        most_operators=max(len(one.operators) for one in told),
        peers=_place(config, told, copies),
        warning=copies.warning,
        job_group=dist.new_group(backend="gloo"),
        stage_group=_make_stage_groups(stages, stage),
        agreement=_agreement(world),
        snapshots=_for_snapshots(config, copies),
        fetches=GlooTransport() if world > 1 else None,
        feeds=GlooTransport() if pipeline.stages > 1 else None,
        pipeline=pipeline,
        neighbours=neighbours,
        norm_spans_job=all(one.norm_spans_job for one in told),
    )


def _agreement(world: int) -> Agreement:
    agreement: Agreement = GroupAgreement() if world > 1 else Alone()
    agreement.winding_down = wind_down.is_asked_for
    return agreement


def _for_snapshots(config: SparseConfig, copies: Copies) -> Transport | None:
    if not copies.replicas:
        return None
    transport = GlooTransport()
    return InjectingTransport(transport) if config.faults else transport


def _make_stage_groups(stages: tuple[int, ...], mine: int) -> Any:
    groups = {
        stage: dist.new_group([rank for rank, one in enumerate(stages) if one == stage], backend="gloo")
        for stage in sorted(set(stages))
    }
    return groups[mine]


def _place(config: SparseConfig, told: list[_Rank], copies: Copies) -> Placement:
    groups: dict[int, list[int]] = {}
    for rank, one in enumerate(told):
        groups.setdefault(one.group, []).append(rank)
    return place(
        [one.node for one in told], copies.replicas, config.placement, list(groups.values()),
        same_node=copies.same_node, before=_peers_before(told),
    )  # fmt: skip


def _peers_before(told: list[_Rank]) -> list[tuple[int, ...]]:
    """Of every rank; those of one that is new are known to its peers. Nothing if all are new."""
    if all(one.peers is None for one in told):
        return []
    return [
        one.peers if one.peers is not None else sources_of([other.sources for other in told], rank)
        for rank, one in enumerate(told)
    ]


def _embedding_ranks() -> tuple[int, ...]:
    """As Megatron finds them when it finalizes gradients: embeddings are copied where output layers are tied to them,
    and where tokens are predicted ahead.
    """
    from megatron.core import parallel_state
    from megatron.training import get_args

    args = get_args()
    groups = [parallel_state.get_position_embedding_group(check_initialized=False)]
    if not args.untie_embeddings_and_output_weights or args.mtp_num_layers:
        groups.append(parallel_state.get_embedding_group(check_initialized=False))
    ranks = {rank for group in groups if group is not None for rank in dist.get_process_group_ranks(group)}
    return tuple(sorted(ranks)) if len(ranks) > 1 else ()


def tied_stages(stages: Sequence[int], embedding_ranks: Sequence[Collection[int]]) -> frozenset[int]:
    """The stages that have copies of one embedding.

    Args:
        stages: the stage of every rank.
        embedding_ranks: of every rank, those whose gradients of the embedding are summed with its own.
    """
    tied = frozenset(stages[rank] for ranks in embedding_ranks for rank in ranks)
    return tied if len(tied) > 1 else frozenset()


def _find_neighbours(rank: int, stages: tuple[int, ...], tied: frozenset[int]) -> tuple[Pipeline, Neighbours]:
    from megatron.core import parallel_state
    from megatron.training import get_args

    args = get_args()
    ranks = dist.get_process_group_ranks(parallel_state.get_pipeline_model_parallel_group())
    is_ring = (args.virtual_pipeline_model_parallel_size or 1) > 1 and len(ranks) > 1
    pipeline = Pipeline(len(ranks), is_ring, tied)
    here = ranks.index(rank)

    def at(index: int) -> Neighbour | None:
        if not is_ring and not 0 <= index < len(ranks):
            return None
        other = ranks[index % len(ranks)]
        return Neighbour(other, stages[other]) if other != rank else None

    return pipeline, Neighbours(at(here - 1), at(here + 1))
