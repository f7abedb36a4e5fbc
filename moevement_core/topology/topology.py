"""Position of this rank in the job, and its channels to other ranks. Ranks compute both again in each generation.

A generation is the time between two failures. Other packages own the objects that survive a failure (snapshots, token
counts, logs), and use them with the new topology.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch.distributed as dist

from moevement_core.comms.address import own_address
from moevement_core.comms.codec import encode
from moevement_core.comms.connections import Address, Connections
from moevement_core.comms.exchange import all_gather_objects, broadcast_object
from moevement_core.comms.job_group import job_group
from moevement_core.comms.transport import Transport
from moevement_core.comms.tree import TreeGroup
from moevement_core.operators import OperatorKind, OperatorTable
from moevement_core.policy.holding import most_held
from moevement_core.recovery import flips
from moevement_core.recovery.feed import Neighbour, Neighbours
from moevement_core.recovery.scope import Pipeline
from moevement_core.rendezvous.status_page import is_asked_to_end
from moevement_core.replication.config import CopiesConfig
from moevement_core.replication.parity.groups import WIDEST, Groups, groups_still_fit, make_groups, narrowed
from moevement_core.replication.parity.staging import AT_ONCE
from moevement_core.replication.placement import (
    Copies,
    Placement,
    PlacementKind,
    all_sources,
    allowed_copies,
    place,
    sources_of,
)
from moevement_core.replication.protection import Parity
from moevement_core.restart.injection import InjectingTransport
from moevement_core.snapshot.agreement import Agreement, GroupAgreement, SingleRankAgreement
from moevement_core.topology.host_budget import AtPeer
from moevement_core.trainer.config import SessionConfig
from moevement_core.trainer.interface import BindingInterface, Place


@dataclass(frozen=True)
class _Rank:
    """Report that each rank sends to all other ranks when :func:`connect` makes the topology."""

    place: Place
    node: str
    operators: int
    """Number of operators of this rank."""
    peers: tuple[int, ...] | None
    """Peers that kept copies of this rank's snapshots in the last generation; None if the rank is new."""
    sources: tuple[int, ...]
    """Ranks whose snapshots this rank kept in the last generation."""
    groups: bytes | None
    """Digest of the parity groups of the job in the last generation; None if the rank is new."""
    address: Address
    """Address at which other ranks reach this rank."""


@dataclass(frozen=True, eq=False)
class Channels:
    """Channels of a rank to other ranks, in addition to the process groups of training."""

    job_group: TreeGroup
    """Group of all ranks, for waits of the main thread."""
    stage_group: TreeGroup
    """Group of the ranks of this stage."""
    agreement: Agreement
    snapshots: Transport | None
    """Channel for copies of snapshots; None without peers."""
    fetches: Transport | None
    """Channel over which recoveries fetch snapshots, as :attr:`snapshots` may be busy; None in a job of one rank."""
    messages: Transport | None
    """Channel for small messages between a rank and its peers; None without peers."""
    feeds: Transport | None
    """Channel over which stages send logged tensors to a stage that replays; None if there is only one stage."""

    def close(self) -> None:
        """End the threads that exchange values in the background; called when the generation is over."""
        self.agreement.close()
        self.stage_group.close()


@dataclass(frozen=True, eq=False)
class Topology:
    """Place of this rank in the job, the peers that protect its snapshots, and its channels to other ranks."""

    rank: int
    world: int
    stage: int
    stages: tuple[int, ...]
    """Pipeline stage of every rank."""
    nodes: tuple[str, ...]
    """Node of every rank."""
    table: OperatorTable
    """Operators of this rank's stage."""
    most_operators: int
    """Largest number of operators of any rank of the job."""
    most_experts: int
    """Largest number of experts of any layer of the job; 1 without experts."""
    peers: Placement
    """Peers of each rank, which keep copies of the rank's snapshots or the parity of the rank's group."""
    groups: Groups
    """Parity groups of ranks; empty if peers keep copies instead."""
    groups_are_new: bool
    """True if the groups differ from those of the last generation, so that no parity has been computed for them."""
    warning: str | None
    """Warning for users if copies or parity survive fewer failures than the flags ask for; None otherwise."""
    channels: Channels
    pipeline: Pipeline
    neighbours: Neighbours
    replica: int
    """Number of this rank's model replica: the smallest rank in the replica."""

    @property
    def sources(self) -> list[int]:
        """Ranks whose snapshots this rank keeps."""
        return list(sources_of(self.peers, self.rank))

    def kept_bytes(self, at_peer: Sequence[AtPeer]) -> list[int]:
        """Return the bytes that each rank needs for snapshots of other ranks, in time linear in the number of copies.

        Args:
            at_peer: host memory that snapshots of each rank take on each of its peers.
        """
        if not self.groups:
            return [
                sum(at_peer[source].nbytes for source in sources) for sources in all_sources(self.peers, len(at_peer))
            ]
        kept = [0] * len(at_peer)
        for group in self.groups:
            nbytes = _of_sums([at_peer[member] for member in group.members])
            nbytes += AT_ONCE * max(at_peer[member].staging for member in group.members)
            for holder in group.holders:
                kept[holder] += nbytes
        return kept

    def weaker(self) -> Iterator[tuple[str, Topology]]:
        """Yield protections that need less host memory than the protection of this topology, the strongest first.

        Each protection is a pair of the flag that asks for it, and the topology with it.
        """
        if self.groups:
            return
        copies, nodes = max(map(len, self.peers)), len(set(self.nodes))
        if copies and (members := min(nodes - copies, WIDEST)) > 1:
            groups = make_groups(self.nodes, members, copies)
            yield f"--moevement-protection parity:{members}+{copies}", replace(self, groups=groups)
        for fewer in range(copies - 1, -1, -1):
            yield f"--moevement-replicas {fewer}", replace(self, peers=[peers[:fewer] for peers in self.peers])

    def owners_of(self, stages: Collection[int]) -> frozenset[int]:
        """Return the ranks of ``stages``, and the ranks whose snapshots recompute theirs by parity."""
        ranks = frozenset(rank for rank, stage in enumerate(self.stages) if stage in stages)
        return ranks.union(*(group.members for group in self.groups if not ranks.isdisjoint(group.members)))

    @property
    def speaks_for_stage(self) -> bool:
        """True if this is the lowest rank of its stage, which logs for the whole stage."""
        return self.rank == self.stages.index(self.stage)


def connect(
    config: SessionConfig, binding: BindingInterface, before: Topology | None = None, *, is_running: bool = False
) -> Topology:
    """Return the topology of a generation. Collective: every rank of the job calls it at the same point.

    Args:
        config: flags of the job.
        binding: binding of this rank.
        before: topology of the last generation; None if this rank is new.
        is_running: True if the job has begun. It then continues with weaker protection if too few nodes are left.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    connections, operators = connections_of(config.copies), OperatorTable(binding.operators())
    ranks: list[_Rank] = all_gather_objects(
        _Rank(
            place=binding.place(),
            node=config.copies.node_of(rank),
            operators=len(operators),
            peers=before.peers[rank] if before is not None else None,
            sources=tuple(before.sources) if before is not None else (),
            groups=_digest(before.groups) if before is not None else None,
            address=connections.address,
        ),
        _Rank,
    )
    connections.open(rank, [other.address for other in ranks])
    places = [other.place for other in ranks]
    stages = tuple(other.stage for other in places)
    stage = stages[rank]
    nodes = tuple(other.node for other in ranks)
    groups_before = _groups_before(ranks, before)
    guard = _guard(config, ranks, groups_before, is_running=is_running)
    tied = tied_stages(stages, [other.embedding_ranks for other in places])
    pipeline, neighbours = _find_neighbours(rank, stages, places[rank], tied)
    channels = Channels(
        job_group=job_group(),
        stage_group=_make_stage_group(rank, stages, connections),
        agreement=_agreement(rank, world, connections),
        snapshots=_for_snapshots(config, guard, connections),
        fetches=flips.flipping_transport("fetches", connections.channel("fetches")) if world > 1 else None,
        messages=connections.channel("messages") if any(guard.peers) else None,
        feeds=flips.flipping_transport("feeds", connections.channel("feeds")) if pipeline.stages > 1 else None,
    )
    tables = all_gather_objects(operators, OperatorTable, channels.stage_group)
    table = OperatorTable.of_ranks(tables)
    return Topology(
        rank=rank,
        world=world,
        stage=stage,
        stages=stages,
        nodes=nodes,
        table=table,
        most_operators=max(other.operators for other in ranks),
        most_experts=max(all_gather_objects(_most_experts(table), int)),
        peers=guard.peers,
        groups=guard.groups,
        groups_are_new=_digest(guard.groups) not in {other.groups for other in ranks},
        warning=guard.warning,
        channels=channels,
        pipeline=pipeline,
        neighbours=neighbours,
        replica=places[rank].replica,
    )


def connections_of(copies: CopiesConfig) -> Connections:
    """Return the connections of this rank, with the interface and the number of streams that flags set.

    Raises:
        ConfigError: the interface has no address.
    """
    return Connections(own_address(copies.interfaces), copies.streams, is_source=bool(copies.interfaces))


def _most_experts(table: OperatorTable) -> int:
    experts = (name for name, kind in zip(table.names, table.kinds, strict=True) if kind is OperatorKind.EXPERT)
    return max(Counter(name.rpartition(".")[0] for name in experts).values(), default=1)


def _digest(groups: Groups) -> bytes:
    return hashlib.sha256(encode(groups)).digest()[:16]


def _groups_before(ranks: Sequence[_Rank], before: Topology | None) -> Groups:
    """Return the parity groups of the last generation; empty if there were none, or all ranks are new. Collective.

    Groups are sent only if a rank does not have them, and then by the first rank that does.
    """
    digests = [other.groups for other in ranks]
    known = next((rank for rank, digest in enumerate(digests) if digest is not None), None)
    if known is None or digests[known] == _digest(()):
        return ()
    own = before.groups if before is not None else ()
    if all(digest == digests[known] for digest in digests):
        return own
    groups: Groups = broadcast_object(own, Groups, source=known)
    return groups


def _agreement(rank: int, world: int, connections: Connections) -> Agreement:
    agreement: Agreement = SingleRankAgreement()
    if world > 1:
        agreement = GroupAgreement(TreeGroup(range(world), rank, connections.channel("agreement")))
    agreement.winding_down = is_asked_to_end
    return agreement


def _for_snapshots(config: SessionConfig, guard: _Guard, connections: Connections) -> Transport | None:
    if not any(guard.peers):
        return None
    transport = flips.flipping_transport("snapshots", connections.channel("snapshots", is_background=True))
    return InjectingTransport(transport) if config.drill.faults else transport


def _make_stage_group(rank: int, stages: tuple[int, ...], connections: Connections) -> TreeGroup:
    ranks = [other for other, stage in enumerate(stages) if stage == stages[rank]]
    return TreeGroup(ranks, rank, connections.channel("stage") if len(ranks) > 1 else None)


def _of_sums(members: Sequence[AtPeer]) -> int:
    """Return the bytes of a group's parity sums; each sum is as long as the longest snapshot of any member."""
    if len({(len(member.slots), member.count) for member in members}) > 1 or not members[0].slots:
        return max(member.nbytes for member in members)
    longest = np.array([member.slots for member in members]).max(axis=0)
    return max(most_held(longest[:, None], members[0].count), *(member.nbytes for member in members))


class _Guard(NamedTuple):
    """Ranks that protect each rank's snapshots: peers with copies, or peers with the parity of a group of ranks."""

    peers: Placement
    groups: Groups
    warning: str | None


def _guard(config: SessionConfig, ranks: list[_Rank], groups_before: Groups, *, is_running: bool) -> _Guard:
    nodes, same_node = [other.node for other in ranks], config.copies.same_node
    if (parity := config.copies.protection.parity) is not None:
        return _in_parity(parity, groups_before, nodes, same_node=same_node, is_running=is_running)
    copies = allowed_copies(nodes, config.copies.replicas, same_node=same_node, is_running=is_running)
    return _Guard(_place(config, ranks, copies), (), copies.warning)


def _in_parity(
    parity: Parity, before: Groups, nodes: Sequence[Hashable], *, same_node: bool, is_running: bool
) -> _Guard:
    members, blocks, warning = parity.members, parity.blocks, None
    if len(set(nodes)) == 1 or (same_node and len(set(nodes)) < members + blocks):
        nodes, warning = range(len(nodes)), f"{parity} counts ranks as nodes: a job survives lost processes, not nodes"
    if is_running and len(set(nodes)) < members + blocks:
        members, blocks = narrowed(nodes, members, blocks)
        warning = f"{parity} is reduced to parity:{members}+{blocks}, because {len(set(nodes))} nodes are left"
    if not blocks:
        return _Guard([()] * len(nodes), (), "only one node is left, so no other node keeps parity")
    groups = before if groups_still_fit(before, nodes, members, blocks) else make_groups(nodes, members, blocks)
    holders = {rank: group.holders for group in groups for rank in group.members}
    return _Guard([holders[rank] for rank in range(len(nodes))], groups, warning)


def _place(config: SessionConfig, ranks: list[_Rank], copies: Copies) -> Placement:
    groups: dict[int, list[int]] = {}
    for rank, other in enumerate(ranks):
        groups.setdefault(other.place.same_state, []).append(rank)
    kind = config.copies.placement or PlacementKind.SPREAD
    return place(
        [other.node for other in ranks], copies.replicas, kind, list(groups.values()),
        same_node=copies.same_node, before=_peers_before(ranks),
    )  # fmt: skip


def _peers_before(ranks: list[_Rank]) -> list[tuple[int, ...]]:
    """Return the peers of every rank in the last generation; an empty list if all ranks are new.

    A replacement does not know the peers of the failed rank, but each of these peers reports whose snapshots it kept.
    """
    if all(report.peers is None for report in ranks):
        return []
    kept_by = all_sources([report.sources for report in ranks], len(ranks))
    return [report.peers if report.peers is not None else kept_by[rank] for rank, report in enumerate(ranks)]


def tied_stages(stages: Sequence[int], embedding_ranks: Sequence[Collection[int]]) -> frozenset[int]:
    """Return the stages that hold copies of one embedding; empty if only one stage holds it.

    Args:
        stages: stage of every rank.
        embedding_ranks: for every rank, the ranks whose gradients of the embedding are summed with its own.
    """
    tied = frozenset(stages[rank] for ranks in embedding_ranks for rank in ranks)
    return tied if len(tied) > 1 else frozenset()


def _find_neighbours(
    rank: int, stages: tuple[int, ...], place: Place, tied: frozenset[int]
) -> tuple[Pipeline, Neighbours]:
    ranks = place.pipeline or (rank,)
    is_ring = place.is_ring and len(ranks) > 1
    pipeline = Pipeline(len(ranks), is_ring, tied)
    here = ranks.index(rank)

    def at(index: int) -> Neighbour | None:
        if not is_ring and not 0 <= index < len(ranks):
            return None
        other = ranks[index % len(ranks)]
        return Neighbour(other, stages[other]) if other != rank else None

    return pipeline, Neighbours(at(here - 1), at(here + 1))
