"""Small sums over ranks are added in the order of ranks if the job asks for it. The library adds all others."""

from __future__ import annotations

from argparse import Namespace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.moevement import rank_order
from tests.harness import run_ranks

CASES = ("sum", "mean", "maximum", "whole numbers", "larger", "asynchronous", "two ranks", "not asked for")


def _sums(cases: tuple[str, ...]) -> dict[str, tuple[bool, list[float]]]:
    """Return, for each case, True if the library summed, and the result."""
    rank, two = dist.get_rank(), dist.new_group([0, 1])
    original = dist.all_reduce
    by_library: list[bool] = []

    def counted(*args: Any, **kwargs: Any) -> Any:
        by_library.append(True)
        return original(*args, **kwargs)

    args = Namespace()
    summing = partial(rank_order.sum_in_rank_order, lambda: args, counted)
    values = torch.tensor([0.1, 1e8, -3.0]).reshape(3, 1) * (rank + 1) / 7
    results: dict[str, tuple[bool, list[float]]] = {}
    for case in cases:
        by_library.clear()
        args.moevement_sums_in_rank_order = case != "not asked for"
        rank_order.MOST_GATHERED_BYTES = 8 if case == "larger" else 1 << 20
        tensor = torch.cat([values, values], dim=1)[:, :1] if case == "sum" else values.clone()  # not contiguous
        tensor = tensor.long() if case == "whole numbers" else tensor
        operation = {"mean": dist.ReduceOp.AVG, "maximum": dist.ReduceOp.MAX}.get(case, dist.ReduceOp.SUM)
        if case == "two ranks" and rank == 2:
            continue
        work = summing(tensor, operation, two if case == "two ranks" else None, case == "asynchronous")
        if work is not None:
            work.wait()
        results[case] = bool(by_library), tensor.flatten().tolist()
    return results


@pytest.fixture(scope="module")
def outcomes() -> list[dict[str, tuple[bool, list[float]]]]:
    return [outcome.result for outcome in run_ranks(_sums, 3, CASES)]


@pytest.mark.parametrize("case", CASES)
def test_who_sums(case: str, outcomes: list[dict[str, tuple[bool, list[float]]]]) -> None:
    by_library = {outcome[case][0] for outcome in outcomes if case in outcome}
    assert by_library == {case not in ("sum", "mean")}


def test_the_sum_is_that_of_the_ranks_in_their_order(outcomes: list[dict[str, tuple[bool, list[float]]]]) -> None:
    of_ranks = torch.stack([torch.tensor([0.1, 1e8, -3.0]).reshape(3, 1) * (rank + 1) / 7 for rank in range(3)])
    for outcome in outcomes:
        assert outcome["sum"][1] == of_ranks.sum(dim=0).flatten().tolist()
        assert outcome["mean"][1] == of_ranks.mean(dim=0).flatten().tolist()
