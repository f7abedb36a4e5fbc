"""Simulated MoEtion: what each of its techniques changes, computed by hand on a job of round sizes.

The stages of the job have 4 layers with 8 experts of 96 MB (8 million parameters) each, and 577 MB of other state. An
iteration takes 3 seconds; 7 of 39 parts of it are bubbles.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from moevement_core.operators import OperatorKind
from moevement_core.planning.checkpoint_plan import CheckpointPlan
from moevement_core.simulator.costs import STRATEGIES, Costs, MoCCost, MoEtionCost, Optimizations
from moevement_core.simulator.failures import Failure, FailureModel
from moevement_core.simulator.selection import Selected, select, simulate
from moevement_core.simulator.training import Spares, train
from tests.unit.simulator.jobs import costs, lost_state

NONE = Optimizations(selects_twice=False, skips_replicated=False, sends_gradients=False, uses_bubbles=False)
BUBBLE_S = 3.0 * 7 / 39
OTHER, EXPERT, GRADIENTS = 12 * 4 * 12_020_000, 12 * 8_000_000, 2 * 8_000_000
ALL = OTHER + 32 * EXPERT


def changed(before: Costs, **inputs: object) -> Costs:
    """Return the costs with other inputs of the plan."""
    return replace(before, plan=CheckpointPlan(replace(before.plan.inputs, **inputs)))  # type: ignore[arg-type]


def test_a_selection_by_hand() -> None:
    """Check two experts with 3/4 and 1/4 of the tokens: the popular one is saved three times, then the other one.

    After the four snapshots 1/4, 2/4, 3/4 and 3/4 of an iteration's tokens are at risk. Two of the four snapshots hold
    the same expert as the snapshot before.
    """
    selected = simulate(np.array([[0.75, 0.25]]), host=1, peers=1)
    assert selected == Selected(host_risk=0.5625, peer_risk=0.5625, repeated=0.5)


def test_a_host_that_keeps_more_than_peers_loses_less() -> None:
    assert simulate(np.array([[0.75, 0.25]]), host=2, peers=1) == Selected(0.0, 0.5625, 0.5)


def test_layers_share_the_selected_experts_by_tokens_at_risk() -> None:
    """Check 9 and 3 tokens at risk: of four selected experts the layers get three and one."""
    risk = np.array([[5, 3, 1, 0], [0, 2, 0, 1]])
    everywhere = np.ones_like(risk, dtype=bool)
    assert select(risk, everywhere, 4).tolist() == [[True, True, True, False], [False, True, False, False]]
    saved = np.array([[True, True, False, True], [True, False, True, True]])
    assert select(risk, saved, 2).tolist() == [[True, True, False, False], [False, False, False, False]]


def test_sends_in_bubbles_do_not_slow_training() -> None:
    """Check links of 2 GB/s for a rank and two peers, so that bubbles carry ``BUBBLE_S`` times 1 GB to each."""
    job = changed(costs(d2h=4.0, network=16.0), contention=0.5)
    without = MoEtionCost(job, experts_saved=8, optimizations=NONE)
    inside = MoEtionCost(job, experts_saved=8, optimizations=replace(NONE, uses_bubbles=True))
    assert without.slowed_s == pytest.approx(0.5 * 2 * ALL / 2e9)
    assert inside.slowed_s == pytest.approx(0.5 * 2 * (ALL - BUBBLE_S * 1e9) / 2e9)
    fast = changed(costs(d2h=4.0, network=256.0), contention=0.5)
    assert MoEtionCost(fast, experts_saved=8, optimizations=NONE).slowed_s > 0
    assert MoEtionCost(fast, experts_saved=8, optimizations=replace(NONE, uses_bubbles=True)).slowed_s == 0


def test_copies_to_the_host_in_bubbles_do_not_slow_training() -> None:
    job = replace(costs(d2h=4.0, network=256.0), interference=0.2)
    without = MoEtionCost(job, experts_saved=8, optimizations=NONE)
    inside = MoEtionCost(job, experts_saved=8, optimizations=replace(NONE, uses_bubbles=True))
    assert without.slowed_s == pytest.approx(0.2 * ALL / 4e9)
    assert inside.slowed_s == pytest.approx(0.2 * (ALL / 4e9 - BUBBLE_S))
    assert inside.overhead_s == pytest.approx(inside.slowed_s)


def test_links_that_training_leaves_free_carry_more_experts() -> None:
    """Check links of 1 GB/s for each of two peers, of which training leaves half outside of bubbles.

    The budgets are 1.5 GB, and 1.5 + 0.27 GB with bubbles, for 577 MB and 384 MB for an expert of each layer.
    """
    job = costs(d2h=4.0, network=16.0)
    job = changed(job, cluster=replace(job.plan.inputs.cluster, network_share=0.5))
    without, inside = (MoEtionCost(job, optimizations=replace(NONE, uses_bubbles=uses)) for uses in (False, True))
    assert (without.experts_saved, inside.experts_saved) == (2, 3)
    assert inside.busy_s <= 3.0 + 1e-6
    assert without.risks.peer_risk > inside.risks.peer_risk > 0
    fixed, spread = (
        MoEtionCost(job, experts_saved=3, optimizations=replace(NONE, uses_bubbles=uses)) for uses in (False, True)
    )
    assert fixed.send_s == pytest.approx((OTHER + 12 * EXPERT) / 0.5e9)
    assert spread.send_s < fixed.send_s


def test_the_own_host_and_peers_have_selections_of_their_own() -> None:
    """Check a host that takes all 8 experts of a layer, and links for 1.97 GB to each peer: 577 MB and 3 of 384 MB."""
    job = costs(d2h=2.0, network=10.5, skew=0.5)
    twice, once = (MoEtionCost(job, optimizations=replace(NONE, selects_twice=selects)) for selects in (True, False))
    assert (twice.experts_saved, twice.experts_sent) == (8, 3)
    assert (once.experts_saved, once.experts_sent) == (3, 3)
    assert twice.copied_bytes == pytest.approx(ALL)
    assert twice.sent_bytes == pytest.approx(OTHER + 12 * EXPERT)
    assert twice.risks.host_risk == 0
    assert twice.risks.peer_risk == once.risks.peer_risk == once.risks.host_risk > 0


def test_a_lost_node_loses_more_tokens_than_a_lost_process() -> None:
    """Check one of 16 nodes: its experts come from peers, all others from the own hosts."""
    strategy = MoEtionCost(costs(d2h=2.0, network=10.5, skew=0.5), optimizations=replace(NONE, selects_twice=True))
    process, node = (strategy.recover(lost_state(1000, (3,), hosts)) for hosts in ((), (3,)))
    assert process.tokens_lost == 0
    assert node.tokens_lost == pytest.approx(strategy.risks.peer_risk / 16)
    assert process.fetch_s == pytest.approx(ALL / 2e9)
    assert node.fetch_s == pytest.approx(ALL / (10.5e9 / 8))
    every = strategy.recover(lost_state(1000, range(16)))
    assert every.from_storage


def test_every_strategy_fetches_faster_from_its_own_host() -> None:
    for name in ("gemini", "moc", "moetion", "moevement", "redo"):
        strategy = STRATEGIES[name](costs(d2h=4.0, network=16.0), 1800.0)
        process, node = (strategy.recover(lost_state(1000, (3,), hosts)) for hosts in ((), (3,)))
        assert process.fetch_s < node.fetch_s, name
        assert process.replayed == node.replayed, name
    freed = changed(costs(), keeps_own_copies=False)
    moc, files = MoCCost(freed), STRATEGIES["checkfreq"](costs(), 1800.0)
    assert moc.recover(lost_state(1000, hosts=())).fetch_s == moc.recover(lost_state(1000)).fetch_s
    assert files.recover(lost_state(1000, hosts=())).fetch_s == files.recover(lost_state(1000)).fetch_s


def test_a_training_with_failed_processes_needs_no_spares_and_loses_fewer_tokens() -> None:
    strategy = MoEtionCost(costs(d2h=2.0, network=10.5, skew=0.5), optimizations=replace(NONE, selects_twice=True))
    spares = Spares(count=0, repair_s=1800.0)
    node, process = (train(strategy, [Failure(3600.0, (3,), keeps)], 7200.0, spares) for keeps in (False, True))
    assert (node.lost_s["no spare"], process.lost_s["no spare"]) == (1800.0, 0.0)
    assert node.tokens_lost > process.tokens_lost == 0
    after_node = [Failure(3600.0, (3,)), Failure(3601.0, (5,), keeps_memory=True)]
    assert train(strategy, after_node, 7200.0).tokens_lost > node.tokens_lost, "the lost node is still to be restored"


def test_a_given_share_of_failures_ends_processes_only() -> None:
    nodes = FailureModel(600.0, 16).draw(360_000.0, 0)
    assert not any(failure.keeps_memory for failure in nodes)
    assert all(failure.keeps_memory for failure in FailureModel(600.0, 16, processes=1.0).draw(36_000.0, 0))
    half = FailureModel(600.0, 16, processes=0.5).draw(360_000.0, 0)
    assert 0.4 < sum(failure.keeps_memory for failure in half) / len(half) < 0.6


def test_state_of_data_parallel_peers_is_not_sent() -> None:
    """Check 16 ranks on 2 nodes that all hold the state other than experts."""
    job = costs(d2h=4.0, network=16.0)
    skips, sends = (
        MoEtionCost(job, experts_saved=3, optimizations=replace(NONE, skips_replicated=skips))
        for skips in (True, False)
    )
    assert skips.replicated_bytes == OTHER
    assert sends.sent_bytes - skips.sent_bytes == OTHER
    assert sends.host_bytes - skips.host_bytes == 2 * 2 * OTHER, "neither in the newest state nor on its way"
    assert skips.snapshot_bytes == sends.snapshot_bytes
    assert not sends.recover(lost_state(1000, (0, 1))).from_storage, "copies are on nodes 2 and 3"
    assert skips.recover(lost_state(1000, (0, 1))).from_storage, "no data-parallel peer is left"
    assert not skips.recover(lost_state(1000, (0, 2))).from_storage


def test_divided_state_and_peers_of_the_same_node_are_no_copies() -> None:
    job = costs(d2h=4.0, network=16.0)
    operators = [replace(operator, shards=16) for operator in job.plan.inputs.job.stages[0].operators]
    stages = tuple(replace(stage, operators=tuple(operators)) for stage in job.plan.inputs.job.stages)
    assert MoEtionCost(changed(job, job=replace(job.plan.inputs.job, stages=stages))).replicated_bytes == 0
    assert MoEtionCost(costs(ranks=64)).replicated_bytes == 0, "each stage is on a single node"
    assert MoEtionCost(costs(ranks=8)).replicated_bytes == 0, "one rank a stage"


def test_only_gradients_are_sent_of_experts_that_peers_have() -> None:
    """Check popularities without skew: all 8 experts come again in every snapshot, and 4 of 8 in every other one."""
    job = costs(d2h=4.0, network=16.0)
    gradients = replace(NONE, sends_gradients=True)
    assert MoEtionCost(job, experts_saved=8, optimizations=gradients).sent_bytes == pytest.approx(
        OTHER + 32 * GRADIENTS
    )
    assert MoEtionCost(job, experts_saved=4, optimizations=gradients).sent_bytes == pytest.approx(OTHER + 16 * EXPERT)
    rare = MoEtionCost(job, interval=2, experts_saved=8, optimizations=gradients)
    assert rare.sent_bytes == pytest.approx(ALL / 2), "gradients of two iterations are no state"


def test_links_that_carry_the_gradients_of_all_experts_need_no_selection() -> None:
    """Check budgets of 1.5 GB to each peer: 577 and 512 MB for all gradients, 577 and 384 MB for an expert's state."""
    job = costs(d2h=4.0, network=8.0)
    for selects_twice in (True, False):
        used = replace(NONE, selects_twice=selects_twice)
        assert MoEtionCost(job, optimizations=used).experts_sent == 2
        every = MoEtionCost(job, optimizations=replace(used, sends_gradients=True))
        assert (every.experts_saved, every.experts_sent) == (8, 8)
        assert every.risks.repeated == 1.0


def test_links_work_in_bubbles_and_beside_training() -> None:
    strategy = MoEtionCost(costs(network=16.0), experts_saved=8, optimizations=replace(NONE, uses_bubbles=True))
    assert strategy.transfers_s == pytest.approx((BUBBLE_S, ALL / 1e9 - BUBBLE_S))
    assert MoEtionCost(costs(network=16.0), experts_saved=8, optimizations=NONE).transfers_s == (0.0, ALL / 1e9)


def test_experts_are_all_that_is_counted_as_expert() -> None:
    """Check the sizes that this file computes by hand with those of the job."""
    stage = costs().plan.stages[0]
    sizes = dict.fromkeys((True, False), 0)
    for operator, size in zip(stage.operators, stage.table.full[0].tolist(), strict=True):
        sizes[operator.kind is OperatorKind.EXPERT] += size
    assert sizes == {True: 32 * EXPERT, False: OTHER}
