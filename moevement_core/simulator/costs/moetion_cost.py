"""Simulated MoEtion: a snapshot holds as many experts as can be copied and sent before the next snapshot begins.

MoEtion selects the experts that had most tokens since they were last saved.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property

from moevement_core.operators import OperatorKind
from moevement_core.simulator import selection
from moevement_core.simulator.bubbles import Bubbles, Split, bubbles_of
from moevement_core.simulator.costs.costs import Costs
from moevement_core.simulator.costs.partial_cost import PartialCost
from moevement_core.simulator.costs.strategy_cost import LostState

GRADIENT_BYTES = 2
"""Bytes of one gradient element, if a rank sends gradients in place of state (MoEtion, section 5.2)."""


@dataclass(frozen=True)
class Optimizations:
    """Techniques of MoEtion that a strategy uses in addition to the selection of experts."""

    selects_twice: bool = True
    """True if a rank's own host saves S_local experts and peers get S_remote of them (section 4.3, Algorithm 1, lines
    18 and 19). False if host and peers save the same experts: as many as both can."""
    skips_replicated: bool = True
    """True if a rank sends no state that other data-parallel ranks hold anyway (section 5.1)."""
    sends_gradients: bool = True
    """True if a rank sends only the gradients of an expert whose state peers got with the previous snapshot (section
    5.2, Algorithm 3)."""
    uses_bubbles: bool = True
    """True if copies and sends run in pipeline bubbles as far as they fit (section 5.3, Algorithm 4)."""


class MoEtionCost(PartialCost):
    """Strategy that saves as many experts as can be copied to the host and sent to peers from one snapshot to the next.

    Copies to the host and sends to peers have separate byte budgets (section 4.2), and so separate numbers of experts.
    All bytes and seconds are those of the stage with the heaviest ranks.

    Args:
        costs: costs of the job.
        interval: iterations from one snapshot to the next.
        experts_saved: S, number of experts of a layer in each snapshot, at the host and at peers; 0 for the largest
            numbers within the budgets.
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
        """Pipeline bubbles that copies and sends use; empty if :attr:`Optimizations.uses_bubbles` is False."""
        if self.optimizations.uses_bubbles:
            return bubbles_of(self.costs.time, self.stage)
        return Bubbles((), self.costs.iteration_s)

    @cached_property
    def replicated_bytes(self) -> int:
        """Bytes of a rank's state, without experts, that the rank does not send because other ranks also hold it.

        The other ranks are data-parallel ranks of the same stage. The result is 0 if data-parallel ranks divide the
        optimizer state (ZeRO, Megatron's distributed optimizer), because then no two ranks hold the same part. In a job
        of several nodes, the result is also 0 if all ranks of the stage are on one node, because they fail together.
        """
        inputs, stage = self.costs.plan.inputs, self.costs.plan.stages[self.stage]
        nodes = self.costs.placement.nodes_of(self.stage)
        if not self.optimizations.skips_replicated or len(nodes) < min(2, inputs.nodes):
            return 0
        shards = inputs.job.data_parallel * inputs.job.context_parallel
        return sum(
            size
            for operator, size in zip(stage.operators, stage.table.full[0].tolist(), strict=True)
            if operator.kind is not OperatorKind.EXPERT and operator.shards < shards
        )

    @cached_property
    def experts_saved(self) -> int:
        """Number of experts of a layer that a rank's own host saves in a snapshot (S_local); mean over layers.

        Unless the caller chose a number, it is the largest one within the byte budget, but at least 1. Each layer gets
        a number in proportion to the tokens that its experts had since they were last saved.
        """
        if self._fixed:
            return min(self._fixed, self.experts)
        carried = next((number for number in range(self.experts, 1, -1) if self._copy_fits(number)), 1)
        return carried if self.optimizations.selects_twice else self._most_sent(carried, is_alike=True)

    @cached_property
    def experts_sent(self) -> int:
        """Number of experts of a layer that peers get in a snapshot (S_remote); mean over layers.

        The host saves the same experts, and perhaps more.
        """
        if self._fixed or not self.optimizations.selects_twice:
            return self.experts_saved
        return self._most_sent(self.experts_saved, is_alike=False)

    def _most_sent(self, saved: int, *, is_alike: bool) -> int:
        """Return the largest number of experts of a layer that a rank can send to each peer, at least 1.

        Args:
            saved: number of experts of a layer that the rank's own host can save.
            is_alike: True if the host saves only the experts that peers get.
        """
        alone, beside = self._send_rates
        budget = self.bubbles.carried(alone, beside) * self.interval
        for number in range(saved, 1, -1):
            # To send more experts may be cheaper, if peers then get the same experts each time. So the loop tries all
            # numbers. It simulates a number only if gradients alone fit into the budget, and the whole state does not.
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
        """Bytes per second to each peer, in bubbles and outside of bubbles. In bubbles, links have no other traffic."""
        cluster, replicas = self.costs.plan.inputs.cluster, max(1, self.costs.plan.inputs.replicas)
        links = max(cluster.network_bytes_per_s, cluster.node_copy_bytes_per_s) / cluster.gpus_per_node
        return links / replicas, cluster.replication_bytes_per_s / replicas

    def _bytes_of(self, experts: int) -> float:
        """Return the bytes of a snapshot that has ``experts`` experts of each layer and all operators but experts."""
        return self.other_bytes + self.expert_bytes * experts / self.experts

    def _sent_of(self, experts: int, repeated: float) -> float:
        """Return the bytes of a snapshot that a rank sends to each peer.

        Args:
            experts: number of experts of a layer that peers get.
            repeated: share of these experts that peers got with the previous snapshot too, 0 to 1.
        """
        whole = self._bytes_of(experts) - self.replicated_bytes
        # The gradients of one iteration can replace the state only if there is a snapshot in every iteration.
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
        """Updates lost in a failure, if experts come from a rank's own host and if they come from peers."""
        return self._selected(self.experts_saved, self.experts_sent)

    @property
    def snapshot_bytes(self) -> float:
        """Bytes of one snapshot at a rank's own host: S_local experts of each layer, and all operators but experts."""
        return self._bytes_of(self.experts_saved)

    @property
    def sent_bytes(self) -> float:
        """Mean bytes that the heaviest rank sends to each peer in an iteration."""
        return self._sent_of(self.experts_sent, self.risks.repeated) / self.interval

    @property
    def host_bytes(self) -> float:
        """Bytes of host memory of a rank, which keeps its own snapshots and copies for the ranks whose peer it is.

        For each of these ranks and for itself, it keeps the newest saved state and a snapshot that is not complete yet.
        """
        own = self.costs.full_bytes + self.snapshot_bytes
        kept = self.costs.full_bytes - self.replicated_bytes + self.sent_bytes * self.interval
        return own + self.costs.plan.inputs.replicas * kept

    @cached_property
    def _copied(self) -> Split:
        """Bytes of a snapshot that are copied to the host in bubbles, and outside of bubbles."""
        rate = self.costs.plan.inputs.cluster.d2h_bytes_per_s
        return self.bubbles.split(self.snapshot_bytes, rate, self.interval)

    @cached_property
    def _sent(self) -> Split:
        """Bytes of a snapshot that are sent to each peer in bubbles, and outside of bubbles."""
        return self.bubbles.split(self.sent_bytes * self.interval, self._send_rates[0], self.interval)

    @property
    def send_s(self) -> float:
        """Seconds until all peers have a snapshot, from the start of the iteration in which its sends begin."""
        if not self.costs.plan.inputs.replicas:
            return 0.0
        return self.bubbles.ends_s(self._sent, *self._send_rates, iterations=self.interval)

    @property
    def transfers_s(self) -> tuple[float, float]:
        """Seconds in which links carry a snapshot to peers: in bubbles, and outside of bubbles."""
        alone, beside = self._send_rates
        return self._sent.in_bubbles / alone, self._sent.beside / beside

    @property
    def busy_s(self) -> float:
        """Seconds from the start of a snapshot until host and peers have it. Copies and sends run at the same time."""
        return max(self.costs.copy_s(self.snapshot_bytes), self.send_s)

    @property
    def slowed_s(self) -> float:
        """Mean seconds that copies to the host and to peers add to an iteration; copies in bubbles add none."""
        return self.costs.slowed_s(self._copied.beside / self.interval, self._sent.beside / self.interval)

    def _survives(self, hosts: Collection[int]) -> bool:
        """Return True if the state of every rank is left after the host memory of ``hosts`` is lost.

        For each rank on these hosts, a peer must still have a copy. If ranks do not send all of their state, another
        data-parallel rank must still hold the part that they do not send.
        """
        if not super()._survives(hosts):
            return False
        stages, lost = range(len(self.costs.plan.stages)), set(hosts)
        return not self.replicated_bytes or not any(self.costs.placement.nodes_of(stage) <= lost for stage in stages)

    def _tokens_lost(self, lost: LostState) -> float:
        """Return the updates that are lost. Experts that the newest snapshot leaves out go back to their saved state.

        The experts of lost nodes come from peers. The experts of all other nodes come from their own hosts, which have
        newer versions than peers (section 6).
        """
        from_peers = len(lost.hosts) / self.costs.plan.inputs.nodes
        if not self.costs.plan.inputs.keeps_own_copies:
            from_peers = 1.0
        tokens_lost = from_peers * self.risks.peer_risk + (1 - from_peers) * self.risks.host_risk
        return min(tokens_lost, float(lost.committed))
