"""Common parts of all simulated strategies: the job's costs, and the answers that a strategy has to give."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from moevement_core.checkpoint_plan import CheckpointPlan
from moevement_core.description.job import OperatorShape
from moevement_core.operators import OperatorKind
from moevement_core.policy.popularity import Scores
from moevement_core.policy.skew import sample_shares
from moevement_core.recovery.scope import Pipeline, segments
from moevement_core.replication.placement import place
from moevement_core.simulator.iteration import IterationTime


@dataclass(frozen=True)
class Costs:
    """Costs that strategies are computed from, in seconds and bytes per second."""

    plan: CheckpointPlan
    time: IterationTime
    """Iteration time; its total is the plan's iteration time."""
    storage_bytes_per_s: float
    """Rate to and from durable storage, all ranks together."""
    detect_s: float
    """Seconds until every rank knows of a failure."""
    regroup_s: float
    """Seconds until process groups are usable again, with a spare."""
    interference: float = 0.0
    """Share of the seconds of copies to the host by which these lengthen the training beside them; 0 hides them wholly.
    The effect of copies to peers is the plan's ``contention``.
    """
    weight_gradient_share: float = 1 / 3
    """Share of weight gradients in the work of a forward and a backward pass: one of three products
    of the same size.
    """
    skew: float = 0.0
    """Skew of the popularity of experts (MoEvement, appendix D): 0 is even, 1 is one expert for all tokens."""
    skew_seed: int = 0

    @property
    def iteration_s(self) -> float:
        """Seconds of an iteration without any checkpointing."""
        return self.plan.given.iteration_s

    @cached_property
    def full_bytes(self) -> int:
        """A dense checkpoint of the heaviest rank."""
        return max(stage.full_bytes for stage in self.plan.stages)

    @cached_property
    def job_bytes(self) -> int:
        """A dense checkpoint of all ranks."""
        return sum(stage.full_bytes for stage in self.plan.stages) * self.ranks_of_stage

    @property
    def ranks_of_stage(self) -> int:
        """Ranks of a pipeline stage."""
        return self.plan.given.job.ranks // self.plan.given.job.pipeline_parallel

    @property
    def nodes(self) -> int:
        """Number of nodes of the job."""
        return math.ceil(self.plan.given.job.ranks / self.plan.given.cluster.gpus_per_node)

    def copy_s(self, nbytes: float) -> float:
        """Return the seconds of a copy from device to host."""
        return nbytes / self.plan.given.cluster.d2h_bytes_per_s

    def send_s(self, nbytes: float) -> float:
        """Return the seconds to send so many bytes to all peers."""
        return nbytes * self.plan.given.replicas / self.plan.given.cluster.replication_bytes_per_s

    def fetch_s(self, nbytes: float) -> float:
        """Return the seconds to fetch so many bytes from one peer, and copy them to the device."""
        return max(nbytes / self.plan.given.cluster.replication_bytes_per_s, self.copy_s(nbytes))

    def store_s(self) -> float:
        """Seconds to write or read all state of the job to or from storage."""
        return self.job_bytes / self.storage_bytes_per_s

    def iterations(self, seconds: float) -> int:
        """Return how many iterations begin before ``seconds`` are over."""
        return math.ceil(seconds / self.iteration_s)

    def stages_of(self, nodes: Collection[int]) -> set[int]:
        """Pipeline stages that have a rank on one of the nodes, ranks being laid out as Megatron does."""
        per_node, of_stage = self.plan.given.cluster.gpus_per_node, self.ranks_of_stage
        ranks = self.plan.given.job.ranks
        return {
            stage
            for node in nodes
            for stage in range(node * per_node // of_stage, (min((node + 1) * per_node, ranks) - 1) // of_stage + 1)
        }

    @cached_property
    def copies(self) -> list[set[frozenset[int]]]:
        """Nodes with copies of each node's ranks: those of the peers that a live job would choose."""
        job, replicas = self.plan.given.job, self.plan.given.replicas
        nodes = [rank // self.plan.given.cluster.gpus_per_node for rank in range(job.ranks)]
        # A job on one node keeps copies there, of which a lost node leaves none.
        peers = place(nodes, replicas, same_node=self.nodes == 1) if replicas < job.ranks else [()] * job.ranks
        found: list[set[frozenset[int]]] = [set() for _ in range(self.nodes)]
        for node, its in zip(nodes, peers, strict=True):
            found[node].add(frozenset(nodes[peer] for peer in its))
        return found

    def copies_survive(self, nodes: Collection[int]) -> bool:
        """Return whether a copy of every rank's state is left."""
        lost = set(nodes)
        return not any(held <= lost for node in lost for held in self.copies[node])

    def segments(self, nodes: Collection[int]) -> list[frozenset[int]]:
        """Stages that replay together, as a live recovery finds them (appendix A)."""
        job = self.plan.given.job
        pipeline = Pipeline(job.pipeline_parallel, job.chunks > 1, job.tied_stages)
        return segments(pipeline, self.stages_of(nodes))

    def shares(self, operators: Sequence[OperatorShape]) -> Scores:
        """Share of the tokens of its layer that reaches each operator, ``[expert-parallel ranks, operators]``.

        1 for what serves all. Drawn for each layer with the wanted skew, equal for equal seeds.
        """
        ranks = self.plan.given.job.expert_parallel
        found = np.ones((ranks, len(operators)))
        of_layer: dict[str, list[int]] = {}
        for index, one in enumerate(operators):
            if one.kind is OperatorKind.EXPERT:
                of_layer.setdefault(one.name.split(".experts.")[0], []).append(index)
        generator = np.random.default_rng(self.skew_seed)
        for places in of_layer.values():
            found[:, places] = popularity(self.skew, ranks * len(places), 1, generator).reshape(ranks, len(places))
        return found


def popularity(skew: float, experts: int, layers: int, generator: np.random.Generator) -> Scores:
    """Share of a layer's tokens by expert, ``[layers, experts]``, of a Dirichlet distribution."""
    if experts < 2:
        return np.ones((layers, experts))
    return sample_shares(skew, experts, generator, layers)


@dataclass(frozen=True)
class Recovery:
    """Cost of one failure, in seconds by part."""

    detect_s: float
    regroup_s: float
    fetch_s: float
    convert_s: float
    """Replaying the iterations that make the state dense."""
    catch_up_s: float
    """Replaying those after them, up to the failure."""
    replayed: int
    """Iterations."""
    tokens_lost: float = 0.0
    """Share of the tokens of an iteration, times iterations: updates that no checkpoint has."""
    from_storage: bool = False
    """True if no copy in memory was left."""

    @property
    def total_s(self) -> float:
        """Seconds from the failure until the job is where it was."""
        return self.detect_s + self.regroup_s + self.fetch_s + self.convert_s + self.catch_up_s


@dataclass
class TokenLoss:
    """MoC-System's budget: the share of updates that a training may lose, and what follows when it is used up."""

    threshold: float = 0.0375
    """Share of lost tokens beyond which more experts are saved in each snapshot (MoC-System, section 3)."""
    lost: float = field(default=0.0, init=False)


class Strategy(ABC):
    """A way of checkpointing. Some change with what happens, so each training has a :meth:`fresh` one."""

    name: str
    in_memory = True
    """True if state is kept in host memory of peers, and lost with all of them."""

    def __init__(self, costs: Costs) -> None:
        self.costs = costs

    def fresh(self) -> Strategy:
        """Return a strategy for another training, without this one's history."""
        return self

    @property
    @abstractmethod
    def overhead_s(self) -> float:
        """Seconds that checkpointing adds to an iteration, on average."""

    @property
    @abstractmethod
    def interval(self) -> int:
        """Iterations between two states that can be returned to."""

    @property
    @abstractmethod
    def copied_bytes(self) -> float:
        """Bytes from the heaviest device to its host, in an average iteration."""

    @property
    def sent_bytes(self) -> float:
        """Bytes to each peer, in an average iteration."""
        return 0.0

    @property
    @abstractmethod
    def host_bytes(self) -> float:
        """Bytes of host memory of the heaviest rank: own snapshots, copies for peers, logs."""

    @abstractmethod
    def rollback(self, committed: int, into: float) -> int:
        """Iterations that are computed again after a failure.

        Args:
            committed: iterations that are done.
            into: the next one, as the share of it that is over.
        """

    @staticmethod
    def newest(committed: int, into: float, arrival: float) -> int:
        """The newest state that is where it has to be, when it takes ``arrival`` iterations to get there."""
        return math.floor(committed + into - arrival)

    @property
    @abstractmethod
    def expected_rollback(self) -> float:
        """Mean number of iterations rolled back by a failure at a random moment; the interrupted
        iteration counts half.
        """

    @property
    @abstractmethod
    def fetch_s(self) -> float:
        """Seconds until state is back on the device."""

    @property
    def converted(self) -> int:
        """Number of re-executed iterations that make the state dense."""
        return 0

    def replay_iteration_s(self, nodes: Collection[int]) -> float:
        """Seconds for each iteration that is computed again after the loss of ``nodes``, once the state is dense."""
        return self.costs.iteration_s + self.overhead_s

    def convert_iteration_s(self, nodes: Collection[int]) -> float:
        """Seconds for each iteration that makes it dense."""
        return self.replay_iteration_s(nodes)

    def recover(self, committed: int, nodes: Collection[int] = (0,), into: float = 0.5) -> Recovery:
        """A failure when ``committed`` iterations are done; may change what the strategy does from then on.

        Args:
            committed: iterations.
            nodes: those lost since state was whole.
            into: the next iteration, as the share of it that is over.
        """
        if self.in_memory and not self.costs.copies_survive(nodes):
            return self._from_storage(committed)
        replayed = min(committed, self.rollback(committed, into))
        converted = min(replayed, self.converted)
        return Recovery(
            self.costs.detect_s, self.costs.regroup_s, self.fetch_s, converted * self.convert_iteration_s(nodes),
            (replayed - converted) * self.replay_iteration_s(nodes), replayed,
        )  # fmt: skip

    def _from_storage(self, committed: int) -> Recovery:
        """Windows and checkpoints are written behind training, one after the other; the newest whole one is loaded."""
        every = max(1, self.costs.iterations(self.costs.store_s()))
        replayed = min(committed, committed - max(0, committed // every - 1) * every)
        seconds = replayed * (self.costs.iteration_s + self.overhead_s)
        return Recovery(
            self.costs.detect_s, self.costs.regroup_s, self.costs.store_s(), 0.0, seconds, replayed, from_storage=True
        )

    def expected_recovery_s(self) -> float:
        """E[R], for one node."""
        if not math.isfinite(self.expected_rollback):
            return math.inf
        fixed = self.costs.detect_s + self.costs.regroup_s + self.fetch_s
        # The interrupted iteration was one of all stages, on average half of it.
        interrupted = 0.5
        committed = max(0.0, self.expected_rollback - interrupted)
        converted = min(committed, self.converted)
        return (
            fixed
            + interrupted * (self.costs.iteration_s + self.overhead_s)
            + converted * self.convert_iteration_s((0,))
            + (committed - converted) * self.replay_iteration_s((0,))
        )

    def analytic_ettr(self, mtbf_s: float) -> float:
        """Return the ETTR by the formula of MoEvement, section 2.4."""
        return 1 / (1 + self.overhead_s / self.costs.iteration_s) / (1 + self.expected_recovery_s() / mtbf_s)

    @property
    def slowed_s(self) -> float:
        """Seconds that copies beside training add to an iteration, on average."""
        return self.costs.interference * self.costs.copy_s(self.copied_bytes) + self.contended_s

    @property
    def contended_s(self) -> float:
        """Seconds of an iteration that copies to peers add, over links that training uses, too."""
        return self.costs.plan.contended_s(self.sent_bytes)
