"""The chosen window is the smallest that fits, and algorithm 1 follows the paper exactly."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moevement_core.errors import WindowError
from moevement_core.operators import OperatorTable
from moevement_core.policy.window import (
    Budget,
    PaperWindow,
    Window,
    WindowKind,
    choose_window,
    find_window_size,
    impose_window,
    peak_of_window,
)
from tests.unit.policy.tables import equal_experts, orders, stages, table_of

KINDS = list(WindowKind)


def budget_of(size: float) -> Budget:
    return Budget(iteration_s=1.0, d2h_bytes_per_s=size, replicas=0)


@pytest.mark.parametrize(
    ("operators", "bandwidth", "expected"),
    [
        (6, 72.0, PaperWindow(1, 6, True)),  # 6 x 12 bytes
        (6, 71.9, PaperWindow(2, 5, True)),  # 5 x 12 + 1 x 2, and ceil(6 / 5)
        (6, 32.0, PaperWindow(3, 2, True)),  # figure 6: two of six in each of three slots
        (6, 31.9, PaperWindow(3, 2, False)),  # `while O_Active > 2` stops here, fitting or not
        (100, 1e-9, PaperWindow(50, 2, False)),
        (2, 1e-9, PaperWindow(1, 2, False)),  # two operators are never divided
        (1, 1e-9, PaperWindow(1, 1, False)),
    ],
)
def test_algorithm_1(operators: int, bandwidth: float, expected: PaperWindow) -> None:
    assert find_window_size(operators, 1.0, 2, 4, 8, bandwidth) == expected


def test_for_equal_operators_both_policies_agree_where_the_papers_fits() -> None:
    for count, capacity in itertools.product((1, 2, 7, 24, 100), (15, 60, 150, 700, 1300)):
        paper = find_window_size(count, 1.0, 2, 4, 8, capacity)
        chosen = choose_window(equal_experts(count), np.arange(count), budget_of(capacity))
        # The paper limits every slot to as many operators as the first; here later slots may hold more.
        if paper.fits:
            assert chosen.size <= paper.window
        if paper.window == 1 and paper.fits:
            assert chosen.size == 1


@given(data=st.data(), table=stages(most=8), kind=st.sampled_from(KINDS))
def test_no_smaller_window_fits(data: st.DataObject, table: OperatorTable, kind: WindowKind) -> None:
    order = data.draw(orders(table))
    size = data.draw(st.integers(1, 400))
    window = choose_window(table, order, budget_of(size), kind)
    assert window.ends[-1] == len(table)
    assert list(window.ends) == sorted(set(window.ends)), "every slot saves something"
    if window.over_budget:
        return
    for smaller in range(1, window.size):
        for ends in itertools.combinations(range(1, len(table)), smaller - 1):
            assert _weights(table, order, (*ends, len(table)), kind).max() > size


@given(data=st.data(), table=stages(), kind=st.sampled_from(KINDS))
def test_slot_bytes_are_those_of_what_the_slot_holds(
    data: st.DataObject, table: OperatorTable, kind: WindowKind
) -> None:
    order = data.draw(orders(table))
    window = choose_window(table, order, budget_of(data.draw(st.integers(1, 600))), kind)
    np.testing.assert_array_equal(window.slot_bytes, _weights(table, order, window.ends, kind))


@given(data=st.data(), table=stages(), kind=st.sampled_from(KINDS))
def test_a_slot_is_over_budget_only_when_it_holds_one_operator_and_is_then_reported(
    data: st.DataObject, table: OperatorTable, kind: WindowKind
) -> None:
    order = data.draw(orders(table))
    size = data.draw(st.integers(1, 200))
    window = choose_window(table, order, budget_of(size), kind)
    for slot, (start, end) in enumerate(zip((0, *window.ends), window.ends, strict=False)):
        over = bool((window.slot_bytes[:, slot] > size).any())
        assert over == (slot in window.over_budget)
        assert not over or end - start == 1


@given(data=st.data(), table=stages(most=7), kind=st.sampled_from(KINDS), size=st.integers(1, 9))
def test_an_imposed_window_has_its_size_and_about_the_least_peak(
    data: st.DataObject, table: OperatorTable, kind: WindowKind, size: int
) -> None:
    order = data.draw(orders(table))
    window = impose_window(table, order, size, kind)
    slots = min(size, len(table))
    assert window.size == size
    assert window.ends[slots - 1 :] == (len(table),) * (size - slots + 1)
    best = min(
        _weights(table, order, (*ends, len(table)), kind).max()
        for ends in itertools.combinations(range(1, len(table)), slots - 1)
    )
    heaviest = _weights(table, order, (len(table),), kind).max()
    assert window.peak_bytes <= best + heaviest / 1024 + 1


def test_two_budgets_and_which_of_them_binds() -> None:
    budget = Budget(iteration_s=2.0, d2h_bytes_per_s=25e9, replication_bytes_per_s=1.25e9, replicas=2)
    assert (budget.bytes, budget.binding) == (1.25e9, "replication")
    assert budget.send_s(1.25e9) == 2.0
    alone = Budget(iteration_s=2.0, d2h_bytes_per_s=25e9, replicas=0)
    assert (alone.bytes, alone.send_s(1e12)) == (50e9, 0.0)
    assert "device" in alone.binding
    logged = Budget(iteration_s=2.0, d2h_bytes_per_s=25e9, replicas=0, reserved_d2h_bytes=10e9)
    assert (logged.bytes, logged.stall_s(40e9), logged.stall_s(65e9)) == (40e9, 0.0, 1.0)


def test_an_operator_that_alone_exceeds_the_budget_stalls_alone() -> None:
    table = table_of([(1, 10), (1, 10), (1, 100), (1, 10), (1, 10)])
    window = choose_window(table, np.arange(5), budget_of(30))
    assert (window.ends, window.over_budget) == ((2, 3, 5), (1,))


def test_compute_weights_that_exceed_the_budget_give_one_operator_a_slot_and_are_reported() -> None:
    window = choose_window(table_of([(10, 12)] * 5), np.arange(5), budget_of(25), WindowKind.ROLLING)
    assert (window.size, window.over_budget) == (5, (0, 1, 2, 3, 4))


def test_a_window_is_never_longer_than_there_are_operators() -> None:
    for count, kind in itertools.product((1, 2, 5), KINDS):
        assert choose_window(equal_experts(count), np.arange(count), budget_of(1), kind).size <= count


def test_slots_are_about_equally_heavy() -> None:
    window = choose_window(equal_experts(1000), np.arange(1000), budget_of(6000))
    assert window.slot_bytes.max() / window.slot_bytes.min() < 1.02


@given(count=st.integers(1, 30), size=st.integers(1, 30), kind=st.sampled_from(KINDS))
def test_from_the_peak_of_a_window_on_that_window_suffices(count: int, size: int, kind: WindowKind) -> None:
    table = equal_experts(count)
    peak = peak_of_window(table, np.arange(count), size, kind)
    assert choose_window(table, np.arange(count), budget_of(peak), kind).size <= size


@pytest.mark.parametrize(
    ("change", "pattern"),
    [
        ({"iteration_s": 0.0}, r"\biteration time\b.*\b0\.0 s\b"),
        ({"iteration_s": math.nan}, r"\biteration time\b.*\bnan s\b"),
        ({"d2h_bytes_per_s": 0.0}, r"\bdevice\b.*\b0\.0 bytes/s.*\b0\b"),
        ({"replication_bytes_per_s": 0.0}, r"\bpeers\b.*\b0\.0 bytes/s"),
        ({"replicas": -1}, r"-1 replicas\b"),
        ({"reserved_d2h_bytes": -5.0}, r"-5\.0 bytes\b"),
        ({"reserved_d2h_bytes": 100.0}, r"\bboundary log.*\b100 bytes\b"),
    ],
)
def test_budgets_that_cannot_be_are_refused(change: dict[str, float], pattern: str) -> None:
    valid = {"iteration_s": 1.0, "d2h_bytes_per_s": 10.0, "replication_bytes_per_s": 10.0, "replicas": 2}
    with pytest.raises(WindowError, match=pattern):
        Budget(**(valid | change))  # type: ignore[arg-type]


def test_an_idle_network_is_no_matter_without_replicas() -> None:
    assert Budget(1.0, 10.0, replication_bytes_per_s=0.0, replicas=0).bytes == 10.0


@pytest.mark.parametrize(
    ("arguments", "pattern"),
    [
        ((0, 1.0, 2, 4, 8, 1.0), r"\b0 operators\b"),
        ((3, 0.0, 2, 4, 8, 1.0), r"\biteration time\b.*\b0\.0 s\b"),
        ((3, 1.0, 2, 4, 8, 0.0), r"\bdevice\b.*\b0\.0 bytes/s"),
        ((3, 1.0, -2, 4, 8, 1.0), r"\bcompute\b.*-2 bytes\b"),
        ((3, 1.0, 2, math.nan, 8, 1.0), r"\bmaster\b.*\bnan bytes\b"),
    ],
)
def test_algorithm_1_refuses_what_cannot_be(arguments: tuple, pattern: str) -> None:
    with pytest.raises(WindowError, match=pattern):
        find_window_size(*arguments)


def test_windows_of_no_iterations_and_orders_that_are_none_are_refused() -> None:
    with pytest.raises(WindowError, match=r"\bwindow\b.*\b0 iterations\b"):
        impose_window(equal_experts(3), np.arange(3), 0)
    for order in ([0, 1], [0, 1, 1], [0, 1, 3], [0, 1, -1]):
        with pytest.raises(WindowError, match=rf"\border\b.*\b{len(order)}\b.*\bpermutation\b.*\b3 operators\b"):
            impose_window(equal_experts(3), np.array(order), 2)


def _weights(table: OperatorTable, order: np.ndarray, ends: tuple[int, ...], kind: WindowKind) -> np.ndarray:
    """Return the bytes of each slot on each rank, added up operator by operator."""
    weights = np.zeros((len(table.full), len(ends)), dtype=np.int64)
    for slot, (start, end) in enumerate(zip((0, *ends), ends, strict=False)):
        for place, operator in enumerate(order):
            if start <= place < end:
                weights[:, slot] += table.full[:, operator]
            elif place >= end or kind is WindowKind.ROLLING:
                weights[:, slot] += table.compute[:, operator]
    return weights


def test_the_window_says_what_it_is() -> None:
    window: Window = choose_window(equal_experts(6), np.arange(6), budget_of(32))
    assert (window.kind, window.size, window.ends) == (WindowKind.ALIGNED, 3, (2, 4, 6))
    np.testing.assert_array_equal(window.slot_bytes, [[32, 28, 24]])
    assert window.peak_bytes == 32
