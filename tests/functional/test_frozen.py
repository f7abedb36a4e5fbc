"""Frozen operators skip the computation of weight gradients; they do not compute and discard them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.functional.bodies import work_of_frozen_operators
from tests.harness import run_ranks
from tests.training import SCRIPT, flags

LAYERS, EXPERTS = 4, 4
PRODUCTS = {
    # Matrix products of weight gradients: two linear layers of an expert, the router, two of attention, one output.
    "nothing": 0, "one expert": 2, "experts": 2 * LAYERS * EXPERTS, "gate": LAYERS, "non_expert": 2 * LAYERS,
    "embedding": 0, "head": 1,
    "everything": 2 * LAYERS * EXPERTS + LAYERS + 2 * LAYERS + 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def work() -> dict[str, dict[str, Any]]:
    # Enough tokens that every expert gets some.
    words = flags(train_iters=2, moevement_sparse_ckpt=True, moevement_replicas=0, moevement_window=2, bf16=True,
                  micro_batch_size=4, global_batch_size=8)  # fmt: skip
    (outcome,) = run_ranks(work_of_frozen_operators, 1, [str(SCRIPT), *words], init_process_group=False)
    return dict(outcome.result)


@pytest.mark.parametrize("case", PRODUCTS)
def test_exactly_the_products_of_weight_gradients_are_left_out(work: dict[str, dict[str, Any]], case: str) -> None:
    assert work["nothing"]["products"] - work[case]["products"] == PRODUCTS[case]


@pytest.mark.parametrize("case", PRODUCTS)
def test_no_gradient_is_accumulated_for_a_frozen_operator_and_every_one_for_an_active(
    work: dict[str, dict[str, Any]], case: str
) -> None:
    result, nothing = work[case], work["nothing"]
    frozen = set(result["frozen"])
    assert [name for name in nothing["accumulated"] if name not in frozen] == result["accumulated"]
    assert not frozen & set(result["accumulated"])
    for name, gradient in result["gradients"].items():
        assert gradient == (0.0 if name in frozen else nothing["gradients"][name]), name
