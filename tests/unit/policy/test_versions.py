"""Versions of different ages that a recovery restores, and the tokens whose updates these versions lack."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest

from moevement_core.engine.lifetime import Lifetime
from moevement_core.errors import ConfigError
from moevement_core.operators import Operator, OperatorKind, OperatorTable, StateBytes, expert_name, gate_name
from moevement_core.policy.partial_experts import TokenAccount, chosen, most_experts, turns
from moevement_core.policy.runs import open_starts, restore_points
from moevement_core.policy.schedule import Contents, Saved, ScheduleHistory
from moevement_core.policy.versions import version_runs
from moevement_core.snapshot.agreement import Agreed, RunStatus
from moevement_core.strategies.moc import MoC, PartialSchedule
from moevement_core.strategies.strategy import Measured
from moevement_core.strategies.versions import MOST_REACH
from moevement_core.util.iterations import is_newer

STATE = StateBytes(compute=2, master=4, optimizer=8)
MEASURED = Measured(iteration_s=1.0, d2h_bytes_per_s=1e9, replication_bytes_per_s=1e9, replicas=1)


def table(layers: int = 4, experts: int = 6, expert_parallel: int = 3) -> OperatorTable:
    """Return a stage with experts over ranks as Megatron places them, and gates on all ranks."""
    each = experts // expert_parallel
    rows = [
        [Operator(gate_name(layer), OperatorKind.GATE, STATE) for layer in range(layers)]
        + [
            Operator(expert_name(layer, expert), OperatorKind.EXPERT, STATE)
            for layer in range(layers)
            for expert in range(rank * each, (rank + 1) * each)
        ]
        for rank in range(expert_parallel)
    ]
    return OperatorTable.of_ranks([OperatorTable(row) for row in rows])


def test_experts_are_taken_in_turn_over_ranks_and_layers() -> None:
    """Check figure 5 of MoC-System: experts of four layers on three ranks. A checkpoint has one expert per layer."""
    stage = table()
    order = turns(stage)
    rank_of = {int(place): int(np.flatnonzero(stage.full[:, place])[0]) for place in np.flatnonzero(stage.is_expert)}
    first = [[rank_of[place] for place in chosen(order, 1, turn)] for turn in range(3)]
    assert first == [[0, 1, 2, 0], [1, 2, 0, 1], [2, 0, 1, 2]]


@pytest.mark.parametrize("experts", range(1, 7))
def test_every_expert_is_in_one_of_so_many_checkpoints_in_a_row(experts: int) -> None:
    schedule = PartialSchedule(table(), 3, experts, 6)
    assert schedule.snapshots == -(-6 // experts)
    taken = [ScheduleHistory(schedule).contents(iteration) for iteration in range(3 * schedule.size)]
    assert [saved is not None for saved in taken[:4]] == [True, False, False, True]
    there = [saved == Saved.FULL for saved in taken if saved is not None]
    for begin in range(len(there) - schedule.snapshots):
        assert np.any(there[begin : begin + schedule.snapshots], axis=0).all()
    for saved in there:
        for layer in range(4):
            assert saved[schedule.table.is_expert & (schedule.table.layers == layer)].sum() == experts
    assert schedule.is_dense == (experts == 6)


@pytest.mark.parametrize(("experts", "on_disk"), [(k, j) for k in range(1, 7) for j in range(1, k + 1)])
def test_every_expert_comes_to_disk_and_no_more_than_were_asked_for(experts: int, on_disk: int) -> None:
    schedule = PartialSchedule(table(), 3, experts, 6, on_disk)
    is_expert, rounds = schedule.table.is_expert, -(-experts // on_disk)
    waits = np.zeros(len(schedule.table), dtype=int)
    for iteration in range(0, 3 * schedule.size, 3):
        slot = schedule.slot(iteration)
        held, written = schedule.contents_of_slot(slot), schedule.parts_of_slot(slot).on_disk
        assert held is not None
        assert written is not None
        assert (written[~is_expert] == Saved.FULL).all()
        assert (held[written == Saved.FULL] == Saved.FULL).all()
        for layer in range(4):
            in_layer = is_expert & (schedule.table.layers == layer)
            assert (written[in_layer] == Saved.FULL).sum() <= on_disk
        waits = np.where(written == Saved.FULL, 0, waits + 1)
        assert waits.max() <= 2 * rounds * schedule.snapshots
    assert PartialSchedule(table(), 3, experts, 6).parts_of_slot(0).on_disk is None


def test_versions_are_the_newest_that_are_there() -> None:
    for seed in range(200):
        random = Random(seed)
        held: dict[int, Contents] = {
            iteration: np.array(
                [Saved.FULL] + [random.choice([Saved.FULL, Saved.OMITTED]) for _ in range(4)], dtype=np.int8
            )
            for iteration in random.sample(range(20), 8)
        }
        until = random.randrange(20)
        for run in version_runs(held, until):
            assert run.last in held, seed
            for operator, version in enumerate(run.full_at):
                older = [at for at in held if at <= run.last and held[at][operator] == Saved.FULL]
                assert version == max(older), seed
        reached = [run.last for run in version_runs(held, until)]
        assert reached == sorted(reached, reverse=True), seed
        assert all(at <= until for at in reached), seed


def test_slices_of_other_strategies_are_no_versions() -> None:
    held = {1: np.array([Saved.FULL, Saved.COMPUTE], dtype=np.int8), 2: np.array([Saved.NOTHING, Saved.FULL], np.int8)}
    assert not list(version_runs(held))


def test_what_may_still_be_needed_is_kept() -> None:
    """Check that a rank keeps the newest recoverable run that all peers have, although some snapshots are missing."""
    for seed in range(50):
        random = Random(seed)
        schedule = PartialSchedule(table(), random.randint(1, 3), random.randint(1, 6), 6)
        lifetime, held, delivered = Lifetime(MoC(schedule.table)), dict[int, Contents](), set[int]()
        pending: tuple[int, dict[int, RunStatus]] | None = None
        newest: int | None = None
        for iteration in range(120):
            if pending is not None:
                unneeded = lifetime.learn(Agreed(*pending), held)
                for freed in {*unneeded.old, *unneeded.lost}:
                    assert freed in held
                    del held[freed]
            delivered |= {at for at in held if iteration - at > 1}
            pending = (
                iteration,
                lifetime.statuses(iteration, held, {at: held[at] for at in held.keys() & delivered}),
            )
            if (saved := schedule.contents_of_slot(schedule.slot(iteration))) is not None and random.random() < 0.9:
                held[iteration] = saved
            reached = next(restore_points({at: held[at] for at in held.keys() & delivered}), None)
            assert newest is None or (reached is not None and reached.last >= newest), seed
            newest = reached.last if reached is not None else newest
            assert len(held) <= schedule.retention(2).slots + 2, seed
        assert is_newer(newest, 100), seed


def test_a_start_stays_open_over_a_gap() -> None:
    held = {
        2: np.array([Saved.FULL, Saved.OMITTED], np.int8), 4: np.array([Saved.OMITTED, Saved.FULL], np.int8),
        9: np.array([Saved.OMITTED, Saved.FULL], np.int8),
    }  # fmt: skip
    assert set(open_starts(held, is_gapless=False)) == {4, 9}


def test_lost_tokens_are_those_between_the_version_and_the_checkpoint() -> None:
    """Compare the lost tokens with a recount of each token."""
    for seed in range(20):
        random = Random(seed)
        stage = table(layers=2, experts=4, expert_parallel=2)
        schedule = PartialSchedule(stage, 2, random.randint(1, 4), 4)
        strategy = MoC(stage, 2, schedule.experts)
        experts = [int(place) for place in np.flatnonzero(stage.is_expert)]
        tokens: list[dict[int, int]] = []
        learned, held = {}, {}
        for iteration in range(1, 31):
            tokens.append({place: random.randrange(50) for place in experts})
            counts = np.zeros(len(stage))
            counts[experts] = [tokens[-1][place] for place in experts]
            strategy.observe(counts)
            if (saved := schedule.contents_of_slot(schedule.slot(iteration))) is not None:
                learned[iteration], held[iteration] = strategy.learned(), saved
        run = next(version_runs(held, random.randrange(12, 30)))
        lost = sum(tokens[t - 1][place] for place in experts for t in range(int(run.full_at[place]) + 1, run.last + 1))
        assert strategy.restored(run, learned).total == lost, seed
        assert strategy.account.routed.sum() == sum(sum(by_expert.values()) for by_expert in tokens[: run.last]), seed
        # A second return to the same checkpoint loses no token again.
        assert strategy.restored(run, learned).total == lost, seed
        assert strategy.account.lost.sum() == lost, seed


def test_what_was_lost_already_is_not_lost_again() -> None:
    """Compare the losses with sets of single tokens, also if an expert returns to a version before an earlier loss."""
    seed = Random().randrange(1 << 32)
    random = Random(seed)
    stage = table(layers=1, experts=6, expert_parallel=1)
    experts = [int(place) for place in np.flatnonzero(stage.is_expert)]
    strategy = MoC(stage, 1, 1)
    schedule = strategy.first(0, 0)
    updates: dict[int, set[tuple[int, int]]] = {place: set() for place in experts}
    history: dict[int, set[tuple[int, int]]] = {place: set() for place in experts}
    saved_updates: dict[int, dict[int, set[tuple[int, int]]]] = {}
    learned, held, now = {}, {}, 0
    for number in range(200):
        contents = schedule.contents_of_slot(schedule.slot(now))
        if contents is not None:
            learned[now], held[now] = strategy.learned(), contents
            saved_updates[now] = {place: set(applied) for place, applied in updates.items()}
        if now > 8 and random.random() < 0.15:
            run = next(version_runs(held, random.randrange(now - 3, now)))
            strategy.restored(run, learned)
            for late in [at for at in held if at > run.last]:
                del held[late]
            now = run.last
            for place in experts:
                updates[place] = set(saved_updates[int(run.full_at[place])][place])
                history[place] = {update for update in history[place] if update[0] <= now}
            missing = {place: history[place] - updates[place] for place in experts}
            assert strategy.account.lost[experts].tolist() == [len(missing[place]) for place in experts], seed
        now += 1
        counts = np.zeros(len(stage))
        for place in experts:
            applied = {(now, number * 100 + token) for token in range(random.randrange(4))}
            updates[place] |= applied
            history[place] |= applied
            counts[place] = len(applied)
        strategy.observe(counts)


def test_the_proportion_is_the_mean_over_layers() -> None:
    stage = table(layers=2, experts=2, expert_parallel=1)
    experts = stage.is_expert
    routed, lost = np.zeros(len(stage), np.int64), np.zeros(len(stage), np.int64)
    routed[experts & (stage.layers == 0)] = [60, 40]
    lost[experts & (stage.layers == 0)] = [10, 0]
    routed[experts & (stage.layers == 1)] = [500, 500]
    lost[experts & (stage.layers == 1)] = [0, 50]
    account = TokenAccount(routed, lost)
    assert account.lost_since(account, stage).proportion == pytest.approx((0.1 + 0.05) / 2)
    of_run = account.lost_since(account, stage, tokens_of_run=2000)
    assert of_run.proportion_so_far == pytest.approx((0.1 + 0.05) / 2)
    assert of_run.proportion == pytest.approx((10 / 2000 + 50 / 2000) / 2), "equation 7: of all tokens of the run"


def test_more_experts_are_saved_when_too_many_tokens_were_lost() -> None:
    stage = table(layers=1, experts=8, expert_parallel=1)
    assert most_experts(stage) == 8
    strategy = MoC(stage, interval=1, experts=1, limit=0.03)
    schedule = strategy.first(0, 9)
    learned, held, wanted = {}, {}, [1]
    for iteration in range(-10, 60):
        if iteration > 0:
            strategy.observe(np.where(stage.is_expert, 10.0, 0.0))
        learned[iteration], held[iteration] = strategy.learned(), schedule.contents_of_slot(iteration % schedule.size)
    assert strategy.wanted_sizes(schedule, MEASURED) == (1,)
    for until in (20, 40, 59):
        saved = {at: contents for at, contents in held.items() if contents is not None}
        strategy.restored(next(version_runs(saved, until)), learned)
        wanted.append(*strategy.wanted_sizes(schedule, MEASURED))
        learned[until] = strategy.learned()  # kept with the next snapshots
    assert wanted == sorted(wanted)
    assert wanted[-1] > 1
    proposal = strategy.propose(schedule, (wanted[-1],))
    assert proposal.is_change
    assert isinstance(proposal.schedules[0], PartialSchedule)
    assert proposal.schedules[0].experts == wanted[-1]


def test_fewer_experts_on_disk_grow_together_with_those_in_memory() -> None:
    stage = table(layers=1, experts=8, expert_parallel=1)
    strategy = MoC(stage, 10, 2, persisted=1, limit=0.03)
    schedule = strategy.first(0, 9)
    assert (schedule.experts, schedule.persisted, strategy.wanted_sizes(schedule, MEASURED)) == (2, 1, (1,))
    for lost, saved in ((2, (4, 2)), (4, (8, 4)), (8, (8, 8))):
        grown = strategy.propose(schedule, (lost,)).schedules[0]
        assert isinstance(grown, PartialSchedule)
        assert (grown.experts, grown.persisted) == saved
        assert not strategy.propose(grown, (lost,)).is_change
    held = [kept.retention(0, to_disk=to_disk).for_disk for kept in (schedule, grown) for to_disk in (False, True)]
    assert held == [0, schedule.snapshots, 0, 0], "files of the last schedule hold all experts"


def test_a_measured_k_is_as_large_as_copies_of_one_iteration_allow() -> None:
    stage = table(layers=1, experts=8, expert_parallel=2)
    strategy = MoC(stage, 10, is_measured=True)
    schedule = strategy.first(0, 9)
    other, experts = (stage.full[0, mask].sum() for mask in (~stage.is_expert, stage.is_expert))
    for share, carried in ((2.0, 8), (1.0, 8), (0.7, 5), (0.01, 0)):
        measured = replace(MEASURED, iteration_s=2.0, d2h_bytes_per_s=(other + share * experts) * 1.001 / 2)
        assert strategy.wanted_sizes(schedule, measured) == (1, 8 - carried)
    for sizes, experts_saved in (((1, 3), 5), ((1, 8), 1), ((4, 6), 4), ((1, 0), 8)):
        proposal = strategy.propose(schedule, sizes).schedules[0]
        assert isinstance(proposal, PartialSchedule)
        assert proposal.experts == experts_saved
    of_many = MoC(table(layers=1, experts=32, expert_parallel=2), 1, is_measured=True)
    start = of_many.first(0, 9)
    assert (start.experts, of_many.propose(start, (4, 25)).is_change) == (4, False), "7 instead of 4 of 32 is noise"
    assert of_many.propose(start, (4, 24)).is_change


def test_another_k_is_in_force_with_the_next_snapshot() -> None:
    """Check that a change takes effect before every expert has been saved once, because failures come sooner."""
    strategy = MoC(table(layers=1, experts=8, expert_parallel=1), 10, 1)
    history = ScheduleHistory(strategy.first(0, 0))
    changed = history.change(40, strategy.propose(history.newest, (4,)).schedules[0])
    assert changed.start <= 50
    contents = history.contents(50)
    assert contents is not None
    assert (contents[strategy.table.is_expert] == Saved.FULL).sum() == 4


def test_turns_go_on_after_a_recovery_and_what_was_saved_later_is_of_another_history() -> None:
    schedule = PartialSchedule(table(), 2, 2, 6)
    strategy = MoC(schedule.table, 2, 2)
    before, after = strategy.schedules_after_rollback([schedule], 8, history=5)
    assert before is schedule
    assert isinstance(after, PartialSchedule)
    assert after.start == 10
    assert after.id != replace(schedule, start=10, turn=5).id
    for iteration in range(10, 40):
        went_on, wanted = ScheduleHistory(after).contents(iteration), ScheduleHistory(schedule).contents(iteration)
        assert (went_on is None) == (wanted is None)
        assert went_on is None or (went_on == wanted).all()


def test_a_stage_with_fewer_experts_saves_when_the_others_do() -> None:
    """Check that recoverable runs of all stages begin and end in the same iterations, also without experts."""
    few = MoC(table(experts=3), 2, 1, most=6).first(0, 9)
    many = MoC(table(), 2, 1).first(0, 9)
    assert (few.start, few.snapshots, few.cadence.run) == (many.start, many.snapshots, many.cadence.run)
    without = OperatorTable([Operator(gate_name(0), OperatorKind.GATE, STATE)])
    assert MoC(without, 2, 1, most=6).first(0, 9).start == many.start


def test_an_eighth_is_saved_where_nothing_was_asked_for() -> None:
    assert MoC(table(layers=1, experts=24, expert_parallel=1)).experts == 3
    assert MoC(table(layers=1, experts=6, expert_parallel=1)).experts == 1


def test_too_long_until_every_expert_was_saved_is_refused() -> None:
    pattern = rf"--moevement-snapshot-experts 1\b.*\b64\b.*\b10 iterations\b.*\b640\b.*\b{MOST_REACH}\b"
    with pytest.raises(ConfigError, match=pattern):
        MoC(table(layers=1, experts=64, expert_parallel=1), 10, 1)
