"""Costs of a job, in seconds and bytes per second, and the popularity of its experts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from moevement_core.operators import OperatorKind
from moevement_core.planning.checkpoint_plan import CheckpointPlan
from moevement_core.planning.job import OperatorShape
from moevement_core.policy.popularity import Scores
from moevement_core.policy.skew import sample_shares
from moevement_core.simulator.iteration import IterationTime
from moevement_core.simulator.rank_placement import RankPlacement


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
        return sum(stage.full_bytes for stage in self.plan.stages) * self.plan.inputs.job.ranks_of_stage

    def copy_s(self, nbytes: float) -> float:
        """Return the seconds to copy ``nbytes`` from device to host."""
        return nbytes / self.plan.inputs.cluster.d2h_bytes_per_s

    def send_s(self, nbytes: float) -> float:
        """Return the seconds to send ``nbytes`` to all peers."""
        return nbytes * self.plan.inputs.replicas / self.plan.inputs.cluster.replication_bytes_per_s

    def store_s(self) -> float:
        """Return the seconds in which all ranks write their state to storage, or read it from there."""
        return self.job_bytes / self.storage_bytes_per_s

    def iterations(self, seconds: float) -> int:
        """Return the number of iterations in ``seconds``, rounded up."""
        return math.ceil(seconds / self.iteration_s)

    @cached_property
    def placement(self) -> RankPlacement:
        """Nodes of the job's ranks, and of the copies of their state."""
        return RankPlacement(self.plan.inputs)

    def slowed_s(self, copied_bytes: float, sent_bytes: float) -> float:
        """Return the seconds by which copies lengthen training.

        Args:
            copied_bytes: bytes that a rank copies to its host while it trains.
            sent_bytes: bytes that a rank sends to each of its peers while it trains.
        """
        return self.interference * self.copy_s(copied_bytes) + self.plan.contended_s(sent_bytes)

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
