"""Names of FSDP that the binding uses exist, unknown shards are refused, and elements of a shard have their place."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from moevement_core.elastic.layout import RankLayout
from moevement_core.errors import ConfigError
from moevement_core.policy.schedule import Saved
from moevement_core.snapshot.snapshot import StateTensor
from moevement_core.trainer import fsdp
from moevement_core.trainer.first_state import make_state
from moevement_core.trainer.fsdp import (
    ShardedRows,
    begin_sharding,
    forget_pass,
    holders,
    refuse_other_shards,
    roots,
    used_names,
)


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def four_ranks() -> Iterator[None]:
    """Let this process be rank 0 of four ranks whose collectives communicate nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


def test_the_outermost_sharded_modules_are_roots(one_rank: None) -> None:
    inner = nn.Linear(4, 4)
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(inner))
    fully_shard(inner)
    assert list(roots(model)) == [inner]
    fully_shard(model)
    assert list(roots(model)) == [model]
    refuse_other_shards(model)


def test_a_tensor_that_is_sharded_in_another_way_is_refused(one_rank: None) -> None:
    model = nn.Linear(4, 4)
    mesh = init_device_mesh("cpu", (1,))
    model.weight = nn.Parameter(distribute_tensor(model.weight.data, mesh, [Replicate()]))
    with pytest.raises(ConfigError, match=r"\bweight\b.*\bfully_shard\b"):
        refuse_other_shards(model)


def sharded_layer(**options: Any) -> Any:
    return fully_shard(nn.Linear(4, 4), **options)


def test_an_optimizer_that_communicates_in_its_step_is_refused() -> None:
    """Muon multiplies whole matrices, so it gathers shards."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        fully_shard(model := nn.Linear(4, 4, bias=False))
        make_state(torch.optim.AdamW(model.parameters()))
        with pytest.raises(ConfigError, match=r"\bMuon\b.*\bAdamW\b"):
            make_state(torch.optim.Muon(model.parameters()))
    finally:
        dist.destroy_process_group()


def test_ranks_in_one_column_of_the_mesh_hold_equal_shards() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=6)
    try:
        mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=("copies", "shards"))
        fully_shard(model := nn.Linear(4, 4), mesh=mesh)
        assert holders(model.weight) == {1, 3, 5}
        assert holders(nn.Parameter(torch.zeros(1))) == set(range(6))
    finally:
        dist.destroy_process_group()


def test_a_name_that_this_version_of_torch_lacks_is_refused(one_rank: None) -> None:
    model = sharded_layer()
    refuse_other_shards(model)
    del model._get_fsdp_state()._fsdp_param_groups[0]._all_gather_result
    with pytest.raises(ConfigError, match=r"\bFSDPParamGroup\b.*\b_all_gather_result\b"):
        refuse_other_shards(model)


def test_a_separate_group_for_reductions_is_refused(one_rank: None) -> None:
    model = sharded_layer()
    model.set_separate_reduce_scatter_group()
    with pytest.raises(ConfigError, match=r"\bset_separate_reduce_scatter_group\b"):
        refuse_other_shards(model)
    model.set_separate_reduce_scatter_group(False)
    refuse_other_shards(model)


def test_an_interruption_before_the_first_pass_leaves_nothing_to_drop(one_rank: None) -> None:
    model = sharded_layer()
    begin_sharding(model)
    forget_pass(model)
    model(torch.ones(1, 4)).sum().backward()
    assert model.weight.grad is not None


def test_every_private_name_is_checked(one_rank: None) -> None:
    """The unsharded parameter appears with the first pass, so its field is looked up after a pass instead."""
    model = sharded_layer()
    checked = {name for root in roots(model) for _, names in used_names(root) for name in names}
    attributes = (
        node for node in ast.walk(ast.parse(Path(fsdp.__file__).read_text())) if isinstance(node, ast.Attribute)
    )
    private = {node.attr for node in attributes if node.attr.startswith("_") and not node.attr.startswith("__")}
    assert private - {"_shapes"} <= checked
    model(torch.ones(1, 4)).sum().backward()
    for parameter in model._get_fsdp_state()._fsdp_param_groups[0].fsdp_params:
        assert hasattr(parameter, "_unsharded_param")


def test_the_remains_of_an_interrupted_pass_are_dropped(one_rank: None) -> None:
    """A gradient in another dtype than the parameter is accumulated apart from ``grad``, as in mixed precision."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = sharded_layer(mp_policy=policy)
    model.set_requires_gradient_sync(False)
    model(torch.ones(1, 4)).sum().backward()
    forget_pass(model)
    model.set_requires_gradient_sync(True)
    model(torch.ones(1, 4)).sum().backward()
    again = sharded_layer(mp_policy=policy)
    again(torch.ones(1, 4)).sum().backward()
    for left, right in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(left.grad.full_tensor(), right.grad.full_tensor())


def test_experts_that_are_sharded_twice_are_accepted(four_ranks: None) -> None:
    """Divide experts among two ranks, as expert parallelism does, and then each half again by ``fully_shard``."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "experts"))
    model = nn.Linear(4, 8)
    for name, parameter in list(model.named_parameters()):
        setattr(model, name, nn.Parameter(distribute_tensor(parameter.data, mesh["experts"], [Shard(0)])))
    fully_shard(model, mesh=mesh["rows"])
    assert isinstance(model.weight, DTensor)
    assert model.weight.placements != (Shard(0), Shard(0))
    assert model.weight.to_local().shape == (2, 4)
    refuse_other_shards(model)


def test_shards_over_a_part_of_the_ranks_are_refused(four_ranks: None) -> None:
    model = nn.Linear(4, 4)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "rows"))
    fully_shard(model, mesh=mesh["rows"])
    with pytest.raises(ConfigError, match=r"\bweight\b.*\bpipeline\b"):
        refuse_other_shards(model)


def test_parameters_with_different_copies_are_refused(four_ranks: None) -> None:
    """Divide a matrix among two ranks and copy its bias, as tensor parallelism does, and then shard both by rows."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    model = nn.Linear(4, 8)
    for parameter, placement in (("weight", Shard(1)), ("bias", Replicate())):
        whole = getattr(model, parameter).data
        setattr(model, parameter, nn.Parameter(distribute_tensor(whole, mesh["columns"], [placement])))
    fully_shard(model, mesh=mesh["rows"])
    with pytest.raises(ConfigError, match=r"\bbias\b.*\btensor parallelism\b"):
        refuse_other_shards(model)


@pytest.mark.parametrize(("rank", "world", "begin"), [(0, 2, 0), (1, 2, 15), (3, 4, 25), (7, 8, 25)])
def test_a_shard_begins_at_its_first_row(rank: int, world: int, begin: int) -> None:
    """Five rows of five elements: later ranks have fewer rows, or none."""
    recut = ShardedRows(dict, {}, {("layer", "0/weight"): (5, 5)})
    saved = StateTensor("layer", Saved.FULL, "0/weight", torch.zeros(0))
    assert recut.saved_piece(saved, RankLayout(rank, world, 0)).begin == begin
    whole = StateTensor("layer", Saved.FULL, "0/step", torch.zeros(1))
    assert recut.saved_piece(whole, RankLayout(rank, world, 0)).begin == 0
