"""Operators have the bytes of their real tensors and unique names; impossible ones are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from moevement_core import precision
from moevement_core.errors import ConfigError, OperatorError
from moevement_core.operators import Operator, OperatorKind, OperatorTable, StateBytes, expert_name, gate_name

SOME = StateBytes(compute=2, master=4, optimizer=8)


def test_live_tensors_are_weighed_by_their_own_dtypes() -> None:
    weight, scale = torch.empty(10, 3, dtype=torch.float8_e4m3fn), torch.empty(1)
    moments = [torch.empty(30), torch.empty(30, dtype=torch.float16)]
    assert StateBytes.of_tensors([weight, scale], [torch.empty(30)], moments) == StateBytes(34, 120, 180)


def test_an_operator_that_is_not_trained_has_its_compute_weights_as_full_state() -> None:
    state = StateBytes.of_tensors([torch.empty(5, dtype=torch.bfloat16)], [], [])
    assert state.full == state.compute == 10


@pytest.mark.parametrize(
    ("sizes", "pattern"),
    [
        ((-1, 4, 8), "-1"),
        ((2, 4.5, 8), "4.5"),
        ((2, 4, float("nan")), "nan"),
        ((16, 4, 8), r"\b12 bytes\b.*\b16 bytes\b"),
    ],
)
def test_sizes_that_cannot_be_are_refused(sizes: tuple[Any, Any, Any], pattern: str) -> None:
    with pytest.raises(OperatorError, match=pattern):
        StateBytes(*sizes)


def test_names_are_ordered_as_numbers_whatever_the_order_they_come_in() -> None:
    names = [expert_name(10, 0), expert_name(2, 11), "head", gate_name(2), expert_name(2, 2), "embedding"]
    table = OperatorTable(Operator(name, OperatorKind.EXPERT, SOME) for name in names)
    assert table.names == tuple(
        ["embedding", "head", expert_name(2, 2), expert_name(2, 11), gate_name(2), expert_name(10, 0)]
    )


def test_a_table_of_a_stage_has_a_row_for_each_rank() -> None:
    shared = Operator("embedding", OperatorKind.EMBEDDING, SOME)
    own = [Operator(expert_name(0, rank), OperatorKind.EXPERT, StateBytes(1, 1, rank)) for rank in range(2)]
    table = OperatorTable.of_ranks([OperatorTable(row) for row in [[shared, own[0]], [own[1], shared]]])
    np.testing.assert_array_equal(table.full, [[12, 1, 0], [12, 0, 2]])
    np.testing.assert_array_equal(table.compute, [[2, 1, 0], [2, 0, 1]])


def test_a_name_twice_two_kinds_and_no_operators_are_refused() -> None:
    gate = Operator("g", OperatorKind.GATE, SOME)
    with pytest.raises(OperatorError, match=r"\bg\b"):
        OperatorTable([gate, gate])
    with pytest.raises(OperatorError, match=r"\bg\b.*\bgate\b.*\bhead\b"):
        OperatorTable.of_ranks([OperatorTable(row) for row in [[gate], [Operator("g", OperatorKind.HEAD, SOME)]]])
    with pytest.raises(OperatorError):
        OperatorTable([])
    with pytest.raises(OperatorError):
        OperatorTable.of_ranks([])
    with pytest.raises(OperatorError, match="''"):
        Operator("", OperatorKind.GATE, SOME)
    with pytest.raises(OperatorError, match=r"\bg\b.*'router'"):
        Operator("g", "router", SOME)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("regime", "compute", "full"),
    [("mixed", 2, 12), ("fp32", 4, 12), ("table7-row1", 2, 6), ("FP8/FP32/FP32+FP32", 1, 12), ("table7-row3", 1, 10),
     ("table7-row4", 1, 5), ("fp8/fp8/fp8+fp16", 1, 4)],
)  # fmt: skip
def test_regimes_have_the_bytes_per_parameter_of_the_paper(regime: str, compute: int, full: int) -> None:
    matrices = [precision.TensorShape(2_000_000, 1000), precision.TensorShape(1_000_000, 1000)]
    state = precision.parse(regime).state_bytes(matrices)
    assert state.compute / 3e6 == pytest.approx(compute, rel=1e-4)
    assert state.full / 3e6 == pytest.approx(full, rel=1e-4)


@pytest.mark.parametrize(
    ("scaling", "compute"),
    [("tensor", 300 * 200 + 4 + 2 * 200), ("block", 300 * 200 + 3 * 2 * 4 + 2 * 200), ("mx", 2 * 300 * 200 + 2 * 200)],
)
def test_linear_layers_are_quantised_and_narrow_state_has_scales(scaling: str, compute: int) -> None:
    """Check the bytes of each scaling; MXFP8 weights are saved as the BF16 values of which both forms are computed."""
    regime = precision.parse("FP8/FP32/FP8+FP16", precision.Scaling(scaling))
    count = 300 * 200 + 200
    tensors = [precision.TensorShape(300 * 200, 300), precision.TensorShape(200)]
    assert regime.state_bytes(tensors) == StateBytes(compute, 4 * count, 3 * count + 2 * 2 * 4, 4 * count)


def test_a_shard_weighs_its_part_rounded_up() -> None:
    assert precision.MIXED.state_bytes([precision.TensorShape(10)], shards=3) == StateBytes(8, 16, 32, 16)


def test_a_rank_that_owns_nothing_of_a_weight_in_fp8_has_its_scales() -> None:
    regime = precision.parse("table7-row2")
    weight, norm = precision.TensorShape(100, 10), precision.TensorShape(100)
    assert regime.part_bytes([(weight, 0), (norm, 0)]) == StateBytes(4, 0, 4)
    assert regime.part_bytes([(weight, 0), (norm, 50)]) == StateBytes(4 + 100, 200, 400 + 4, 200)


def test_a_sliver_of_a_blockwise_weight_weighs_what_is_saved_of_it() -> None:
    """Check that the scales of a weight do not enlarge the full state of an operator that has other weights, too."""
    regime = precision.parse("table7-row2", precision.Scaling.BLOCK)
    parts = [(precision.TensorShape(4096 * 4096, 4096), 64), (precision.TensorShape(4096), 4096)]
    assert regime.part_bytes(parts).full == 12 * (64 + 4096)


@pytest.mark.parametrize(
    ("text", "pattern"),
    [("fp64/fp32/fp32+fp32", r"'fp64'.*\bfp32\b.*\bfp8\b"), ("fp8", r"'fp8'.*\btable7-row1\b"),
     ("fp8/fp16/fp8", r"'fp8/fp16/fp8'.*\btable7-row1\b"), ("", r"''.*\btable7-row1\b")],
)  # fmt: skip
def test_a_regime_that_is_none_is_refused_with_those_there_are(text: str, pattern: str) -> None:
    with pytest.raises(ConfigError, match=pattern):
        precision.parse(text)
