"""Nodes of the ranks of a job, and of the copies of their state; the stages that replay if nodes fail."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property

from moevement_core.planning.checkpoint_plan import PlanInput
from moevement_core.recovery.scope import Pipeline, segments
from moevement_core.replication.placement import place


@dataclass(frozen=True)
class RankPlacement:
    """Placement of a job's ranks, and of the copies of their state, on nodes. Nodes hold ranks in Megatron's order."""

    inputs: PlanInput

    def _stages_of(self, nodes: Collection[int]) -> set[int]:
        """Return the pipeline stages that have a rank on one of ``nodes``."""
        per_node, of_stage = self.inputs.cluster.gpus_per_node, self.inputs.job.ranks_of_stage
        ranks = self.inputs.job.ranks
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
        job, replicas = self.inputs.job, self.inputs.replicas
        nodes = [rank // self.inputs.cluster.gpus_per_node for rank in range(job.ranks)]
        # A job on a single node keeps its copies there, and loses all of them with the node.
        peers = place(nodes, replicas, same_node=self.inputs.nodes == 1) if replicas < job.ranks else [()] * job.ranks
        kept: list[set[frozenset[int]]] = [set() for _ in range(self.inputs.nodes)]
        for node, rank_peers in zip(nodes, peers, strict=True):
            kept[node].add(frozenset(nodes[peer] for peer in rank_peers))
        return kept

    def copies_survive(self, nodes: Collection[int]) -> bool:
        """Return True if a copy of the state of every rank on ``nodes`` is left after the loss of these nodes."""
        lost = set(nodes)
        return not any(held <= lost for node in lost for held in self.copies[node])

    def nodes_of(self, stage: int) -> set[int]:
        """Return the nodes that have a rank of a pipeline stage."""
        per_node, of_stage = self.inputs.cluster.gpus_per_node, self.inputs.job.ranks_of_stage
        return set(range(stage * of_stage // per_node, ((stage + 1) * of_stage - 1) // per_node + 1))

    def segments(self, nodes: Collection[int]) -> list[frozenset[int]]:
        """Return the stages that replay after a failure of ``nodes``, in groups of stages that replay together.

        The code of a live recovery finds these groups (MoEvement, appendix A).
        """
        job = self.inputs.job
        pipeline = Pipeline(job.pipeline_parallel, job.chunks > 1, job.tied_stages)
        return segments(pipeline, self._stages_of(nodes))
