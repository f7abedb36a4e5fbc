"""Sizes that an elastic job may have, and the member that becomes each rank after a change of size."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import pytest

from megatron.moevement.elastic.grid import can_train, grid_of
from megatron.moevement.elastic.recut import Shard, layout_from_flags
from moevement_core.elastic.layout import RankLayout
from moevement_core.rendezvous.resizing import Grid


def args(**changes: Any) -> Namespace:
    """Return the arguments of a job of eight ranks in two stages, with ``changes``."""
    return Namespace(
        **{
            "moevement_elastic": True, "moevement_join_wait": 30.0, "moevement_expert_slots": None,
            "moevement_min_replicas": 2, "moevement_rebalance_interval": 200, "moevement_expert_placement": None,
            "tensor_model_parallel_size": 1, "context_parallel_size": 1, "expert_model_parallel_size": 1,
            "expert_tensor_parallel_size": 1, "pipeline_model_parallel_size": 2, "world_size": 8, "num_experts": 8,
            "global_batch_size": 24, "micro_batch_size": 1, "virtual_pipeline_model_parallel_size": None,
            "microbatch_group_size_per_vp_stage": None, "num_distributed_optimizer_instances": 1,
            "eval_global_batch_size": None, "eval_micro_batch_size": None,
        }
        | changes
    )  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "unit", "sizes"),
    [
        ({}, 1, (1, 2, 3, 4)),
        ({"global_batch_size": 16}, 1, (1, 2, 4)),
        ({"tensor_model_parallel_size": 2}, 2, (1, 2)),
        ({"expert_model_parallel_size": 2}, 2, (1, 2)),
        ({"moevement_expert_slots": 3}, 1, (3, 4)),  # two ranks have six slots for eight experts
        # Four replicas would have 3 micro-batches each, which two interleaved stages cannot divide.
        ({"virtual_pipeline_model_parallel_size": 2, "global_batch_size": 12}, 1, (1, 2, 3)),
        ({"num_distributed_optimizer_instances": 2}, 1, (2, 4)),
        ({"eval_global_batch_size": 8}, 1, (1, 2, 4)),
    ],
)
def test_sizes(changes: dict[str, Any], unit: int, sizes: tuple[int, ...]) -> None:
    grid = grid_of(args(**changes))
    assert grid is not None
    assert (grid.unit, grid.sizes) == (unit, sizes)
    assert Grid.decode(grid.encode()) == grid


def test_every_size_can_train_that_is_left() -> None:
    assert not can_train(args(), 5)
    assert grid_of(args(moevement_elastic=False)) is None


def test_survivors_keep_their_stage_and_order() -> None:
    """Check two stages of three ranks that lose rank 1 of the first and rank 5 of the second, while member 9 waits."""
    grid = Grid(2, 1, (1, 2, 3))
    survivors = {0: 10, 2: 12, 3: 13, 4: 14}
    assert grid.units(len(survivors)) == 2
    assert grid.roster(survivors, 6, [9], 2) == {0: 10, 1: 12, 2: 13, 3: 14}
    assert grid.units(3) == 1
    assert grid.roster({0: 10, 1: 11, 2: 12}, 6, [9], 2) == {0: 10, 1: 11, 2: 12, 3: 9}, (
        "a stage of which nobody is left"
    )


def test_half_a_unit_is_taken_apart() -> None:
    """Check replicas of two ranks: after the death of one rank, the other joins another replica or waits."""
    grid = Grid(1, 2, (1, 2))
    assert grid.roster({1: 11, 2: 12, 3: 13}, 4, [], 1) == {0: 12, 1: 13}
    assert grid.roster({1: 11, 2: 12, 3: 13}, 4, [9], 2) == {0: 12, 1: 13, 2: 11, 3: 9}


def test_where_a_rank_of_a_window_on_disk_stood() -> None:
    """Check a job whose tensor, pipeline, expert and expert tensor parallelism each have size 2.

    Dense parameters have two data-parallel ranks, and those of experts have one.
    """
    settings = {
        "world_size": 8, "pipeline_model_parallel_size": 2, "tensor_model_parallel_size": 2,
        "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 2,
    }  # fmt: skip
    shards = {7: Shard(tensor=1, expert=1, expert_tensor=1), 2: Shard(tensor=0, expert=1, expert_tensor=0)}
    for rank, shard in shards.items():
        assert layout_from_flags(settings, rank) == RankLayout(rank, 8, stage=rank // 4, shard=tuple(shard))
