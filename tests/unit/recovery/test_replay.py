"""A replay restores a wiped state bit for bit, for any schedule, from any snapshots that are left."""

from __future__ import annotations

import re
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from moevement_core.errors import RecoveryError
from moevement_core.policy.recoverable import recoverable_runs
from moevement_core.policy.schedule import Saved
from moevement_core.policy.window import WindowKind
from moevement_core.recovery.check import StateCheck
from moevement_core.recovery.holdings import Holding, Source
from moevement_core.recovery.plan import RecoveryPlan, Report, plan_recovery
from moevement_core.recovery.replay import ReplayObserver, replay
from moevement_core.snapshot.snapshot import Snapshot, digest_of
from moevement_core.util.iterations import is_newer
from tests.unit.recovery.toy import OPERATORS, Toy, run_until


def plan_of(snapshots: dict[int, Snapshot], until: int | None) -> RecoveryPlan:
    holdings = [
        Holding(0, iteration, snapshot.header.state, snapshot.header.schedule, snapshot.header.contents, Source.MEMORY)
        for iteration, snapshot in snapshots.items()
    ]
    return plan_recovery([Report(0, 0, tuple(holdings))], until)


def reallocate(toy: Toy, snapshots: dict[int, Snapshot], until: int) -> tuple[RecoveryPlan, StateCheck]:
    plan = plan_of(snapshots, until)
    toy.ran.clear()
    check = StateCheck(toy.states(), toy.whole)
    used = {fetch.iteration: snapshots[fetch.iteration] for fetch in plan.fetches}
    replay(plan, 0, toy.names, used, toy, check, ReplayObserver())
    return plan, check


@pytest.mark.parametrize("kind", list(WindowKind))
@pytest.mark.parametrize("size", range(1, 7))
def test_figure_8(kind: WindowKind, size: int) -> None:
    until = 2 * size + 3
    toy = Toy(size, kind)
    snapshots = run_until(toy, until, {})
    truth, rng = toy.whole(), toy.rng
    toy.wipe()
    plan, check = reallocate(toy, snapshots, until)
    assert toy.whole() == truth
    assert toy.rng == rng
    assert not check.differences
    assert not toy.weights_of_frozen_moved
    # An operator is frozen until its slot. So the number of frozen operators falls, and is 0 from the last slot on.
    assert [iteration for iteration, _ in toy.ran] == list(range(plan.first + 1, until + 1))
    frozen = [count for _, count in toy.ran]
    assert frozen == sorted(frozen, reverse=True)
    assert frozen[size - 1 :] == [0] * (until - plan.dense_at)
    assert plan.dense_at == plan.first + size - 1


@pytest.mark.parametrize("seed", range(60))
def test_any_schedule_any_iteration_any_snapshots_left(seed: int) -> None:
    random = Random(seed)
    kind, size = random.choice(list(WindowKind)), random.randint(1, 6)
    toy, until = Toy(size, kind), random.randint(1, 25)
    changes: dict[int, Any] = {}
    for iteration in range(1, until):
        if random.random() < 0.15:
            changes[iteration] = np.array(random.sample(range(OPERATORS), OPERATORS)), random.randint(1, 6)
    snapshots = run_until(toy, until, changes)
    truth, rng = toy.whole(), toy.rng
    for iteration in list(snapshots):
        if random.random() < 0.1:
            del snapshots[iteration]
    toy.wipe()
    if not list(recoverable_runs({iteration: snapshot.contents for iteration, snapshot in snapshots.items()}, until)):
        with pytest.raises(RecoveryError, match=rf"\biteration {until}\b"):
            plan_of(snapshots, until)
        return
    _, check = reallocate(toy, snapshots, until)
    assert toy.whole() == truth, f"seed {seed}"
    assert toy.rng == rng, f"seed {seed}"
    assert not check.differences, f"seed {seed}"
    assert not toy.weights_of_frozen_moved, f"seed {seed}"


def test_the_state_that_a_run_begins_from_comes_back_though_no_iteration_was_run() -> None:
    toy = Toy(3, WindowKind.ALIGNED)
    truth = toy.whole()
    snapshots = {iteration: toy.snapshot(iteration, 0, {}) for iteration in (-3, -2, -1)}
    toy.wipe()
    plan, check = reallocate(toy, snapshots, 0)
    assert (plan.first, plan.until, toy.ran) == (-3, 0, [])
    assert toy.whole() == truth
    assert (check.known_until, check.verified_until) == (0, None), "restored, and nothing was recomputed"
    assert check.restored == set(toy.names)
    assert plan_of(snapshots, None).until == 0, "what those snapshots lead to, without being asked"


def test_verified_is_said_of_the_last_iteration_that_was_compared_and_of_none_beyond() -> None:
    toy = Toy(3, WindowKind.ALIGNED)
    snapshots = run_until(toy, 8, {})
    toy.wipe()
    _, check = reallocate(toy, snapshots, 8)
    assert check.verified_until == 7, "snapshot 7 has a digest of everything, and 8 there is none"
    assert check.recomputed == set(toy.names)
    without = {i: Snapshot(_without_whole(s), s.buffer) for i, s in snapshots.items()}
    toy.wipe()
    _, check = reallocate(toy, {i: without[i] for i in range(3, 6)}, 8)
    assert check.known_until == 3, "slot 0 was compared when it was loaded, and never again"
    assert (check.recomputed, check.verified_until) == (set(), None), "nothing was compared after an update"
    toy.wipe()
    _, check = reallocate(toy, {i: snapshots[i] for i in range(3, 6)}, 8)
    last = {name for name, saved in zip(toy.names, snapshots[5].contents, strict=True) if saved == Saved.FULL}
    assert check.verified_until == 5
    assert check.restored == last, "of the last slot nothing was updated before its digest was compared"
    assert check.recomputed == set(toy.names) - last
    enabled = StateCheck(toy.states(), toy.whole, enabled=False)
    assert enabled.verified_until is None


def _without_whole(snapshot: Snapshot) -> Any:
    from dataclasses import replace

    return replace(snapshot.header, whole=None)


def test_a_replay_that_goes_wrong_is_found() -> None:
    toy = Toy(3, WindowKind.ALIGNED)
    snapshots = run_until(toy, 7, {})
    toy.wipe()
    run = toy.run
    spoilt: list[str] = []

    def run_with_a_flipped_bit(iteration: int, outcome: Any) -> Any:
        result = run(iteration, outcome)
        if iteration == 5 and not spoilt:
            spoilt.append(toy.names[0])
            bits = toy.momenta[toy.names[0]].view(torch.int32)
            bits[2] ^= 1
        return result

    toy.run = run_with_a_flipped_bit  # type: ignore[method-assign]
    _, check = reallocate(toy, snapshots, 7)
    assert re.search(rf"\b{re.escape(toy.names[0])}\b.*\biteration 5\b", check.differences[0])
    assert is_newer(5, check.verified_until)


def test_a_send_that_differs_is_found_though_state_and_losses_are_right() -> None:
    toy = Toy(2, WindowKind.ALIGNED)
    snapshots = run_until(toy, 6, {})
    toy.wipe()
    toy.sent = lambda iteration: f"sent in {iteration}"  # type: ignore[method-assign]
    _, check = reallocate(toy, snapshots, 6)
    assert not check.sends, "no record says what was sent"
    sent = {i: _with_sent(s, f"sent in {i}") for i, s in snapshots.items()}
    toy.wipe()
    plan, check = reallocate(toy, sent, 6)
    assert check.sends == set(range(plan.first + 1, 6)), "of the last one there is no record here"
    assert not check.differences
    sent[5] = _with_sent(snapshots[5], "something else")
    toy.wipe()
    _, check = reallocate(toy, sent, 6)
    (difference,) = check.differences
    assert re.search(r"\bsent\b.*\biteration 5\b", difference)


def _with_sent(snapshot: Snapshot, digest: str) -> Snapshot:
    from dataclasses import replace

    record = dict(snapshot.header.record)
    record["iteration"] = {**record["iteration"], "sent": digest}
    return Snapshot(replace(snapshot.header, record=record), snapshot.buffer)


def test_a_loss_that_differs_is_found() -> None:
    toy = Toy(2, WindowKind.ALIGNED)
    snapshots = run_until(toy, 6, {})
    toy.wipe()
    run = toy.run
    toy.run = lambda iteration, outcome: {"loss": run(iteration, outcome)["loss"] + 1e-3}  # type: ignore[method-assign]
    plan, check = reallocate(toy, snapshots, 6)
    assert re.search(rf"\bloss\b.*\biteration {plan.first + 1}\b", check.differences[0])
    assert check.losses_until is None


def test_frozen_weights_matter() -> None:
    """Check that a replay with stale compute weights of frozen operators ends in another state."""
    toy = Toy(3, WindowKind.ALIGNED)
    snapshots = run_until(toy, 8, {})
    truth = toy.whole()
    load = toy.load
    toy.load = lambda snapshot, loads, is_shared=True: load(  # type: ignore[method-assign,misc]
        snapshot, loads if snapshot.iteration in (3, 6) else {n: s for n, s in loads.items() if s == 2}
    )
    reallocate(toy, {i: snapshots[i] for i in (3, 4, 5)}, 8)
    assert toy.whole() != truth


def test_a_snapshots_bytes_are_what_it_is_reported_by() -> None:
    toy = Toy(2, WindowKind.ROLLING)
    snapshot = toy.snapshot(0, 0, {})
    assert all(digest_of(snapshot.bytes_of(entry)) == entry.digest for entry in snapshot.header.entries)
