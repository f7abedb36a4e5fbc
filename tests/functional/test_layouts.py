"""Every parallel layout computes what one rank computes, from the same weights on the same global batches.

All runs are in FP32. Pipelining and expert parallelism only move the arithmetic, so most layouts agree to the last bit.
Data and tensor parallelism cut sums into parts; the new order moves a loss of about 5 by an ULP or two.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moevement_core.run.run_record import RunRecord
from moevement_core.run.verify import compare
from tests.functional.layouts import (
    ALLGATHER,
    DISTRIBUTED_OPTIMIZER,
    EP2,
    FULL_RECOMPUTE,
    INTERLEAVED,
    OVERLAP,
    PP2,
    SELECTIVE_RECOMPUTE,
    TP2,
    ULPS,
)
from tests.training import losses, train

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "pipeline": (2, PP2),
    "pipeline-4": (4, {"pipeline_model_parallel_size": 4}),
    "interleaved": (2, INTERLEAVED),
    "interleaved-batched-p2p": (
        4,
        {
            "pipeline_model_parallel_size": 4,
            "num_layers": 8,
            "num_virtual_stages_per_pipeline_rank": 2,
            "no_overlap_p2p_communication": True,
        },
    ),
    "expert": (2, EP2),
    "expert-allgather": (2, EP2 | ALLGATHER),
    "expert-4": (4, {"expert_model_parallel_size": 4} | DISTRIBUTED_OPTIMIZER),
    "data": (2, {}),
    "data-distributed-optimizer": (2, DISTRIBUTED_OPTIMIZER),
    "data-overlap": (2, OVERLAP),
    "tensor": (2, TP2),
    "tensor-expert-tensor": (2, TP2 | ALLGATHER | {"expert_tensor_parallel_size": 2}),
    "tensor-expert": (2, TP2 | EP2),
    "pipeline-expert": (4, PP2 | EP2 | DISTRIBUTED_OPTIMIZER),
    "pipeline-tensor-expert": (4, PP2 | TP2 | EP2),
    "interleaved-expert-overlap": (4, INTERLEAVED | EP2 | OVERLAP),
    "pipeline-full-recompute": (2, PP2 | FULL_RECOMPUTE),
    "expert-selective-recompute": (2, EP2 | SELECTIVE_RECOMPUTE),
}


@pytest.fixture(scope="module")
def reference(same_weights: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    return losses(train(1, tmp_path_factory.mktemp("one-rank"), **same_weights))


QUICK = ("pipeline-full-recompute",)
"""Layouts for every run of the tests; the others mostly test Megatron over gloo, and are for ``make test-full``."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in QUICK else [pytest.mark.full])
        for name in LAYOUTS
        if "num_layers" not in LAYOUTS[name][1]
    ],
)
def test_a_layout_agrees_with_one_rank(
    name: str, reference: dict[int, float], same_weights: dict[str, Any], tmp_path: Path
) -> None:
    nproc, layout = LAYOUTS[name]
    record = train(nproc, tmp_path, **same_weights | layout)
    assert losses(record) == pytest.approx(reference, abs=ULPS, rel=0)
    assert reference[4] < reference[1]


@pytest.mark.full
def test_batched_p2p_between_four_interleaved_stages_agrees_with_one_rank(tmp_path: Path) -> None:
    from tests.training import start_from

    nproc, layout = LAYOUTS["interleaved-batched-p2p"]
    weights = start_from(tmp_path / "weights", num_layers=8)
    reference = train(1, tmp_path / "one", num_layers=8, **weights)
    record = train(nproc, tmp_path / "four", **weights | layout)
    assert losses(record) == pytest.approx(losses(reference), abs=ULPS, rel=0)


def test_a_wrong_layout_would_be_seen(
    reference: dict[int, float], same_weights: dict[str, Any], tmp_path: Path
) -> None:
    """Check that the comparison can fail: a learning rate off by a thousandth is beyond the tolerance."""
    other = losses(train(1, tmp_path, **same_weights, lr=5.005e-3))
    assert other != pytest.approx(reference, abs=ULPS, rel=0)


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("interleaved-expert-overlap", {"bf16": True}),
        pytest.param("pipeline-tensor-expert", {}, marks=pytest.mark.full),
        pytest.param("interleaved", {"fp16": True, "initial_loss_scale": 65536}, marks=pytest.mark.full),
    ],
    ids=["interleaved-expert-overlap-bf16", "pipeline-tensor-expert-fp32", "interleaved-fp16"],
)
def test_the_same_seed_twice_is_the_same_run(name: str, precision: dict[str, Any], tmp_path: Path) -> None:
    nproc, layout = LAYOUTS[name]
    flags = layout | precision | {"hidden_dropout": 0.1, "attention_dropout": 0.1}
    verdict = compare(*(train(nproc, tmp_path / which, **flags) for which in ("a", "b")))
    assert verdict.equal, verdict.first_difference


def test_another_seed_is_another_run(tmp_path: Path) -> None:
    a, b = (train(2, tmp_path / str(seed), **PP2, seed=seed) for seed in (1234, 4321))
    assert not compare(a, b).equal


@pytest.mark.full
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_twice_is_the_same_run(name: str, tmp_path: Path) -> None:
    nproc, layout = LAYOUTS[name]
    a, b = (train(nproc, tmp_path / which, bf16=True, **layout) for which in ("a", "b"))
    assert compare(a, b).equal


def test_experts_of_different_ranks_start_different(tmp_path: Path) -> None:
    """Check that no weights of two ranks' experts are equal; a broken RNG tracker would make all of them equal."""
    from tests.functional.bodies import expert_weights_after_one_iteration
    from tests.harness import run_ranks
    from tests.training import SCRIPT, flags

    argv = [str(SCRIPT), *flags(expert_model_parallel_size=2, train_iters=1, num_experts=4, lr=1e-9)]
    outcomes = run_ranks(expert_weights_after_one_iteration, 2, argv, init_process_group=False)
    first, second = (outcome.result for outcome in outcomes)
    assert first
    assert first.keys() == second.keys()
    for name in first:
        assert not (first[name] == second[name]).all(), name


def test_replicated_weights_stay_equal_over_tensor_parallel_ranks_under_dropout(tmp_path: Path) -> None:
    """Check that without sequence parallelism both ranks drop the same hidden values, though only one reads data."""
    from tests.functional.bodies import replicated_weights
    from tests.harness import run_ranks
    from tests.training import SCRIPT, flags

    dense = dict.fromkeys(
        ("num_experts", "moe_router_topk", "moe_aux_loss_coeff", "moe_token_dispatcher_type", "moe_ffn_hidden_size",
         "moe_router_load_balancing_type"), False,
    )  # fmt: skip
    argv = [
        str(SCRIPT),
        *flags(**dense, tensor_model_parallel_size=2, make_vocab_size_divisible_by=8, hidden_dropout=0.3),
    ]
    outcomes = run_ranks(replicated_weights, 2, argv, init_process_group=False)
    first, second = (outcome.result for outcome in outcomes)
    assert first
    for name in first:
        assert (first[name] == second[name]).all(), name


def test_a_run_leaves_its_record(tmp_path: Path) -> None:
    record = train(2, tmp_path, expert_model_parallel_size=2, eval_iters=1, fp16=True, initial_loss_scale=2**40)
    lines = record.metrics()
    assert [line["iteration"] for line in lines] == [1, 2, 3, 4]
    # The first loss scales overflow: these iterations are committed as skipped, and have a line each.
    assert [line["skipped"] for line in lines[:2]] == [True, True]
    assert lines[0]["loss_scale"] >= 2 * lines[-1]["loss_scale"]
    assert RunRecord(tmp_path).summary()["validation_loss"] > 0
    assert [event["event"] for event in record.events()] == ["start", "evaluation", "evaluation", "end"]
    assert (tmp_path / "config.yaml").read_text().count("\n") > 500
    assert list((tmp_path / "tensorboard").iterdir())
    assert '"rank": 1' in (tmp_path / "ranks.json").read_text()
