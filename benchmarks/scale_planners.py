"""Functions that compute over all ranks of a job, with arguments for any number of ranks.

The benchmark ``scale`` times them, and a test fails if one of them takes more than linear time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from types import MappingProxyType

from benchmarks.scale_members import ON_NODE
from moevement_core.comms.exchange import _decoded, _encoded
from moevement_core.operators import Operator, OperatorKind, OperatorTable, StateBytes, expert_name
from moevement_core.policy.schedule import Saved
from moevement_core.recovery.agree import RankStatus, decide, peers_of_followers
from moevement_core.recovery.holdings import Holding, Source
from moevement_core.recovery.plan import Report, plan_recovery
from moevement_core.rendezvous.devices import assign_devices
from moevement_core.rendezvous.roster import MemberInfo, Roster
from moevement_core.rendezvous.takeover import take_over
from moevement_core.replication.parity.groups import groups_still_fit, make_groups
from moevement_core.replication.placement import PlacementKind, all_sources, place
from moevement_core.saving.stage_policy import _Summary, chosen_policies
from moevement_core.topology.host_budget import Allowed, AtPeer, Needs, totals

STAGES = 16
OPERATORS = 500
"""Operators of a stage: four layers of 124 experts, and the rest of the layers."""
EXPERTS_ON_RANK = 8
WINDOW = 5
REPLICAS = 2

Prepared = Callable[[int], Callable[[], object]]
"""Function that makes the arguments for a number of ranks, and returns the call without arguments."""


def nodes_of(ranks: int) -> list[str]:
    """Return the node of each rank."""
    return [f"node{rank // ON_NODE}" for rank in range(ranks)]


def stage_of(rank: int, ranks: int) -> int:
    """Return the pipeline stage of a rank."""
    return rank * STAGES // ranks


def _placement(ranks: int) -> Callable[[], object]:
    nodes, groups = nodes_of(ranks), [list(range(first, ranks, ranks // STAGES)) for first in range(ranks // STAGES)]
    before = place(nodes, REPLICAS, PlacementKind.SPREAD, groups)
    nodes[:ON_NODE] = ["spare"] * ON_NODE
    before[:ON_NODE] = [()] * ON_NODE
    return partial(place, nodes, REPLICAS, PlacementKind.SPREAD, groups, before=before)


def _totals(ranks: int) -> Callable[[], object]:
    at_peer = AtPeer(10, (1,) * WINDOW, 2 * WINDOW, 1)
    needs = [Needs(10, 5, at_peer, 1, Allowed(100.0, "a flag")) for _ in range(ranks)]
    peers = place(nodes_of(ranks), REPLICAS, PlacementKind.SPREAD, [])

    def kept(snapshots: object) -> list[int]:
        return [sum(at_peer.nbytes for _ in sources) for sources in all_sources(peers, ranks)]

    return partial(totals, needs, kept, keeps_own_copies=True)


def _parity(ranks: int) -> Callable[[], object]:
    return partial(make_groups, nodes_of(ranks), 4, 1)


def _parity_kept(ranks: int) -> Callable[[], object]:
    nodes = nodes_of(ranks)
    return partial(groups_still_fit, make_groups(nodes, 4, 1), nodes, 4, 1)


@cache
def table_of(rank: int) -> OperatorTable:
    """Return the operators of a rank."""
    first = rank * EXPERTS_ON_RANK % OPERATORS
    experts = [(first + index) % OPERATORS for index in range(EXPERTS_ON_RANK)]
    return OperatorTable(
        Operator(expert_name(0, expert), OperatorKind.EXPERT, StateBytes(2, 4, 8)) for expert in experts
    )


def _operators(ranks: int) -> Callable[[], object]:
    return partial(OperatorTable.of_ranks, [table_of(rank % OPERATORS) for rank in range(ranks // STAGES)])


def _statuses(ranks: int) -> list[RankStatus]:
    statuses = [
        RankStatus(stage_of(rank, ranks), rank % (ranks // STAGES), was_training=True, committed=7 + rank % 2)
        for rank in range(ranks)
    ]
    statuses[0] = RankStatus(0, 0)
    return statuses


def _resume_point(ranks: int) -> Callable[[], object]:
    statuses = _statuses(ranks)
    return lambda: peers_of_followers(statuses, decide(statuses))


def _policies(ranks: int) -> Callable[[], object]:
    summaries = [_Summary(stage_of(rank, ranks), 6, b"digest" if rank else b"") for rank in range(ranks)]
    return partial(chosen_policies, summaries)


def _plan(ranks: int) -> Callable[[], object]:
    """Return the plan for stage 0: each rank has a copy of the snapshots of another rank, and those have its own."""
    in_stage = ranks // STAGES
    reports = []
    for rank in range(ranks):
        owners = [(rank, Source.MEMORY), ((rank + ON_NODE) % in_stage, Source.PEER)] if rank < in_stage else []
        holdings = tuple(
            Holding(owner, iteration, iteration, "schedule", contents_of_slot(iteration % WINDOW), source)
            for owner, source in owners
            for iteration in range(2 * WINDOW)
        )
        reports.append(Report(rank, stage_of(rank, ranks), holdings))
    return partial(plan_recovery, reports, 2 * WINDOW, [0])


@cache
def contents_of_slot(slot: int) -> str:
    """Return the contents of a snapshot whose slot has the full state of a share of the operators."""
    first = slot * OPERATORS // WINDOW
    full = range(first, (slot + 1) * OPERATORS // WINDOW)
    return "".join(str(int(Saved.FULL if index in full else Saved.COMPUTE)) for index in range(OPERATORS))


def _members(ranks: int) -> dict[int, MemberInfo]:
    return {rank: MemberInfo(rank, rank, "host", node) for rank, node in enumerate(nodes_of(ranks))}


def _takeover(ranks: int) -> Callable[[], object]:
    nodes = dict(enumerate(nodes_of(ranks)))
    lost = range(ON_NODE)
    waiting = [MemberInfo(ranks + index, index, "host", "spare") for index in range(ON_NODE)]
    kept = {rank: node for rank, node in nodes.items() if rank not in lost}
    return partial(take_over, lost, kept, nodes, waiting, ON_NODE)


def _devices(ranks: int) -> Callable[[], object]:
    return partial(assign_devices, _members(ranks), {rank: rank % ON_NODE for rank in range(ON_NODE, ranks)})


def _roster(ranks: int) -> Callable[[], object]:
    everything = Roster(
        1, {rank: rank for rank in range(ranks)}, nodes=dict(enumerate(nodes_of(ranks))),
        devices={rank: rank % ON_NODE for rank in range(ranks)}, world=ranks,
    )  # fmt: skip

    def encoded() -> list[str]:
        head, shards = everything.divided()
        return [head.encode(), *(shard.encode() for shard in shards.values())]

    return encoded


def _exchange(ranks: int) -> Callable[[], object]:
    sent = [_encoded(status) for status in _statuses(ranks)]
    return lambda: [_decoded(data, RankStatus, rank) for rank, data in enumerate(sent)]


PLANNERS: Mapping[str, Prepared] = MappingProxyType(
    {
        "window: memory of all ranks (`totals`)": _totals,
        "start and recovery: copies (`place`)": _placement,
        "start: parity groups (`make_groups`)": _parity,
        "recovery: parity groups (`groups_still_fit`)": _parity_kept,
        "start and recovery: operators of a stage (`OperatorTable.of_ranks`)": _operators,
        "recovery: statuses of all ranks (`all_gather_objects`)": _exchange,
        "recovery: resume point (`decide`)": _resume_point,
        "recovery: policies to send (`chosen_policies`)": _policies,
        "recovery: plan of a stage (`plan_recovery`)": _plan,
        "recovery, coordinator: spares (`take_over`)": _takeover,
        "recovery, coordinator: devices (`assign_devices`)": _devices,
        "recovery, coordinator: roster (`Roster.divided`)": _roster,
    }
)
"""Functions that compute over all ranks, by the text that the page has for them."""
