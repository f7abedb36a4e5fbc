"""Simulated MoEtion: every snapshot holds the experts with the most tokens at risk that its budgets can carry."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cached_property

from moevement_core.operators import OperatorKind
from moevement_core.simulator import selection
from moevement_core.simulator.bubbles import Bubbles, Split, bubbles_of
from moevement_core.simulator.strategies.base import Costs, Recovery
from moevement_core.simulator.strategies.partial import Partial

GRADIENT_BYTES = 2
"""Bytes of an element of gradients that are sent in place of state (MoEtion, section 5.2)."""


@dataclass(frozen=True)
class Optimizations:
    """Techniques of MoEtion that a strategy uses beside the selection of experts."""

    selects_twice: bool = True
    """True if the own host keeps S_local experts and peers get S_remote of them (section 4.3, Algorithm 1, lines 18 and
    19); False if both get the smaller number."""
    skips_replicated: bool = True
    """True if state that data-parallel peers hold anyway is not sent (section 5.1)."""
    sends_gradients: bool = True
    """True if only gradients are sent of an expert that peers got with the last snapshot (section 5.2, Algorithm 3)."""
    uses_bubbles: bool = True
    """True if copies are scheduled in pipeline bubbles as far as they fit (section 5.3, Algorithm 4)."""


class MoEtion(Partial):
    """Strategy that saves as many experts as copies and sends can carry in an interval.

    Copies to the own host and sends to peers have separate budgets (section 4.2), and so separate numbers of experts.
    All bytes and seconds are those of the stage with the heaviest ranks.

    Args:
        costs: costs of the job.
        interval: iterations between snapshots.
        experts_saved: S, number of experts of a layer in each snapshot, on the own host and on peers; 0: the largest
            numbers that the budgets carry.
        optimizations: techniques in use; None for all.
    """

    name = "moetion"

    def __init__(
        self, costs: Costs, interval: int = 1, experts_saved: int = 0, optimizations: Optimizations | None = None
    ) -> None:
        super().__init__(costs, interval)
        self.optimizations, self._fixed = optimizations or Optimizations(), experts_saved

    @cached_property
    def bubbles(self) -> Bubbles:
        """Bubbles that copies use; none if copies are not scheduled in bubbles."""
        if self.optimizations.uses_bubbles:
            return bubbles_of(self.costs.time, self.stage)
        return Bubbles((), self.costs.iteration_s)

    @cached_property
    def replicated_bytes(self) -> int:
        """Bytes of a rank's state other than experts that data-parallel peers hold, so that it need not be sent.

        Ranks that divide the optimizer state among each other (ZeRO, Megatron's distributed optimizer) hold nothing of
        each other. Ranks on the same node do not count either, because they fail together.
        """
        job, stage = self.costs.plan.inputs.job, self.costs.plan.stages[self.stage]
        if not self.optimizations.skips_replicated or len(self.costs.nodes_of(self.stage)) < min(2, self.costs.nodes):
            return 0
        sizes = zip(stage.operators, stage.table.full[0].tolist(), strict=True)
        return sum(
            size
            for operator, size in sizes
            if operator.kind is not OperatorKind.EXPERT and operator.shards < job.data_parallel * job.context_parallel
        )

    @cached_property
    def experts_saved(self) -> int:
        """Number of experts of a layer that the own host saves (S_local); mean over layers.

        Layers with more tokens at risk save more experts. The budget decides, but at least one expert is saved.
        """
        if self._fixed:
            return min(self._fixed, self.experts)
        carried = next((number for number in range(self.experts, 1, -1) if self._copy_fits(number)), 1)
        return carried if self.optimizations.selects_twice else self._most_sent(carried, is_alike=True)

    @cached_property
    def experts_sent(self) -> int:
        """Number of the saved experts of a layer that peers get (S_remote); mean over layers."""
        if self._fixed or not self.optimizations.selects_twice:
            return self.experts_saved
        return self._most_sent(self.experts_saved, is_alike=False)

    def _most_sent(self, saved: int, *, is_alike: bool) -> int:
        """Return the most experts of a layer that peers can get, at least 1.

        Args:
            saved: number of experts of a layer that the own host can save.
            is_alike: True if the own host saves the same experts as peers.
        """
        alone, beside = self._send_rates
        budget = self.bubbles.carried(alone, beside) * self.interval
        for number in range(saved, 1, -1):
            # More experts may be cheaper than fewer, if peers get the same ones each time. So all numbers are tried,
            # but those without simulation that gradients alone are too much for, or state is not.
            if self._sent_of(number, repeated=1.0) > budget:
                continue
            if self._sent_of(number, repeated=0.0) <= budget:
                return number
            selected = self._selected(number if is_alike else saved, number)
            if self._sent_of(number, selected.repeated) <= budget:
                return number
        return 1

    def _copy_fits(self, experts: int) -> bool:
        budget = self.costs.plan.inputs.cluster.d2h_bytes_per_s * self.costs.iteration_s * self.interval
        return self._bytes_of(experts) <= budget

    @property
    def _send_rates(self) -> tuple[float, float]:
        """Bytes per second to each peer in a bubble, when links carry nothing else, and beside training."""
        cluster, replicas = self.costs.plan.inputs.cluster, max(1, self.costs.plan.inputs.replicas)
        links = max(cluster.network_bytes_per_s, cluster.node_copy_bytes_per_s) / cluster.gpus_per_node
        return links / replicas, cluster.replication_bytes_per_s / replicas

    def _bytes_of(self, experts: int) -> float:
        """Return the bytes of a snapshot with ``experts`` experts of each layer, and all other operators."""
        return self.other_bytes + self.expert_bytes * experts / self.experts

    def _sent_of(self, experts: int, repeated: float) -> float:
        """Return the bytes of a snapshot that are sent to each peer.

        Args:
            experts: number of experts of a layer that peers get.
            repeated: share of these experts that peers got with the last snapshot too.
        """
        whole = self._bytes_of(experts) - self.replicated_bytes
        # Gradients of one iteration stand for the state only if nothing happened between two snapshots.
        if not self.optimizations.sends_gradients or self.interval > 1:
            return whole
        spared = max(0.0, self.expert_bytes - GRADIENT_BYTES * self.parameters)
        return whole - repeated * spared * experts / self.experts

    def _selected(self, saved: int, sent: int) -> selection.Selected:
        if (saved, sent) not in self._simulated:
            self._simulated[saved, sent] = selection.simulate(self.popularity, saved, sent, self.interval)
        return self._simulated[saved, sent]

    @cached_property
    def _simulated(self) -> dict[tuple[int, int], selection.Selected]:
        return {}

    @cached_property
    def risks(self) -> selection.Selected:
        """Updates that a failure loses, by the place that the state comes from."""
        return self._selected(self.experts_saved, self.experts_sent)

    @property
    def snapshot_bytes(self) -> float:
        """Bytes of one snapshot on the own host: S_local experts of each layer, and all other operators."""
        return self._bytes_of(self.experts_saved)

    @property
    def sent_bytes(self) -> float:
        """Mean bytes sent in an iteration to each peer."""
        return self._sent_of(self.experts_sent, self.risks.repeated) / self.interval

    @property
    def host_bytes(self) -> float:
        """Bytes of host memory: the newest state and the snapshot under way, for the rank itself and each replica."""
        own = self.costs.full_bytes + self.snapshot_bytes
        kept = self.costs.full_bytes - self.replicated_bytes + self.sent_bytes * self.interval
        return own + self.costs.plan.inputs.replicas * kept

    @cached_property
    def _copied(self) -> Split:
        """Parts of a snapshot that are copied to the host in bubbles and beside training."""
        rate = self.costs.plan.inputs.cluster.d2h_bytes_per_s
        return self.bubbles.split(self.snapshot_bytes, rate, self.interval)

    @cached_property
    def _sent(self) -> Split:
        """Parts of a snapshot that are sent to each peer in bubbles and beside training."""
        return self.bubbles.split(self.sent_bytes * self.interval, self._send_rates[0], self.interval)

    @property
    def send_s(self) -> float:
        """Seconds from the begin of an iteration until all peers have a snapshot."""
        if not self.costs.plan.inputs.replicas:
            return 0.0
        return self.bubbles.ends_s(self._sent, *self._send_rates, iterations=self.interval)

    @property
    def transfers_s(self) -> tuple[float, float]:
        """Seconds in which links carry a snapshot to peers: in bubbles, and beside training."""
        alone, beside = self._send_rates
        return self._sent.in_bubbles / alone, self._sent.beside / beside

    @property
    def busy_s(self) -> float:
        """Seconds until all peers have a snapshot; copies and sends run at the same time."""
        return max(self.costs.copy_s(self.snapshot_bytes), self.send_s)

    @property
    def slowed_s(self) -> float:
        """Mean seconds that copies add to an iteration; copies in bubbles add none."""
        beside = self._copied.beside / self.interval
        return self.costs.interference * self.costs.copy_s(beside) + self.contended_s

    @property
    def contended_s(self) -> float:
        """Mean seconds by which sends to peers lengthen an iteration; sends in pipeline bubbles add none."""
        return self.costs.plan.contended_s(self._sent.beside / self.interval)

    def survives(self, lost_hosts: Collection[int]) -> bool:
        """Return True if peers have copies of every rank, and a data-parallel peer has what was not sent."""
        if not super().survives(lost_hosts):
            return False
        stages = range(len(self.costs.plan.stages))
        lost = set(lost_hosts)
        return not self.replicated_bytes or not any(self.costs.nodes_of(stage) <= lost for stage in stages)

    def recover(
        self,
        committed: int,
        nodes: Collection[int] = (0,),
        into: float = 0.5,
        lost_hosts: Collection[int] | None = None,
    ) -> Recovery:
        """Return the cost of a failure. Experts that snapshots leave out go back to their last saved state.

        Experts on lost nodes come from peers. All others come from the own host, which has newer ones (section 6).
        """
        recovery = super().recover(committed, nodes, into, lost_hosts)
        if recovery.from_storage:
            return replace(recovery, experts_saved=self.experts_saved)
        from_peers = len(set(nodes if lost_hosts is None else lost_hosts)) / self.costs.nodes
        if not self.costs.plan.inputs.keeps_own_copies:
            from_peers = 1.0
        lost = from_peers * self.risks.peer_risk + (1 - from_peers) * self.risks.host_risk
        return replace(recovery, tokens_lost=min(lost, float(committed)), experts_saved=self.experts_saved)
