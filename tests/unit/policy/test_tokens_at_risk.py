"""Choice of experts by MoEtion and by load, and the versions that their snapshots restore."""

from __future__ import annotations

import itertools
from dataclasses import replace
from random import Random

import numpy as np
import pytest

from moevement_core.errors import ConfigError
from moevement_core.operators import Operator, OperatorKind, OperatorTable, StateBytes, expert_name, gate_name
from moevement_core.policy.runs import restore_points
from moevement_core.policy.schedule import Contents, Saved, Schedule, ScheduleHistory
from moevement_core.policy.tokens_at_risk import most_at_risk, shares
from moevement_core.policy.versions import VersionRun, version_runs
from moevement_core.strategies.moc_by_load import MoCByLoad
from moevement_core.strategies.moetion import MoEtion
from moevement_core.strategies.selected import SelectedSchedule
from moevement_core.strategies.strategy import Measured
from moevement_core.strategies.versions import MOST_REACH

STATE = StateBytes(compute=2, master=4, optimizer=8, gradient=4)


def table(layers: int = 3, experts: int = 8, expert_parallel: int = 2) -> OperatorTable:
    each = experts // expert_parallel
    gates = [Operator(gate_name(layer), OperatorKind.GATE, STATE) for layer in range(layers)]
    return OperatorTable.of_ranks(
        [
            OperatorTable(
                gates
                + [
                    Operator(expert_name(layer, expert), OperatorKind.EXPERT, STATE)
                    for layer in range(layers)
                    for expert in range(rank * each, (rank + 1) * each)
                ]
            )
            for rank in range(expert_parallel)
        ]
    )


def test_layers_share_by_their_tokens_at_risk() -> None:
    assert shares({0: 60, 1: 30, 2: 10}, {0: 8, 1: 8, 2: 8}, 10) == {0: 6, 1: 3, 2: 1}
    assert shares({0: 90, 1: 5, 2: 5}, {0: 4, 1: 4, 2: 4}, 8) == {0: 4, 1: 2, 2: 2}, "no layer has more than it has"
    assert shares({0: 0, 1: 0}, {0: 2, 1: 2}, 2) == {0: 1, 1: 1}, "without tokens all have the same claim"
    assert shares({0: 7, 1: 3}, {0: 2, 1: 2}, 99) == {0: 2, 1: 2}


def test_all_that_the_budget_has_is_shared_in_proportion() -> None:
    seed = Random().randrange(1 << 32)
    random = Random(seed)
    for _ in range(300):
        layers = range(random.randint(1, 6))
        risk = {layer: random.choice([0, random.randint(0, 1000)]) for layer in layers}
        experts = {layer: random.randint(1, 9) for layer in layers}
        total = random.randint(0, 40)
        allotted = shares(risk, experts, total)
        assert sum(allotted.values()) == min(total, sum(experts.values())), seed
        assert all(0 <= allotted[layer] <= experts[layer] for layer in layers), seed
        # A layer with more tokens at risk gets at most one expert less than another, unless it has no more experts.
        for more in layers:
            for less in layers:
                if risk[more] > risk[less] and allotted[more] < experts[more]:
                    assert allotted[less] <= allotted[more] + 1, (seed, risk, experts, total, allotted)


def test_the_experts_with_the_most_tokens_are_chosen_and_those_that_are_due() -> None:
    stage = table()
    risk = np.zeros(len(stage), dtype=np.int64)
    for layer in range(3):
        for expert in range(8):
            risk[stage.index_of[expert_name(layer, expert)]] = 10 * expert
    due = np.zeros(len(stage), dtype=bool)
    due[stage.index_of[expert_name(1, 0)]] = True
    names = {stage.names[place] for place in np.flatnonzero(most_at_risk(stage, risk, due, 6))}
    assert names == {expert_name(0, 7), expert_name(0, 6), expert_name(1, 0), expert_name(1, 7), *(
        expert_name(2, expert) for expert in (6, 7)
    )}  # fmt: skip


def contents(*saved: int) -> Contents:
    return np.array(saved, dtype=np.int8)


F, G, O = Saved.FULL, Saved.GRADIENT, Saved.OMITTED  # noqa: E741


def test_a_version_is_full_state_and_the_gradients_right_after_it() -> None:
    held = {
        1: contents(F, F, F),
        2: contents(F, G, O),
        3: contents(F, G, O),
        4: contents(F, O, F),
        5: contents(F, G, G),
    }
    newest = next(version_runs(held))
    assert (newest.last, newest.first) == (5, 1)
    assert newest.full_at.tolist() == [5, 1, 4]
    assert newest.version_at.tolist() == [5, 3, 5], "gradients after a gap are of no use"
    assert newest.is_redone
    assert [newest.active_in(iteration).tolist() for iteration in (2, 3, 5)] == [
        [False, True, False], [False, True, False], [False, False, True],
    ]  # fmt: skip
    assert newest.snapshots == {1, 2, 3, 4, 5}
    without = next(version_runs({at: saved for at, saved in held.items() if at != 2}))
    assert without.version_at.tolist() == [5, 1, 5]
    assert without.snapshots == {1, 4, 5}


def test_random_snapshots_restore_what_an_update_by_update_account_says() -> None:
    seed = Random().randrange(1 << 32)
    random = Random(seed)
    for _ in range(200):
        held = {
            iteration: contents(*(random.choice([F, G, O]) for _ in range(4)))
            for iteration in range(1, 12)
            if random.random() > 0.1
        }
        for run in version_runs(held):
            for operator in range(4):
                state: int | None = None
                for iteration in range(1, run.last + 1):
                    saved = held[iteration][operator] if iteration in held else O
                    if saved == F or (saved == G and state == iteration - 1):
                        state = iteration
                assert run.version_at[operator] == state, (seed, held)
                path = range(run.full_at[operator], run.version_at[operator] + 1)
                assert [held[at][operator] for at in path] == [F] + [G] * (len(path) - 1), (seed, held)
                assert set(path) <= run.snapshots


@pytest.mark.parametrize("experts", [1, 2, 3, 8])
def test_every_expert_is_saved_in_full_in_any_span_of_snapshots(experts: int) -> None:
    seed = Random().randrange(1 << 32)
    random = np.random.default_rng(seed)
    strategy = MoEtion(table(), 1, experts)
    schedule = strategy.first(0, 30)
    taken = [ScheduleHistory(schedule).contents(iteration) for iteration in range(schedule.start, 1)]
    hot = random.integers(0, 50, len(strategy.table)) * strategy.table.is_expert
    for iteration in range(1, 60):
        strategy.observe(np.where(random.random(len(hot)) < 0.9, hot, 0).astype(np.float64))
        wanted = strategy.propose(schedule, None).schedules[0]
        assert isinstance(wanted, SelectedSchedule)
        schedule = replace(wanted, start=iteration)
        taken.append(schedule.contents_of_slot(0))
    snapshots = [saved for saved in taken if saved is not None]
    assert len(snapshots) == len(taken)
    for begin in range(len(snapshots) - strategy.span + 1):
        assert np.any([saved == F for saved in snapshots[begin : begin + strategy.span]], axis=0).all(), seed
    before = snapshots[:-1]
    for earlier, later in zip(before, snapshots[1:], strict=True):
        assert not ((later == G) & (earlier == O)).any(), f"{seed}: a gradient follows what it is an update of"
    if experts == 8:
        assert not any((saved == O).any() for saved in snapshots)
    runs = list(strategy.restore_points(dict(enumerate(snapshots))))
    assert all(run.last - run.first >= min(strategy.span - 1, run.last) for run in runs)


def test_as_many_experts_are_saved_as_both_budgets_carry() -> None:
    strategy = MoEtion(table())
    assert (strategy.experts, strategy.experts_at_peers, strategy.settled) == (2, 2, False)
    schedule = strategy.first(0, 30)
    other, experts = (
        strategy.table.full[0, mask].sum() for mask in (~strategy.table.is_expert, strategy.table.is_expert)
    )
    # With all 8 experts, three snapshots of four have only gradients of an expert: 4 of 12 bytes.
    for share, wanted in ((1.0, 8), (0.5, 8), (0.46, 3), (0.3, 2), (0.01, 1)):
        rate = (other + share * experts) * 1.001
        for d2h, network, sizes in ((1.0, 9.0, (8 - wanted, 8 - wanted)), (9.0, 1.0, (0, 8 - wanted))):
            measured = Measured(1.0, d2h * rate, network * 2 * rate, 2)
            assert strategy.wanted_sizes(schedule, measured) == sizes
    strategy.propose(schedule, (2, 4))
    assert (strategy.experts, strategy.experts_at_peers, strategy.span) == (6, 4, 4)


def test_an_expert_costs_the_bytes_that_are_saved_of_it() -> None:
    strategy = MoEtion(table())
    schedule = strategy.first(0, 30)
    other, experts = (
        strategy.table.full[0, mask].sum() for mask in (~strategy.table.is_expert, strategy.table.is_expert)
    )
    measured = Measured(1.0, (other + 0.3 * experts) * 1.001, 1e9, 1)
    assert strategy.wanted_sizes(schedule, measured)[0] == 8 - 2, "each expert in full"
    strategy.propose(schedule, (2, 2))  # 6 experts of 8, so many of them are in two snapshots in a row
    proposal = strategy.propose(schedule, None).schedules[0]
    assert isinstance(proposal, SelectedSchedule)
    saved = proposal.rounds[0][strategy.table.is_expert]
    continued = (saved == G).sum() / (saved != O).sum()
    assert continued > 0
    assert strategy.wanted_sizes(proposal, measured)[0] == 8 - int(8 * 0.3 / (1 - min(continued, 3 / 4) * 8 / 12))


@pytest.mark.parametrize(("here", "there"), [(8, 1), (4, 1), (3, 2), (6, 5), (4, 4)])
def test_peers_receive_the_riskiest_experts_of_a_snapshot(here: int, there: int) -> None:
    seed = Random().randrange(1 << 32)
    random = np.random.default_rng(seed)
    strategy = MoEtion(table())
    schedule = strategy.first(0, 30)
    hot = random.integers(0, 50, len(strategy.table)) * strategy.table.is_expert
    own, parts = list[Contents](), list[Contents]()
    risk, full_at = np.zeros(len(hot)), strategy._memory.at_peers.full_at - 1
    for number in range(60):
        tokens = np.where(random.random(len(hot)) < 0.9, hot, 0).astype(np.float64)
        strategy.observe(tokens)
        risk += tokens
        wanted = strategy.propose(schedule, (8 - here, 8 - there) if number == 0 else None).schedules[0]
        assert isinstance(wanted, SelectedSchedule)
        schedule = wanted
        contents, part = wanted.contents_of_slot(0), wanted.parts_of_slot(0).at_peers
        assert contents is not None
        assert part is not None
        sent = part != O
        assert (part[sent] == contents[sent]).all(), f"{seed}: a part of the snapshot"
        assert (contents != O).sum() >= 3 + 3 * here, "the gates, and experts of three layers"
        expert = strategy.table.is_expert
        is_due = expert & (number - full_at >= strategy.span)
        for layer in range(3):
            here_only = expert & ~sent & (strategy.table.layers == layer)
            chosen = expert & sent & ~is_due & (strategy.table.layers == layer)
            if number > 0 and here_only.any() and chosen.any():
                assert risk[here_only].max() <= risk[chosen].min(), seed
        risk[sent], full_at[part == F] = 0, number
        own.append(contents)
        parts.append(part)
    for snapshots in (own, parts):
        for begin in range(len(snapshots) - strategy.span + 1):
            assert np.any([saved == F for saved in snapshots[begin : begin + strategy.span]], axis=0).all(), seed
        for earlier, later in itertools.pairwise(snapshots):
            assert not ((later == G) & (earlier == O)).any(), f"{seed}: a gradient follows what it is an update of"
    assert (here == there) == all(np.array_equal(*pair) for pair in zip(own, parts, strict=True))


def test_tokens_that_only_survivors_have_stay_at_risk_at_peers() -> None:
    strategy = MoEtion(table(), 1)
    first = strategy.first(0, 0)
    learned = {at: strategy.learned() for at in range(first.start, 1)}
    schedule: Schedule = first
    for iteration in range(1, 8):
        strategy.observe(np.where(strategy.table.is_expert, 10.0, 0.0))
        schedule = strategy.propose(schedule, (0, 7) if iteration == 1 else None).schedules[0]
        learned[iteration] = strategy.learned()
    memory = strategy._memory
    behind = memory.account.routed - memory.at_peers.saved
    assert (memory.own.saved == memory.account.routed)[strategy.table.is_expert].all()
    assert behind.max() > 0
    whole = np.full(len(strategy.table), 7)
    lost = strategy.restored(VersionRun(0, whole, 7, whole), learned)
    assert lost.total == 0
    after = strategy._memory
    assert (after.account.routed - after.at_peers.saved).tolist() == behind.tolist()


def test_by_load_each_layer_saves_its_busiest_experts_and_none_waits_for_ever() -> None:
    strategy = MoCByLoad(table(), 10, 2)
    schedule: Schedule = strategy.first(0, 0)
    generator = np.random.default_rng(7)
    popularity = generator.zipf(1.5, len(strategy.table)).astype(float)
    saved = np.zeros(len(strategy.table))
    routed, full_at = np.zeros(len(strategy.table)), np.full(len(strategy.table), -strategy.span)
    experts = strategy.table.is_expert
    for number in range(1, 40):
        for _ in range(10):
            tokens = np.where(experts, generator.poisson(popularity), 0)
            routed += tokens
            strategy.observe(tokens)
        schedule = strategy.propose(schedule, (2,)).schedules[0]
        contents = schedule.contents_of_slot(0)
        assert contents is not None
        held = experts & (contents == Saved.FULL)
        assert (contents[~experts] == Saved.FULL).all()
        for layer in range(3):
            in_layer = experts & (strategy.table.layers == layer)
            assert (held & in_layer).sum() >= 2
            if (held & in_layer).sum() == 2 and number > strategy.span:
                waiting = in_layer & ~held & (number - full_at < strategy.span)
                chosen = in_layer & held & (number - full_at < strategy.span)
                assert not chosen.any() or (routed - saved)[chosen].min() >= (routed - saved)[waiting].max()
        full_at[held] = number
        saved[held] = routed[held]
        assert number < strategy.span or (number - full_at[experts] < strategy.span).all()


def test_k_of_a_stage_that_lost_too_much_counts_when_all_stages_know() -> None:
    strategy = MoCByLoad(table(), 10, 1, limit=0.06)
    first = strategy.first(0, 0)
    learned = {at: strategy.learned() for at in range(first.start, 1)}
    for iteration in (10, 20):
        strategy.observe(np.where(strategy.table.is_expert, 10.0, 0.0))
        strategy.propose(first, None)
        learned[iteration] = strategy.learned()
    versions = np.full(len(strategy.table), 20)
    versions[strategy.table.index_of[expert_name(1, 3)]] = 10
    assert strategy.restored(VersionRun(1, versions, 20, versions), learned).proportion > 0.01
    measured = Measured(1.0, 1e9, 1e9, 1)
    assert (strategy.experts, strategy.wanted_sizes(first, measured)) == (1, (2,))
    strategy.propose(first, (4,))
    assert strategy.experts == 4, "another stage lost more"


def test_what_a_recovery_cost_is_owed_until_it_came_in() -> None:
    strategy = MoEtion(table(), 1, 1)
    first = strategy.first(0, 0)
    learned = {at: strategy.learned() for at in range(first.start, 1)}
    for iteration in range(1, 6):
        strategy.observe(np.where(strategy.table.is_expert, 10.0, 0.0))
        strategy.propose(first, None)
        learned[iteration] = strategy.learned()
    assert not strategy.boosted_experts()
    last = len(strategy.table)
    versions = np.full(last, 5)
    behind = strategy.table.index_of[expert_name(1, 3)]
    versions[behind] = 2
    lost = strategy.restored(VersionRun(1, versions, 5, versions), learned)
    assert lost.by_expert == {expert_name(1, 3): 30}
    assert strategy.boosted_experts() == [expert_name(1, 3)]
    strategy.observe_extra_tokens(np.where(np.arange(last) == behind, 12.0, 0.0))
    replacement = MoEtion(table(), 1, 1)
    replacement.adopt(strategy.learned())
    assert replacement.boosted_experts() == [expert_name(1, 3)]
    replacement.observe_extra_tokens(np.where(np.arange(last) == behind, 18.0, 7.0))
    assert not replacement.boosted_experts()


def test_a_reach_that_ranks_cannot_agree_on_is_refused() -> None:
    pattern = rf"--moevement-snapshot-experts 1\b.*\b8\b.*\b40 iterations\b.*\b640\b.*\b{MOST_REACH}\b"
    with pytest.raises(ConfigError, match=pattern):
        MoEtion(table(), 40, 1)


def test_runs_with_gradients_of_everything_are_no_versions() -> None:
    held = {1: contents(F, F), 2: contents(F, G), 3: contents(G, F)}
    assert not any(isinstance(run, VersionRun) for run in restore_points(held))
    assert next(iter(restore_points(held))).is_redone
