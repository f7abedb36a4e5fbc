"""Simulation of a training whose nodes come and go: with elastic experts, with regrouped experts, or with restarts.

The simulation compares three systems, as section 6 of the paper on Lazarus (a system for elastic MoE training) does:

- ``lazarus``: Lazarus itself. The number of an expert's replicas follows its load.
- ``restart``: DeepSpeed's expert parallelism, which restarts from a checkpoint whenever nodes leave or join.
- ``regroup``: DeepSpeed's expert parallelism, but like Lazarus the job forms new process groups instead of restarting
  (DS(FT) in the paper).

The code of a live elastic job (:mod:`moevement_core.elastic`) allocates, places and migrates experts. The loads of
experts are recorded ones.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from moevement_core.elastic.allocation import allocate
from moevement_core.elastic.migration import assign_places, migrate
from moevement_core.elastic.placement import experts_lost, place, slowest_node
from moevement_core.simulator.availability import Change

Tokens = npt.NDArray[np.int64]


class System(StrEnum):
    """Training systems to simulate on nodes that come and go."""

    LAZARUS = "lazarus"
    REGROUP = "regroup"
    RESTART = "restart"


@dataclass(frozen=True, slots=True)
class ElasticJob:
    """Job that trains on nodes that come and go, with the seconds that its operations take.

    Attributes:
        experts: number of experts of each layer, E.
        slots: expert slots of each node, c.
        floor: smallest number of replicas of each expert, f.
        iteration_s: seconds of an iteration on ``nodes`` nodes with equal loads.
        nodes: number of nodes of the whole cluster.
        expert_share: share of an iteration that experts take. In this share all nodes wait for the most loaded node.
        expert_bytes: bytes of state of an expert of one layer.
        bytes_per_s: bytes per second of a node's network.
        regroup_s: seconds until new process groups are ready.
        restart_s: seconds until a restarted job trains again.
        checkpoint_every: iterations between two checkpoints in storage; infinity for a job that saves none.
        checkpoint_s: seconds by which a checkpoint delays training.
        wait_s: seconds that the first new node waits until the job adds it and all nodes that became ready meanwhile.
        rebalance_every: iterations after which Lazarus allocates and places experts anew by the newest loads.
        is_batch_per_node: True if every node has its own batch, as in Lazarus. With fewer nodes, an iteration then has
            fewer samples and takes the same time. False if the job has one batch of constant size. With fewer nodes,
            an iteration then takes proportionally longer.
    """

    experts: int
    slots: int
    floor: int
    iteration_s: float
    nodes: int
    expert_share: float = 0.5
    expert_bytes: float = 63e6
    bytes_per_s: float = 12.5e9
    regroup_s: float = 25.0
    restart_s: float = 120.0
    checkpoint_every: float = 250
    checkpoint_s: float = 20.0
    wait_s: float = 120.0
    rebalance_every: int = 200
    is_batch_per_node: bool = False

    def usable(self, nodes: int, system: System) -> int:
        """Return how many of ``nodes`` live nodes the job can use; the others stay idle.

        DeepSpeed's expert parallelism uses a multiple of :attr:`group` nodes.
        """
        if system is System.LAZARUS:
            return nodes if nodes * self.slots >= self.experts else 0
        return nodes // self.group * self.group

    def slots_used(self, system: System) -> int:
        """Return the number of expert slots that the job uses on a node.

        DeepSpeed's expert parallelism uses one slot for each expert of the node.
        """
        return self.slots if system is System.LAZARUS else self.experts // self.group

    @property
    def group(self) -> int:
        """Smallest number of nodes that can hold every expert once, with equally many experts on each node."""
        least = math.ceil(self.experts / self.slots)
        return next(size for size in range(least, self.experts + 1) if self.experts % size == 0)


@dataclass
class TrainedElastically:
    """Result of a simulated elastic training."""

    iterations: float = 0.0
    """Number of committed iterations."""
    batches: float = 0.0
    """Number of committed samples, divided by the samples of an iteration on all nodes of the cluster."""
    changes: int = 0
    fallbacks: int = 0
    """Number of times that the job lost nodes and went back to a checkpoint.

    The reason is that an expert had no replica left, or that the system always restarts.
    """
    moved: int = 0
    """Number of experts that nodes fetched from other nodes. An expert counts once for each layer and each fetch."""
    lost_s: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(("regroup", "migrate", "restart", "checkpoint"), 0.0)
    )


class ElasticTraining:
    """Simulation of one system on nodes that come and go.

    Lazarus chooses the number of replicas of each expert by the loads of the expert's layer; the other systems treat
    loads as equal. A placement says for node number 0, 1, ... which experts it holds. A node has the same number in all
    layers.

    Args:
        job: job to simulate.
        system: system that trains the job.
        loads: tokens routed to each expert in an iteration, ``[records, layers, E]``. After the last record, its loads
            stay constant.
        every: iterations between two records.
        first: names of the nodes at the beginning.
    """

    def __init__(self, job: ElasticJob, system: System, loads: Tokens, every: int, first: Sequence[str]) -> None:
        self.job, self.system, self.there = job, system, set(first)
        self.done = TrainedElastically()
        self._loads, self._every = loads, every
        self._since_checkpoint = self._batches_since_checkpoint = 0.0
        self._slowest: dict[int, float] = {}
        """Tokens of the most loaded node, divided by the mean over nodes, in the present placement. The key is the
        index of the record of loads."""
        self._placed_for = -1
        """Index of the record of loads from which the present placement was computed."""
        self._members: list[str] = []
        self._layers: list[Mapping[str, tuple[int, ...]]] = [{} for _ in range(loads.shape[1])]
        self._settle()

    def run(self, changes: Sequence[Change], until_s: float) -> TrainedElastically:
        """Simulate the first ``until_s`` seconds of the training, and return the result.

        Args:
            changes: nodes that join and leave, in order of time.
            until_s: wall seconds of the training.
        """
        now_s = 0.0
        for change in _gathered(changes, self.job.wait_s):
            if change.at_s >= until_s:
                break
            self._train(change.at_s - now_s)
            # A change during the recovery from an earlier change takes effect after that recovery.
            now_s = max(now_s, change.at_s) + self._change(change)
        self._train(until_s - now_s)
        return self.done

    def _train(self, seconds: float) -> None:
        """Train for ``seconds``. Checkpoints and migrations of experts that fall due in this time take a part of it."""
        job, done = self.job, self.done
        while seconds > 0.0 and self._members:
            rebalances = self.system is System.LAZARUS
            to_rebalance = job.rebalance_every - done.iterations % job.rebalance_every if rebalances else math.inf
            span = min(job.checkpoint_every - self._since_checkpoint, to_rebalance, self._every)
            trained = min(span, seconds / self._iteration_s())
            seconds -= trained * self._iteration_s()
            batches = trained * (len(self._members) / job.nodes if job.is_batch_per_node else 1.0)
            done.iterations += trained
            done.batches += batches
            self._since_checkpoint += trained
            self._batches_since_checkpoint += batches
            if trained < span:
                return
            if self._since_checkpoint >= job.checkpoint_every - 1e-9:
                self._forget_uncommitted()
                seconds -= self._spend("checkpoint", job.checkpoint_s)
            if rebalances and to_rebalance <= span + 1e-9:
                done.iterations = float(round(done.iterations))
                if self._record() != self._placed_for:  # the same loads would give the same placement
                    seconds -= self._spend("migrate", self._settle())

    def _change(self, change: Change) -> float:
        """Add and remove nodes, and return the seconds until training continues."""
        left = change.removed & set(self._members)
        self.there = (self.there | change.added) - change.removed
        # If no node is new, a job of ``regroup`` takes no live node that it did not use before (Lazarus, section 6.2).
        takes_unused = self.system is not System.REGROUP or bool(change.added)
        candidates = self.there if takes_unused else self.there & set(self._members)
        if not left and self.job.usable(len(candidates), self.system) == len(self._members):
            return 0.0
        self.done.changes += 1
        is_kept = all(self._layers) and not any(self._lost(layer, left) for layer in self._layers)
        if self.system is not System.RESTART and is_kept:
            return self._spend("regroup", self.job.regroup_s) + self._spend("migrate", self._settle(candidates))
        if left:  # if no node was lost, the job saves a checkpoint before it adds nodes
            self.done.fallbacks += 1
            self.done.iterations -= self._since_checkpoint
            self.done.batches -= self._batches_since_checkpoint
        self._forget_uncommitted()
        self._layers = [{} for _ in self._layers]
        self._settle()
        return self._spend("restart", self.job.restart_s) if self._members else 0.0

    def _lost(self, layer: Mapping[str, tuple[int, ...]], left: Collection[str]) -> bool:
        """Return True if an expert of a layer had replicas only on nodes that left."""
        names = sorted(layer)
        return bool(experts_lost([layer[name] for name in names], [names.index(name) for name in left]))

    def _forget_uncommitted(self) -> None:
        """Reset the counts of iterations and batches since the newest checkpoint, which a restart would lose."""
        self._since_checkpoint = self._batches_since_checkpoint = 0.0

    def _settle(self, candidates: Collection[str] | None = None) -> float:
        """Allocate, place and migrate experts, and return the seconds that the migration takes.

        Args:
            candidates: nodes that the job may use. None: all live nodes.
        """
        job = self.job
        there = self.there if candidates is None else set(candidates)
        stay = [node for node in self._members if node in there]
        every = stay + sorted(there - set(stay))
        self._slowest.clear()
        self._placed_for = self._record()
        self._members = sorted(every[: job.usable(len(every), self.system)])
        if not self._members:  # the job saves a checkpoint, and waits for nodes
            self._layers = [{} for _ in self._layers]
            self._forget_uncommitted()
            return 0.0
        node_slots = [job.slots_used(self.system)] * len(self._members)
        loads = self._loads[self._record()] if self.system is System.LAZARUS else np.ones_like(self._loads[0])
        wanted = [place(allocate(tokens, sum(node_slots), job.floor), node_slots, job.floor) for tokens in loads]
        held = [{node: layer.get(name, ()) for node, name in enumerate(self._members)} for layer in self._layers]
        places = assign_places(held, wanted)
        sends = np.zeros(len(self._members), dtype=np.int64)
        for number, layer in enumerate(self._layers):
            migration = migrate(held[number], wanted[number], places)
            self._layers[number] = {self._members[node]: experts for node, experts in migration.experts.items()}
            if layer:  # otherwise state comes from storage
                self.done.moved += len(migration.transfers)
                sends += np.bincount([transfer.source for transfer in migration.transfers], minlength=len(sends))
        return int(sends.max()) * job.expert_bytes / job.bytes_per_s

    def _iteration_s(self) -> float:
        """Return the seconds of an iteration, in which all nodes wait for the most loaded one, layer by layer."""
        job, record = self.job, self._record()
        if record not in self._slowest:
            pairs = zip(self._loads[record], self._layers, strict=True)
            self._slowest[record] = float(np.mean([slowest_node(tokens, list(row.values())) for tokens, row in pairs]))
        even_s = job.iteration_s * (1.0 if job.is_batch_per_node else job.nodes / len(self._members))
        return even_s * (1.0 - job.expert_share + job.expert_share * self._slowest[record])

    def _record(self) -> int:
        """Return the index of the record of loads that holds in the present iteration."""
        return min(int(self.done.iterations) // self._every, len(self._loads) - 1)

    def _spend(self, what: str, seconds: float) -> float:
        self.done.lost_s[what] += seconds
        return seconds


def most_loaded(tokens: Tokens, experts: int) -> Tokens:
    """Return the loads of the most loaded experts of each layer, ``[records, layers, E]``.

    The function chooses experts by the sum of their loads over all records, and keeps their order. It does not sort
    them by load: systems that ignore loads put neighbouring experts on one node. With sorted experts, they would put
    the most loaded experts together.

    Args:
        tokens: recorded loads of more experts than needed, ``[records, layers, experts]``.
        experts: number of experts to choose, E.
    """
    chosen = np.sort(np.argsort(-tokens.sum(0), axis=-1)[:, :experts], axis=-1)
    return np.take_along_axis(tokens, chosen[None], axis=-1)


def _gathered(changes: Sequence[Change], wait_s: float) -> Iterator[Change]:
    """Yield changes at the times when the job applies them.

    The job applies losses of nodes at once. It adds new nodes after ``wait_s`` seconds, or together with the next loss
    if that comes first.
    """
    waiting: dict[str, float] = {}
    for change in changes:
        if waiting and min(waiting.values()) + wait_s <= change.at_s:
            yield Change(min(waiting.values()) + wait_s, added=frozenset(waiting))
            waiting = {}
        waiting = {node: at_s for node, at_s in waiting.items() if node not in change.removed}
        waiting |= dict.fromkeys(change.added, change.at_s)
        if change.removed:
            yield Change(change.at_s, frozenset(waiting), change.removed)
            waiting = {}
    if waiting:
        yield Change(min(waiting.values()) + wait_s, added=frozenset(waiting))
