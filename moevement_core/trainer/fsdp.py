"""Modules that torch's ``fully_shard`` (FSDP2) has sharded over all ranks, as :class:`TorchBinding` sees them.

Each rank holds a shard of every parameter, a range of its rows, and updates this shard. So the local shards are a
rank's state. On a mesh of two dimensions (hybrid sharding, HSDP), all ranks with one coordinate in the second dimension
hold equal shards. FSDP reduces gradients within the backward pass, and keeps references to process groups and the
remains of an interrupted pass; both are renewed here after a failure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import Any, override

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from moevement_core.elastic.exchange import Piece
from moevement_core.elastic.layout import RankLayout
from moevement_core.engine.layout import OperatorState
from moevement_core.errors import ConfigError
from moevement_core.snapshot.snapshot import StateTensor
from moevement_core.trainer.recut import WholeTensors

TESTED = "2.13.0 and 2.15.0"
"""Versions of torch with which tests have trained and recovered sharded models."""


def refuse_other_shards(model: nn.Module) -> None:
    """Refuse sharded parameters other than those of ``fully_shard`` over all ranks of the job.

    Raises:
        ConfigError: a parameter is sharded in another way, FSDP reduces gradients in a group of its own, or this
            version of torch lacks a name that this module uses.
    """
    sharded = [(name, each) for name, each in model.named_parameters() if isinstance(each, DTensor)]
    of_fsdp = {id(each) for root in roots(model) for each in root.parameters()}  # type: ignore[attr-defined]
    for name, parameter in sharded:
        mesh, placements = parameter.device_mesh, parameter.placements
        if id(parameter) not in of_fsdp:
            raise ConfigError(
                f"parameter {name} is sharded, but not by fully_shard; TorchBinding knows no other shards: write a "
                "Binding (docs/own_binding.md)"
            )
        if mesh.size() != dist.get_world_size():
            raise ConfigError(
                f"parameter {name} has placements {placements} on a mesh of {mesh.size()} ranks; TorchBinding needs "
                f"shards on a mesh of all {dist.get_world_size()} ranks: give fully_shard such a mesh, or leave out "
                "mesh, and pipeline parallelism"
            )
        if holders(parameter) != holders(sharded[0][1]):
            raise ConfigError(
                f"ranks {sorted(holders(parameter))} hold the same shard of parameter {name}, and ranks "
                f"{sorted(holders(sharded[0][1]))} that of {sharded[0][0]}; TorchBinding needs the same ranks for all "
                "shards: leave out tensor parallelism"
            )
    for root in roots(model):
        _check_names(root)


def used_names(root: FSDPModule) -> Iterator[tuple[Any, tuple[str, ...]]]:
    """Yield the objects of FSDP that this module works on, each with the names that it uses there.

    Most names are private to torch. A renamed field would otherwise be noticed only after a failure, or never, because
    Python lets this module set a field that nothing reads.
    """
    yield root, ("_get_fsdp_state", "reset_iter_state")  # The second name is public, and new in torch 2.13.
    state = root._get_fsdp_state()
    yield state, ("_fsdp_param_groups", "_lazy_init", "_state_ctx")
    yield state._state_ctx, ("all_states",)
    for group in state._fsdp_param_groups:
        yield group, ("_all_gather_result", "fsdp_params", "mesh_info", "post_forward_mesh_info")
        yield group.mesh_info, ("mesh", "replicate_mesh_dim", "shard_mesh_dim", "shard_process_group")
        for each in group.fsdp_params:
            yield type(each), ("unsharded_param",)  # The property raises an error until the first pass.


def _check_names(root: FSDPModule) -> None:
    for owner, names in used_names(root):
        for name in names:
            if not hasattr(owner, name):
                kind = owner if isinstance(owner, type) else type(owner)
                raise ConfigError(
                    f"{kind.__name__} of torch {torch.__version__} has no {name}, so FSDP2 cannot continue after a "
                    f"failure; use torch {TESTED}, which are tested"
                )
    for group in root._get_fsdp_state()._fsdp_param_groups:
        if getattr(group.mesh_info, "reduce_scatter_process_group", None) is not None:
            raise ConfigError(
                "FSDP reduces gradients in a process group of its own, which a replacement could not make alone; leave "
                "out set_separate_reduce_scatter_group"
            )


def roots(model: nn.Module) -> Iterator[FSDPModule]:
    """Yield the outermost modules in ``model`` to which ``fully_shard`` was applied."""
    if isinstance(model, FSDPModule):
        yield model
        return
    for child in model.children():
        yield from roots(child)


def begin_sharding(model: nn.Module) -> None:
    """Let FSDP finish its setup, which it would do in the first forward pass. It communicates nothing.

    Without it, FSDP cannot drop the remains of a pass if a failure comes before this rank's first one.
    """
    for root in roots(model):
        root._get_fsdp_state()._lazy_init()


def forget_pass(model: nn.Module) -> None:
    """Drop what an interrupted forward or backward pass has left in FSDP, gathered weights and gradients included."""
    for root in roots(model):
        for state in root._get_fsdp_state()._state_ctx.all_states:
            for group in state._fsdp_param_groups:
                # The reset would wait for this gather, whose process group is gone.
                group._all_gather_result = None
                for each in group.fsdp_params:
                    # Torch 2.13 accumulates gradients in this field; in torch 2.15 it is a property without a setter.
                    if "unsharded_accumulated_grad" in vars(each):
                        each.unsharded_accumulated_grad = None
                    if hasattr(each, "_unsharded_param"):
                        each.unsharded_param.grad = None
        root.reset_iter_state()


def use_new_groups(model: nn.Module) -> None:
    """Make FSDP use the present process groups instead of those from before the failure.

    A mesh finds its groups by their names, which the present groups have as well. FSDP keeps the groups themselves.
    """
    for info in _mesh_infos(model):
        info.shard_process_group = info.mesh.get_group(info.shard_mesh_dim)
        if info.replicate_mesh_dim is not None:
            info.replicate_process_group = info.mesh.get_group(info.replicate_mesh_dim)


def _mesh_infos(model: nn.Module) -> Iterator[Any]:
    """Yield the records in which FSDP keeps meshes with their process groups; one record may come several times."""
    for root in roots(model):
        for module in root.modules():  # type: ignore[attr-defined]
            if isinstance(module, FSDPModule):
                for group in module._get_fsdp_state()._fsdp_param_groups:
                    yield from (info for info in (group.mesh_info, group.post_forward_mesh_info) if info is not None)


def holders(parameter: torch.Tensor) -> frozenset[int]:
    """Return the ranks that hold the same part of ``parameter`` as this rank, this rank among them."""
    if not isinstance(parameter, DTensor):
        return frozenset(range(dist.get_world_size()))
    mesh, placements = parameter.device_mesh, parameter.placements
    own = mesh.get_coordinate()
    assert own is not None
    places = zip(own, placements, strict=True)
    index = tuple(slice(None) if placement.is_replicate() else place for place, placement in places)
    return frozenset(mesh.mesh[index].flatten().tolist())


def shard_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of ``tensor``, with the same memory; the tensor itself if it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def like_shard(values: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return ``values``, the elements of this rank's part of ``parameter``, in the parameter's form."""
    if not isinstance(parameter, DTensor):
        return values.view_as(parameter)
    return DTensor.from_local(
        values.view_as(parameter.to_local()), parameter.device_mesh, parameter.placements, run_check=False,
        shape=parameter.shape, stride=parameter.stride(),
    )  # fmt: skip


def refuse_other_rows(parameters: Iterable[torch.Tensor]) -> None:
    """Refuse to divide the state of an elastic job whose shards are not ranges of rows, in the order of the ranks.

    Raises:
        ConfigError: a parameter is sharded in another way.
    """
    for parameter in parameters:
        if isinstance(parameter, DTensor) and parameter.placements != (Shard(0),):
            raise ConfigError(
                f"a parameter of shape {tuple(parameter.shape)} has placements {parameter.placements}; an elastic job, "
                "and a window of a job of another size, need (Shard(dim=0),) on one dimension: leave out "
                "--moevement-elastic"
            )


class ShardedRows(WholeTensors):
    """Division of the state of a trainer whose ranks hold ranges of the rows of each parameter.

    Args:
        states: function that returns the live tensors of this rank.
        losses: losses of recent iterations on this rank.
        shapes: number of rows, and of elements in a row, of each sharded tensor by operator and key.
    """

    def __init__(
        self,
        states: Callable[[], Mapping[str, OperatorState]],
        losses: MutableMapping[int, Mapping[str, Any]],
        shapes: Mapping[tuple[str, str], tuple[int, int]],
    ) -> None:
        super().__init__(states, lambda: 0, losses)
        self._shapes = shapes

    @override
    def saved_piece(self, saved: StateTensor, layout: RankLayout) -> Piece:
        """Return a tensor as a piece that begins at the first row of the rank's shard."""
        piece = super().saved_piece(saved, layout)
        if (saved.operator, saved.key) not in self._shapes:
            return piece
        rows, width = self._shapes[saved.operator, saved.key]
        rows_per_rank = -(-rows // layout.world)
        return Piece(piece.operator, piece.name, min(rows, rows_per_rank * layout.rank) * width, piece.tensor)
