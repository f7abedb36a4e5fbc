"""Base of all simulated strategies: the job's costs, and the interface of a strategy."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from moevement_core.operators import OperatorKind
from moevement_core.planning.checkpoint_plan import CheckpointPlan
from moevement_core.planning.job import OperatorShape
from moevement_core.policy.popularity import Scores
from moevement_core.policy.skew import sample_shares
from moevement_core.recovery.scope import Pipeline, segments
from moevement_core.replication.placement import place
from moevement_core.simulator.iteration import IterationTime


@dataclass(frozen=True)
class Costs:
    """Costs of a job, in seconds and bytes per second, from which each strategy computes what it costs."""

    plan: CheckpointPlan
    time: IterationTime
    """Time of an iteration, by part; the total is the plan's iteration time."""
    storage_bytes_per_s: float
    """Bytes per second that all ranks together write to durable storage, or read from it."""
    detect_s: float
    """Seconds from a failure until every rank knows of it."""
    regroup_s: float
    """Seconds from the moment when all ranks know of a failure until new process groups, with a spare, are ready."""
    interference: float = 0.0
    """Seconds that copies to the host add to training, divided by the seconds that these copies take; 0: no slow-down.

    The field ``contention`` of the plan's inputs is this ratio for copies to peers.
    """
    weight_gradient_share: float = 1 / 3
    """Share of the work of forward and backward pass that weight gradients take.

    The default counts one of three matrix products of equal size.
    """
    skew: float = 0.0
    """Skew of the popularity of experts (MoEvement, appendix D). 0: all get equal tokens; 1: one expert gets all."""
    skew_seed: int = 0

    @property
    def iteration_s(self) -> float:
        """Seconds of an iteration without checkpointing."""
        return self.plan.inputs.iteration_s

    @cached_property
    def full_bytes(self) -> int:
        """Bytes of a dense checkpoint of the heaviest rank, which is the rank with most bytes of state."""
        return max(stage.full_bytes for stage in self.plan.stages)

    @cached_property
    def job_bytes(self) -> int:
        """Bytes of a dense checkpoint of all ranks."""
        return sum(stage.full_bytes for stage in self.plan.stages) * self.ranks_of_stage

    @property
    def ranks_of_stage(self) -> int:
        """Number of ranks of a pipeline stage."""
        return self.plan.inputs.job.ranks // self.plan.inputs.job.pipeline_parallel

    @property
    def nodes(self) -> int:
        """Number of nodes of the job."""
        return math.ceil(self.plan.inputs.job.ranks / self.plan.inputs.cluster.gpus_per_node)

    def copy_s(self, nbytes: float) -> float:
        """Return the seconds to copy ``nbytes`` from device to host."""
        return nbytes / self.plan.inputs.cluster.d2h_bytes_per_s

    def send_s(self, nbytes: float) -> float:
        """Return the seconds to send ``nbytes`` to all peers."""
        return nbytes * self.plan.inputs.replicas / self.plan.inputs.cluster.replication_bytes_per_s

    def fetch_s(self, nbytes: float) -> float:
        """Return the seconds to fetch ``nbytes`` from one peer and copy them to the device."""
        return max(nbytes / self.plan.inputs.cluster.replication_bytes_per_s, self.copy_s(nbytes))

    def store_s(self) -> float:
        """Return the seconds in which all ranks write their state to storage, or read it from there."""
        return self.job_bytes / self.storage_bytes_per_s

    def iterations(self, seconds: float) -> int:
        """Return the number of iterations in ``seconds``, rounded up."""
        return math.ceil(seconds / self.iteration_s)

    def stages_of(self, nodes: Collection[int]) -> set[int]:
        """Return the pipeline stages that have a rank on one of ``nodes``, if nodes hold ranks in Megatron's order."""
        per_node, of_stage = self.plan.inputs.cluster.gpus_per_node, self.ranks_of_stage
        ranks = self.plan.inputs.job.ranks
        return {
            stage
            for node in nodes
            for stage in range(node * per_node // of_stage, (min((node + 1) * per_node, ranks) - 1) // of_stage + 1)
        }

    @cached_property
    def copies(self) -> list[set[frozenset[int]]]:
        """Placement of copies. For each rank of a node there is the set of nodes that keep the rank's copies.

        The list has an entry for each node. If the copies of two ranks of a node are on the same nodes, the set is
        there once. The code of a live job places the copies.
        """
        job, replicas = self.plan.inputs.job, self.plan.inputs.replicas
        nodes = [rank // self.plan.inputs.cluster.gpus_per_node for rank in range(job.ranks)]
        # A job on a single node keeps its copies there, and loses all of them with the node.
        peers = place(nodes, replicas, same_node=self.nodes == 1) if replicas < job.ranks else [()] * job.ranks
        kept: list[set[frozenset[int]]] = [set() for _ in range(self.nodes)]
        for node, rank_peers in zip(nodes, peers, strict=True):
            kept[node].add(frozenset(nodes[peer] for peer in rank_peers))
        return kept

    def copies_survive(self, nodes: Collection[int]) -> bool:
        """Return True if a copy of the state of every rank on ``nodes`` is left after the loss of these nodes."""
        lost = set(nodes)
        return not any(held <= lost for node in lost for held in self.copies[node])

    def nodes_of(self, stage: int) -> set[int]:
        """Return the nodes that have a rank of a pipeline stage, if nodes hold ranks in Megatron's order."""
        per_node, of_stage = self.plan.inputs.cluster.gpus_per_node, self.ranks_of_stage
        return set(range(stage * of_stage // per_node, ((stage + 1) * of_stage - 1) // per_node + 1))

    def segments(self, nodes: Collection[int]) -> list[frozenset[int]]:
        """Return the stages that replay after a failure of ``nodes``, in groups of stages that replay together.

        The code of a live recovery finds these groups (MoEvement, appendix A).
        """
        job = self.plan.inputs.job
        pipeline = Pipeline(job.pipeline_parallel, job.chunks > 1, job.tied_stages)
        return segments(pipeline, self.stages_of(nodes))

    def shares(self, operators: Sequence[OperatorShape]) -> Scores:
        """Return the share of a layer's tokens that reaches each operator, ``[expert-parallel ranks, operators]``.

        The share of an operator that is no expert is 1. The shares of a layer's experts are random, with the skew
        :attr:`skew`. The seed is fixed, so each call gives the same shares.
        """
        ranks = self.plan.inputs.job.expert_parallel
        drawn = np.ones((ranks, len(operators)))
        of_layer: dict[str, list[int]] = {}
        for index, operator in enumerate(operators):
            if operator.kind is OperatorKind.EXPERT:
                of_layer.setdefault(operator.name.split(".experts.")[0], []).append(index)
        generator = np.random.default_rng(self.skew_seed)
        for places in of_layer.values():
            drawn[:, places] = popularity(self.skew, ranks * len(places), 1, generator).reshape(ranks, len(places))
        return drawn


def popularity(skew: float, experts: int, layers: int, generator: np.random.Generator) -> Scores:
    """Return the share of a layer's tokens that each expert gets, ``[layers, experts]``, by a Dirichlet distribution.

    Args:
        skew: mean skew of the shares, 0 (equal shares) to 1 (one expert gets all tokens).
        experts: number of experts of a layer.
        layers: number of layers, each with its own random shares.
        generator: source of random numbers.
    """
    if experts < 2:
        return np.ones((layers, experts))
    return sample_shares(skew, experts, generator, layers)


@dataclass(frozen=True)
class RecoveryCost:
    """Cost of one failure: the seconds of each part of the recovery, and the updates of experts that are lost."""

    detect_s: float
    regroup_s: float
    fetch_s: float
    convert_s: float
    """Seconds to replay the first iterations, until all operators are active."""
    catch_up_s: float
    """Seconds to replay the iterations after those of ``convert_s``, up to the failure."""
    replayed: int
    """Number of replayed iterations."""
    tokens_lost: float = 0.0
    """Updates of experts that no checkpoint has, so that they are lost, counted in iterations. If all experts
    lose an iteration, it counts as 1. If one expert loses an iteration, it counts as the expert's share of tokens."""
    from_storage: bool = False
    """True if some rank's state had no copy left in memory, so that the job restored from storage."""
    experts_saved: int | None = None
    """Number of experts of each layer in a snapshot after the recovery; None for a strategy that saves all experts."""

    @property
    def total_s(self) -> float:
        """Seconds from the failure until the job has the state again that it had at the failure."""
        return self.detect_s + self.regroup_s + self.fetch_s + self.convert_s + self.catch_up_s


class StrategyCost(ABC):
    """Simulated way of checkpointing.

    Failures may change what a strategy saves, so each training gets a :meth:`fresh` strategy.
    """

    name: str
    in_memory = True
    """True if peers keep the state in host memory. If a rank and all its peers fail, the job restores from storage."""

    run_iterations = 0
    """Number of iterations of the whole training; 0 before :meth:`begin`."""

    def __init__(self, costs: Costs) -> None:
        self.costs = costs

    def begin(self, run_iterations: int) -> None:
        """Set the length of the training, in iterations. The simulation calls this once, before the first failure."""
        self.run_iterations = run_iterations

    def fresh(self) -> StrategyCost:
        """Return this strategy in its initial state, for another training."""
        return self

    @property
    @abstractmethod
    def overhead_s(self) -> float:
        """Mean seconds that checkpointing adds to an iteration."""

    @property
    @abstractmethod
    def interval(self) -> int:
        """Iterations from one restore point to the next."""

    @property
    @abstractmethod
    def copied_bytes(self) -> float:
        """Mean bytes that the heaviest rank copies from device to host in an iteration."""

    @property
    def sent_bytes(self) -> float:
        """Mean bytes that the heaviest rank sends to each of its peers in an iteration."""
        return 0.0

    @property
    @abstractmethod
    def host_bytes(self) -> float:
        """Bytes of host memory for the heaviest rank: its own snapshots, copies for other ranks, and logs."""

    @abstractmethod
    def rollback(self, committed: int, into: float) -> int:
        """Return the number of committed iterations that are executed again after a failure.

        Args:
            committed: number of committed iterations.
            into: share of the next iteration that was executed before the failure, 0 to 1.
        """

    @staticmethod
    def newest(committed: int, into: float, arrival: float) -> int:
        """Return the newest iteration whose state is complete at peers or in storage.

        Args:
            committed: number of committed iterations.
            into: share of the next iteration that was executed before the failure, 0 to 1.
            arrival: iterations from the commit of an iteration until its state is complete at peers or in storage.
        """
        return math.floor(committed + into - arrival)

    @property
    @abstractmethod
    def expected_rollback(self) -> float:
        """Mean rollback in iterations for a failure at a random moment. The interrupted iteration counts as half."""

    @property
    @abstractmethod
    def fetch_s(self) -> float:
        """Seconds to load the state of a rank back to its device."""

    @property
    def local_fetch_s(self) -> float:
        """Seconds to load the state of a rank from its own host's memory, which survives if only the process failed."""
        return self.fetch_s

    @property
    def converted(self) -> int:
        """Number of iterations at the beginning of a replay until all operators are active."""
        return 0

    def replay_iteration_s(self, nodes: Collection[int]) -> float:
        """Return the seconds of a replayed iteration after a failure of ``nodes``, once all operators are active."""
        return self.costs.iteration_s + self.overhead_s

    def convert_iteration_s(self, nodes: Collection[int]) -> float:
        """Return the seconds of a replayed iteration after a failure of ``nodes``, while some operators are frozen."""
        return self.replay_iteration_s(nodes)

    def recover(
        self,
        committed: int,
        nodes: Collection[int] = (0,),
        into: float = 0.5,
        lost_hosts: Collection[int] | None = None,
    ) -> RecoveryCost:
        """Return the cost of a failure. Some strategies also change what they save after the failure.

        Args:
            committed: number of committed iterations.
            nodes: nodes on which something failed since the last complete recovery: the whole node, or a process.
            into: share of the next iteration that was executed before the failure, 0 to 1.
            lost_hosts: those of ``nodes`` that lost their host memory, because the whole node failed; None for all.
        """
        lost_hosts = nodes if lost_hosts is None else lost_hosts
        if self.in_memory and not self.survives(lost_hosts):
            return self._from_storage(committed)
        replayed = min(committed, self.rollback(committed, into))
        converted = min(replayed, self.converted)
        is_local = not lost_hosts and self.costs.plan.inputs.keeps_own_copies
        return RecoveryCost(
            detect_s=self.costs.detect_s, regroup_s=self.costs.regroup_s,
            fetch_s=self.local_fetch_s if is_local else self.fetch_s,
            convert_s=converted * self.convert_iteration_s(nodes),
            catch_up_s=(replayed - converted) * self.replay_iteration_s(nodes), replayed=replayed,
        )  # fmt: skip

    def survives(self, lost_hosts: Collection[int]) -> bool:
        """Return True if host memory of other nodes still holds the state of every rank on ``lost_hosts``."""
        return self.costs.copies_survive(lost_hosts)

    def _from_storage(self, committed: int) -> RecoveryCost:
        """Return the cost of a recovery from storage.

        While the job trains, ranks write windows or checkpoints to storage, each as soon as the one before is complete.
        A recovery loads the newest complete window or checkpoint.
        """
        every = max(1, self.costs.iterations(self.costs.store_s()))
        replayed = min(committed, committed - max(0, committed // every - 1) * every)
        seconds = replayed * (self.costs.iteration_s + self.overhead_s)
        return RecoveryCost(
            detect_s=self.costs.detect_s,
            regroup_s=self.costs.regroup_s,
            fetch_s=self.costs.store_s(),
            convert_s=0.0,
            catch_up_s=seconds,
            replayed=replayed,
            from_storage=True,
        )

    def expected_recovery_s(self) -> float:
        """Return E[R], the expected seconds of a recovery from the loss of one node."""
        if not math.isfinite(self.expected_rollback):
            return math.inf
        fixed = self.costs.detect_s + self.costs.regroup_s + self.fetch_s
        # All stages execute the interrupted iteration again. On average, half of it was done at the failure.
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
        """Return the effective training time ratio by the formula of MoEvement, section 2.4."""
        return 1 / (1 + self.overhead_s / self.costs.iteration_s) / (1 + self.expected_recovery_s() / mtbf_s)

    @property
    def slowed_s(self) -> float:
        """Mean seconds that copies to the host and to peers add to an iteration, because they slow training down."""
        return self.costs.interference * self.costs.copy_s(self.copied_bytes) + self.contended_s

    @property
    def contended_s(self) -> float:
        """Mean seconds that copies to peers add to an iteration, because they share links with training."""
        return self.costs.plan.contended_s(self.sent_bytes)
