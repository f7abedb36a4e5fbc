"""Guarantees after a failure: the table of the docs, the row of a job, and the ranks of a layout's widest sum."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import pytest

from megatron.moevement import arguments, rank_order
from megatron.moevement.rank_order import widest_sum
from moevement_core.run.guarantees import SAFE_SUM, Arithmetic, Promise, ReplacementPlace, Restored, of_job
from moevement_core.strategies.config import RecoveryKind
from scripts import guarantees_table

ARGS: dict[str, Any] = {
    "world_size": 16, "tensor_model_parallel_size": 1, "context_parallel_size": 1, "pipeline_model_parallel_size": 2,
    "expert_model_parallel_size": 8, "expert_tensor_parallel_size": None, "use_distributed_optimizer": True,
    "ddp_reduce_scatter_with_fp32_accumulation": True, "moevement_sums_in_rank_order": True,
}  # fmt: skip


def test_the_table_of_the_page_is_up_to_date() -> None:
    page = guarantees_table.OUTPUT.read_text(encoding="utf-8")
    assert page == guarantees_table.page(), "run: python scripts/guarantees_table.py"


@pytest.mark.parametrize(
    ("changes", "widest"),
    [
        ({}, SAFE_SUM),
        ({"moevement_sums_in_rank_order": False}, 16),
        ({"ddp_reduce_scatter_with_fp32_accumulation": False}, 8),
        ({"use_distributed_optimizer": False}, 8),
        ({"tensor_model_parallel_size": 2}, SAFE_SUM),
        ({"tensor_model_parallel_size": 4}, 4),
        ({"tensor_model_parallel_size": 4, "expert_tensor_parallel_size": 1}, 4),
        ({"context_parallel_size": 4}, 4),
        ({"expert_tensor_parallel_size": 4, "expert_model_parallel_size": 2}, 4),
        (
            {"ddp_reduce_scatter_with_fp32_accumulation": False, "tensor_model_parallel_size": 2,
             "expert_tensor_parallel_size": 1, "expert_model_parallel_size": 1}, 8,
        ),
    ],
)  # fmt: skip
def test_the_widest_sum_is_of_the_largest_group_that_nothing_orders(changes: dict[str, Any], widest: int) -> None:
    assert widest_sum(Namespace(**ARGS | changes)) == widest


@pytest.mark.parametrize("place", ReplacementPlace)
@pytest.mark.parametrize("is_deterministic", [False, True])
@pytest.mark.parametrize("widest", [2, 3])
def test_redo_restores_equal_bits_everywhere(place: ReplacementPlace, is_deterministic: bool, widest: int) -> None:
    gpus = Arithmetic(uses_gpus=True, is_deterministic=is_deterministic, widest_sum=widest)
    assert gpus.restored(Restored.REDO, place) is Promise.EQUAL
    assert Arithmetic(uses_gpus=False).later(Restored.REPLAY, place) is Promise.EQUAL


def test_a_job_says_what_holds_by_where_its_replacements_run() -> None:
    assert len(of_job(Arithmetic(uses_gpus=False), Restored.REPLAY)) == 1
    wide = of_job(Arithmetic(uses_gpus=True, widest_sum=8), Restored.REPLAY)
    assert [str(Promise.EQUAL) in line for line in wide[:3]] == [True, False, False]


@pytest.mark.parametrize(
    ("strategy", "optimizer", "recovery"),
    [
        ("moevement", "adam", RecoveryKind.AUTO), ("moevement", "muon", RecoveryKind.REPLAY),
        ("gemini", "adam", RecoveryKind.REPLAY), ("none", "adam", RecoveryKind.REPLAY),
    ],
)  # fmt: skip
def test_on_gpus_state_is_restored_without_a_replay_where_that_can_be(
    strategy: str, optimizer: str, recovery: RecoveryKind
) -> None:
    args = Namespace(moevement_strategy=strategy, optimizer=optimizer)
    assert arguments.recovery_on_gpus(args) is recovery


@pytest.mark.parametrize(("is_cpu", "words", "recovery"), [
    (True, [], "replay"), (False, [], "auto"), (False, ["--moevement-recovery", "replay"], "replay"),
])  # fmt: skip
def test_what_the_flags_leave_open_is_chosen_by_device(
    is_cpu: bool, words: list[str], recovery: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron.training import arguments as megatron_arguments

    monkeypatch.setattr(arguments.platform, "is_cpu", lambda: is_cpu)
    monkeypatch.setattr("sys.argv", ["pretrain_gpt.py", "--num-layers", "2", *words])
    monkeypatch.setattr("megatron.training.global_vars._GLOBAL_ARGS", None)
    original = getattr(megatron_arguments.parse_args, "_moevement_original", megatron_arguments.parse_args)
    assert arguments.parse_args_with_ours(original).moevement_recovery == recovery


def test_a_job_on_gpus_is_described_by_its_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    args = Namespace(**ARGS, deterministic_mode=True)
    assert rank_order.arithmetic_of(args) == Arithmetic(uses_gpus=False)
    monkeypatch.setattr(rank_order.platform, "is_cpu", lambda: False)
    assert rank_order.arithmetic_of(args) == Arithmetic(uses_gpus=True, is_deterministic=True, widest_sum=SAFE_SUM)
