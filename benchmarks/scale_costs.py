"""Costs of the control of a job, computed from the product's own encodings. It writes docs/scale.md.

    python -m benchmarks.scale_costs

Each cost is a function of the number of ranks. A test fails if one of them grows faster than its class.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from benchmarks.papers.common import table
from benchmarks.scale_members import ON_NODE
from benchmarks.scale_planners import (
    EXPERTS_ON_RANK,
    REPLICAS,
    STAGES,
    WINDOW,
    contents_of_slot,
    nodes_of,
    stage_of,
    table_of,
)
from moevement_core.audit.verdict import Finding
from moevement_core.comms.codec import Plain
from moevement_core.comms.connections import Address
from moevement_core.comms.exchange import _encoded
from moevement_core.comms.tree import _HEADER, _PART, FAN_OUT, neighbours
from moevement_core.recovery.agree import RankStatus
from moevement_core.recovery.holdings import Holding, Source
from moevement_core.recovery.plan import Report
from moevement_core.rendezvous.lease_client import BEATS
from moevement_core.rendezvous.roster import ACKNOWLEDGED, LEFT, ROSTER, SHARD, Death, Roster
from moevement_core.rendezvous.values import OperationKind
from moevement_core.saving.stage_policy import _Summary
from moevement_core.simulator.regroup import depth
from moevement_core.snapshot.agreement import HORIZON
from moevement_core.topology.host_budget import Allowed, AtPeer, Needs
from moevement_core.topology.topology import _Rank
from moevement_core.trainer.interface import Place

OUTPUT = Path(__file__).parents[1] / "docs" / "scale.md"
SHOWN = (1024, 4096, 16_384)
LEASE_S = 10.0
MAC_CHARACTERS = 64
LAYERS_OF_STAGE = 4
EXPERTS = 124
"""Experts of a layer."""


class Growth(StrEnum):
    """Class of growth of a cost with the number of ranks N."""

    CONSTANT = "1"
    LOG = "log N"
    STAGE = "N / PP"
    LINEAR = "N"


@dataclass(frozen=True)
class Cost:
    """Cost of the control of a job: bytes or a number, as a function of the number of ranks."""

    when: str
    text: str
    growth: Growth
    of: Callable[[int], float]
    where: str
    """Function that has the cost."""
    is_bytes: bool = True


def _size(value: Any) -> int:
    return len(_encoded(value))


def _from_all(values: Sequence[int], count: int) -> int:
    """Return the bytes that a rank receives in a gather, if ``count`` ranks send values of these sizes in turn."""
    mean = sum(values) / len(values)
    return round(_HEADER.size + count * (_PART.size + mean))


def _address() -> Address:
    return Address("10.10.10.10", 54321, bytes(16))


def _place(rank: int, ranks: int) -> Place:
    in_stage = ranks // STAGES
    pipeline = tuple(rank % in_stage + stage * in_stage for stage in range(STAGES))
    return Place(stage_of(rank, ranks), rank % in_stage, rank % ON_NODE, pipeline)


def _entry(rank: int, ranks: int) -> int:
    peers = tuple((rank + ON_NODE * (1 + copy)) % ranks for copy in range(REPLICAS))
    place = _place(rank, ranks)
    return _size(_Rank(place, nodes_of(ranks)[rank], EXPERTS_ON_RANK, peers, peers, bytes(16), _address()))


def _some(ranks: int) -> list[int]:
    return [ranks * step // 8 for step in range(8)]


def _topology(ranks: int) -> float:
    return _from_all([_entry(rank, ranks) for rank in _some(ranks)], ranks)


def _operators(ranks: int) -> float:
    return _from_all([_size(table_of(rank)) for rank in range(8)], ranks // STAGES)


def _links(ranks: int) -> float:
    parent, children = neighbours(1, ranks)
    of_tree = 2 * (len(children) + (parent is not None))
    return 3 * of_tree + 2 * 2 * REPLICAS


def _hops(ranks: int) -> float:
    return 2 * depth(ranks)


def _agreement(_: int) -> float:
    return (FAN_OUT + 1) * (_HEADER.size + HORIZON + 2)


def _beats(ranks: int) -> float:
    alive = {str(member): 100_000 for member in range(ON_NODE)}
    message = {
        "beat": 1000, "supervisor": "node100", "members": list(range(ON_NODE)), "alive": alive, "lease_s": LEASE_S,
        "started_by": "node100/1",
    }  # fmt: skip
    return (len(json.dumps(message)) + MAC_CHARACTERS + 1) * BEATS / LEASE_S * ranks / ON_NODE


def _vote(_: int) -> float:
    return FAN_OUT + 1


def _asks(*asks: tuple[str, str, str | None]) -> int:
    """Return the bytes of a line with requests on values, and of the answer."""
    numbered = [(number, *ask) for number, ask in enumerate(asks, 1000)]
    answers = [(number, None) for number, _ in enumerate(asks, 1000)]
    return len(json.dumps({"asks": numbered}) + json.dumps({"answers": answers})) + 2 * (MAC_CHARACTERS + 1)


def _reported(ranks: int) -> float:
    """Return the bytes on the connections of all nodes when each rank leaves and acknowledges a roster."""
    left = {"reason": "", "committed": 1000, "at": 1.7e9, "had_recovered": True, "suspects": []}
    reports = [("report", f"{LEFT.format(3)}/1000", json.dumps(left)), ("report", f"{ACKNOWLEDGED.format(3)}/1000", "")]
    return ranks * sum(_asks(report) for report in reports)


def _counts(_: int) -> float:
    return (FAN_OUT + 1) * (_HEADER.size + 8 * WINDOW * LAYERS_OF_STAGE * EXPERTS)


def _needs(ranks: int) -> float:
    at_peer = AtPeer(10**9, (10**8,) * WINDOW, 2 * WINDOW, 10**6)
    needs = [Needs(10**9, 10**9, at_peer, 10**8, Allowed(6e10, "60% of 512 GB for 8 ranks"))]
    return _from_all([_size(needs)], ranks)


def _roster(ranks: int) -> Roster:
    nodes = nodes_of(ranks)
    return Roster(
        3, {rank: rank for rank in range(ranks)}, (Death(1, 1, 1000, "was killed by signal 9", 1.7e9),),
        nodes=dict(enumerate(nodes)), devices={rank: rank % ON_NODE for rank in range(ranks)}, world=ranks,
        placement="0" * 16,
    )  # fmt: skip


def _roster_of_node(ranks: int) -> float:
    head, shards = _roster(ranks).divided()
    changes = [{"changes": [(ROSTER, head.encode())]}, {"changes": [(SHARD.format(0), shards[0].encode())]}]
    return sum(len(json.dumps(change)) + MAC_CHARACTERS + 1 for change in changes)


def _roster_of_all(ranks: int) -> float:
    return ranks / ON_NODE * _roster_of_node(ranks)


def _mirrored(ranks: int) -> float:
    """Return the bytes that the standby receives: the roster, its shards, and two reports of each rank."""
    head, shards = _roster(ranks).divided()
    left = {"reason": "", "committed": 1000, "at": 1.7e9, "had_recovered": True, "suspects": []}
    operations = [(OperationKind.SET, ROSTER, head.encode())]
    operations += [(OperationKind.SET, SHARD.format(number), shard.encode()) for number, shard in shards.items()]
    reports = [
        (OperationKind.REPORT, f"{LEFT.format(3)}/1000", json.dumps(left)),
        (OperationKind.REPORT, f"{ACKNOWLEDGED.format(3)}/1000", ""),
    ]
    return len(json.dumps(operations)) + ranks * len(json.dumps(reports))


def _statuses(ranks: int) -> float:
    return _from_all(
        [_size(RankStatus(1, rank, was_training=True, committed=1000, has_begun_next=True)) for rank in _some(ranks)],
        ranks,
    )


def _summaries(ranks: int) -> float:
    return _from_all([_size(_Summary(stage, 1000, bytes(16))) for stage in range(STAGES)], ranks)


def _kept(_: int) -> float:
    return REPLICAS * _size({iteration: "a" * 16 for iteration in range(1000, 1000 + 2 * WINDOW)})


def _report(rank: int, ranks: int, owners: Sequence[tuple[int, Source]]) -> int:
    holdings = tuple(
        Holding(owner, iteration, iteration, "a" * 16, contents_of_slot(iteration % WINDOW), source)
        for owner, source in owners
        for iteration in range(1000, 1000 + 2 * WINDOW)
    )
    iterations = tuple(range(1000, 1000 + 2 * WINDOW))
    return _size(Report(rank, stage_of(rank, ranks), holdings, iterations, iterations, arithmetic="a" * 200))


def _reports(ranks: int) -> float:
    """Return the bytes that a rank receives: all ranks report, and those of the lost stage or with its copies more."""
    in_stage = ranks // STAGES
    with_holdings = _report(0, ranks, [(0, Source.MEMORY), (ON_NODE, Source.PEER), (2 * ON_NODE, Source.PEER)])
    return _from_all([with_holdings], in_stage) + _from_all([_report(ranks - 1, ranks, [])], ranks - in_stage)


def _outcomes(ranks: int) -> float:
    outcome = {iteration: {"step": {"norm": 1.25, "is_skipped": False}} for iteration in range(2 * WINDOW)}
    return _from_all([_size(Plain(outcome))], ranks // STAGES) + _from_all([_size(Plain({}))], ranks)


def _open_files(ranks: int) -> float:
    return ranks + ranks / ON_NODE


def _findings(ranks: int) -> int:
    return ranks * (_size(Finding(stage=3, clean_at=123_456)) + _PART.size)


COSTS = (
    Cost("start", "the store holds addresses of ranks", Growth.LINEAR, lambda n: n * _size(_address()), "comms/job_group.py: job_group"),
    Cost("start, failure", "a rank receives the entries of all ranks", Growth.LINEAR, _topology, "topology/topology.py: connect"),
    Cost("start, failure", "a rank receives the operators of its stage", Growth.STAGE, _operators, "topology/topology.py: connect"),
    Cost("start, failure", "open connections of a rank to ranks", Growth.CONSTANT, _links, "comms/tree.py, replication/", is_bytes=False),
    Cost("always", "steps of a collective, one after the other", Growth.LOG, _hops, "comms/tree.py: TreeGroup", is_bytes=False),
    Cost("always", "open files of the coordinator and the store", Growth.LINEAR, _open_files, "launching/limits.py", is_bytes=False),
    Cost("always, a second", "the coordinator receives renewals of leases", Growth.LINEAR, _beats, "rendezvous/lease_client.py: step"),
    Cost("iteration", "messages of a rank in the vote before an update", Growth.CONSTANT, _vote, "restart/generation.py: vote", is_bytes=False),
    Cost("iteration", "questions of all ranks to the coordinator", Growth.CONSTANT, lambda n: 1, "restart/generation.py: vote", is_bytes=False),
    Cost("iteration", "a rank sends to agree on windows", Growth.CONSTANT, _agreement, "snapshot/agreement.py: propose"),
    Cost("window", "a rank sends counts of tokens", Growth.CONSTANT, _counts, "saving/windows.py: _observe"),
    Cost("audit", "rank 0 receives the findings of all ranks", Growth.LINEAR, _findings, "session/auditor.py: _decide"),
    Cost("decision", "a rank receives the memory that all ranks need", Growth.LINEAR, _needs, "saving/windows.py: _needed"),
    Cost("failure", "reports of ranks to the coordinator", Growth.LINEAR, _reported, "rendezvous/member.py: leave"),
    Cost("failure", "the coordinator sends each node its roster", Growth.LINEAR, _roster_of_all, "rendezvous/coordinator.py: _propose"),
    Cost("failure", "the standby receives what changes", Growth.LINEAR, _mirrored, "rendezvous/mirror.py: Mirror"),
    Cost("failure", "a node receives its part of the roster", Growth.LINEAR, _roster_of_node, "rendezvous/relay.py: Relay"),
    Cost("failure", "a rank receives the statuses of all ranks", Growth.LINEAR, _statuses, "session/meeting.py: meet"),
    Cost("failure", "a rank receives digests of policies", Growth.LINEAR, _summaries, "saving/stage_policy.py: share_policy"),
    Cost("failure", "a rank sends to owners which copies it has", Growth.CONSTANT, _kept, "saving/peers.py: ask_peers"),
    Cost("failure", "a rank receives reports on the lost stage", Growth.LINEAR, _reports, "rebuild/prepare.py: prepare"),
    Cost("failure", "a rank receives outcomes of steps", Growth.LINEAR, _outcomes, "rebuild/prepare.py: prepare"),
)  # fmt: skip
"""Costs of the control of a job. Their growth is the most that the test accepts."""


def main() -> None:
    """Write the page of costs."""
    OUTPUT.write_text(report(), encoding="utf-8")


def _shown(cost: Cost, ranks: int) -> str:
    value = cost.of(ranks)
    if not cost.is_bytes:
        return f"{value:,.0f}"
    for unit, size in (("MB", 1e6), ("KB", 1e3)):
        if value >= size:
            return f"{value / size:,.1f} {unit}"
    return f"{value:.0f} B"


def report() -> str:
    """Return the text of the page."""
    header = ["when", "what", "grows with", *(f"{ranks:,} ranks" for ranks in SHOWN), "where"]
    rows = [
        [cost.when, cost.text, cost.growth, *(_shown(cost, ranks) for ranks in SHOWN), f"`{cost.where}`"]
        for cost in COSTS
    ]
    return f"""# Costs by the number of ranks

This page is for people who want to run, or to change, jobs of thousands of ranks. It says what control costs a rank, a node and the
coordinator: what they send, store and open, beside training itself. `python -m benchmarks.scale_costs` writes this page.

## Rules

Code that runs while a job trains or recovers keeps these rules. `tests/unit/benchmarks/test_scale.py` fails if a cost below, or the time of a
function that computes over all ranks, grows faster than its class.

- In an iteration, a rank sends O(1) messages, in O(log N) steps.
- In a recovery, the coordinator does O(N) work, and a rank receives O(N) small entries. What is large (operators, snapshots) a rank
  receives only for a stage.
- No rank has work that grows with N * N, nothing is gathered on the GPU, and a generation's reports are deleted two generations later.
  Only what a process says of itself when it joins stays, and the record of its death: 600 bytes of each process, in the coordinator.

## How processes reach the coordinator

A node has one connection to the coordinator, that of its supervisor (`rendezvous/lease_client.py`). It carries leases, deaths, and the
*values* that processes share (`rendezvous/values.py`): the roster, interruptions, the end of the job. Processes reach their supervisor
over a Unix socket. Its *relay* (`rendezvous/relay.py`) merges their requests, asks once for a value that all of them watch, and passes
each change on. So a rank waits for an answer of the coordinator only when it reports something. Once in each iteration, before the update,
one rank asks it for all ranks, and they wait for that answer ([commit_point.md](commit_point.md)).

## How ranks exchange values

All ranks form a tree (`comms/tree.py`). A rank has at most {FAN_OUT} ranks below it and one above it, each over TCP in both directions. In a
reduction, a rank combines the values from below with its own, and sends one value up; the root sends the result down. So all ranks have
the same bits. In a gather, all values go up to the root, and their list goes down. A message has the number and the kind of its collective,
so ranks that call different collectives get an error. The ranks of a stage have a tree of their own, and so has the agreement of each
iteration, whose thread waits in the background.

A tree is made anew in each generation. A rank writes its address into the store of torch's default group, and reads the addresses of its
neighbours. If a rank is lost, the abort shuts down the connections of the others, which ends their waits.

## The costs

Computed from the product's own encodings, for nodes of {ON_NODE} ranks, {STAGES} pipeline stages, {EXPERTS_ON_RANK} operators of each rank, {REPLICAS} copies and windows of
{WINDOW} snapshots. Values of over 1 KB are compressed before a rank sends them.

{table(header, rows)}

What the coordinator and the planners take in seconds is measured: [benchmarks/scale.md](../benchmarks/scale.md), and with real
ranks, [benchmarks/regroup.md](../benchmarks/regroup.md).

## What is still too much

- With FP8 weights, each rank asks the coordinator once in an iteration whether its generation is interrupted. A relay merges the questions
  of a node that arrive together.
- Each rank has a connection to the store of torch's process groups, in the coordinator's process. `torch.distributed` makes its own groups
  over this store, and Megatron one for every group of the job ([benchmarks/regroup.md](../benchmarks/regroup.md)).
- The coordinator starts one command (`srun`) for each node, from the first node ([slurm.md](slurm.md)). With thousands of nodes, let a
  command that each node runs itself start the tasks, such as one `srun` for all nodes.
"""


if __name__ == "__main__":
    main()
