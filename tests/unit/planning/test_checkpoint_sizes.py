"""Sizes of MoC-System's checkpoints: by hand, and against the description of the same model for planning."""

from __future__ import annotations

import pytest

from benchmarks.papers.checkpoint_sizes import (
    CASES,
    GPT_350M_16E,
    Case,
    Sharding,
    all_expert_parameters,
    non_expert_modules,
    rank_bytes,
    total_share,
)
from moevement_core.operators import OperatorKind
from moevement_core.planning.transformer import Layout, describe

EXPERTS = all_expert_parameters(GPT_350M_16E)
OTHERS = sum(non_expert_modules(GPT_350M_16E))


def test_modules_are_the_non_experts_of_a_plan() -> None:
    (stage,) = describe("gpt", GPT_350M_16E, Layout(ranks=1, global_batch_size=1)).stages
    by_kind = {True: 0, False: 0}
    for operator in stage.operators:
        by_kind[operator.kind is OperatorKind.EXPERT] += operator.parameters
    assert by_kind == {True: EXPERTS, False: OTHERS}


def test_the_baseline_of_case_1_by_hand() -> None:
    """Check rank 0 of eight: an eighth of all optimizer state, two of 16 experts, and all weights of non-experts."""
    saved = rank_bytes(CASES[0], 16, Sharding.BASELINE)
    assert saved.max() == saved[0, 0] == 12 * OTHERS // 8 + 12 * EXPERTS // 8 + 2 * EXPERTS // 8 + 2 * OTHERS
    assert saved[0, 1] == saved[0, 0] - 2 * OTHERS


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("experts", [16, 4, 1])
def test_shardings_save_the_same_bytes_and_load_the_heaviest_rank_less_and_less(case: Case, experts: int) -> None:
    saved = [rank_bytes(case, experts, sharding) for sharding in Sharding]
    total = total_share(experts) * 14 * (EXPERTS + OTHERS)
    for of_sharding in saved:
        assert of_sharding.sum(axis=1).mean() == pytest.approx(total, rel=1e-6)
    heaviest = [int(of_sharding.max()) for of_sharding in saved]
    assert heaviest == sorted(heaviest, reverse=True)
    assert (heaviest[1] < heaviest[0]) == (case.groups > 1), "more groups share experts out"


def test_a_checkpoint_with_one_expert_has_the_published_sizes() -> None:
    assert total_share(1) == pytest.approx(0.423, abs=0.003)
    assert total_share(1, optimizer=False) == pytest.approx(0.88, abs=0.005)
    assert total_share(1, weights=False) == pytest.approx(0.54, abs=0.005)
    assert total_share(1, masters=True) == pytest.approx((OTHERS + EXPERTS / 16) / (OTHERS + EXPERTS))
