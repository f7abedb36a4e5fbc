"""Division of non-expert modules over ranks, by hand, in the setting of MoC-System's figure 5."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from moevement_core.operators import Operator, OperatorKind, OperatorTable, StateBytes, expert_name
from moevement_core.planning.sharding import adaptive_sharding, divide, equal_sharding, expert_bytes

STATE = StateBytes(compute=2, master=4, optimizer=8)


def figure_5() -> OperatorTable:
    """Return six experts in each of four layers, on three ranks, with 12 bytes of full state each."""
    return OperatorTable.of_ranks(
        [
            OperatorTable(
                Operator(expert_name(layer, expert), OperatorKind.EXPERT, STATE)
                for layer in range(4)
                for expert in (2 * rank, 2 * rank + 1)
            )
            for rank in range(3)
        ]
    )


def test_a_rank_has_two_experts_and_the_others_one() -> None:
    saved = expert_bytes(figure_5(), 1)
    assert saved.tolist() == [[24, 12, 12], [12, 24, 12], [12, 12, 24]] * 2
    assert expert_bytes(figure_5(), 3).tolist() == [[48, 48, 48]] * 2
    assert expert_bytes(figure_5(), 6).tolist() == [[96, 96, 96]]


def test_the_largest_module_goes_first_to_the_rank_with_the_least() -> None:
    assert divide([5, 4, 3, 3], [0, 0]) == [0, 1, 1, 0]
    assert divide([1, 4, 2], [6, 0, 1]) == [2, 1, 2]


def test_adaptive_sharding_fills_the_ranks_with_fewer_experts() -> None:
    saved = expert_bytes(figure_5(), 1)
    assert equal_sharding([12, 12], saved)[0].tolist() == [36, 24, 12]
    assert adaptive_sharding([12, 12], saved).tolist() == [[24, 24, 24]] * 6


@given(
    modules=st.lists(st.integers(0, 50), max_size=12),
    loads=st.lists(st.lists(st.integers(0, 50), min_size=3, max_size=3), min_size=1, max_size=4),
)
def test_every_module_is_saved_once_and_no_rank_has_more_than_a_module_above_the_mean(
    modules: list[int], loads: list[list[int]]
) -> None:
    saved = np.array(loads, dtype=np.int64)
    for sharded in (equal_sharding(modules, saved), adaptive_sharding(modules, saved)):
        assert (sharded.sum(axis=1) == saved.sum(axis=1) + sum(modules)).all()
        assert (sharded >= saved).all()
    adaptive = adaptive_sharding(modules, saved)
    bound = np.maximum(saved.max(axis=1), adaptive.mean(axis=1) + max(modules, default=0))
    assert (adaptive.max(axis=1) <= bound).all()


def test_ranks_without_modules_keep_what_they_have() -> None:
    saved = expert_bytes(figure_5(), 2)
    assert (adaptive_sharding([], saved) == saved).all()
