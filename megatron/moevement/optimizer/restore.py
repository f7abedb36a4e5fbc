"""Snapshots back into Megatron's live tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron.moevement.optimizer import weights
from megatron.moevement.optimizer.views import OperatorViews, Replicated, range_of
from megatron.moevement.state_digest import members
from moevement_core.errors import RecoveryError
from moevement_core.policy.schedule import Saved
from moevement_core.snapshot.snapshot import Snapshot, as_bytes


class Restore:
    """Loads operators of one rank; every data-parallel replica loads the same ones at the same point.

    Args:
        chunks: this rank's virtual stages as Megatron's trainer has them, in their data-parallel wrappers.
        optimizer: Megatron's.
        views: of its operators.
    """

    def __init__(self, chunks: Sequence[Any], optimizer: Any, views: OperatorViews) -> None:
        self._chunks = chunks
        self._members = members(optimizer)
        self._views = views
        self._live = {
            (tensor.operator, tensor.saved, tensor.key): tensor.tensor
            for state in views.states.values()
            for tensor in (*state.compute, *state.full)
        }

    @torch.no_grad()
    def load(self, snapshot: Snapshot, loads: Mapping[str, Saved], *, is_shared: bool = True) -> None:
        """Full state, or compute weights, of the operators named; the compute weights of the whole rank are then right.

        Where it is not shared, of what this rank saves alone: see :meth:`complete`.

        Raises:
            RecoveryError: the snapshot is of another model.
        """
        for entry, tensor in snapshot.tensors_of(loads):
            live = self._live.get((entry.operator, entry.saved, entry.key))
            if live is None or live.numel() != tensor.numel() or live.dtype != tensor.dtype:
                raise RecoveryError(
                    f"snapshot {snapshot.iteration} of rank {snapshot.header.rank} holds {entry.key} of "
                    f"{entry.operator}, {tensor.numel()} x {entry.dtype}, which this rank's model does not have; "
                    "recover with the flags that the snapshot was taken with"
                )
            live.copy_(tensor)
        if not is_shared:
            self._compute_weights_from_masters(is_alone=True)
            return
        _complete([one for one in self._views.replicated if loads.get(one.operator) is one.saved])
        self._masters_of_frozen([name for name, saved in loads.items() if saved is Saved.COMPUTE])
        self._compute_weights_from_masters()
        for entry, tensor in snapshot.tensors_of(loads):
            if entry.saved is Saved.COMPUTE:  # quantised ones were rebuilt from masters that are not there
                self._live[entry.operator, entry.saved, entry.key].copy_(tensor)
        self._gather()

    @torch.no_grad()
    def complete(self) -> None:
        """Bring full state that replicas have a range of each, and compute weights, to all of them.

        Called by every rank of the stage; those that kept their state have all of it, and keep it.
        """
        _complete([one for one in self._views.replicated if one.saved is Saved.FULL])
        self._compute_weights_from_masters()
        self._gather()

    def _masters_of_frozen(self, operators: Sequence[str]) -> None:
        """Megatron copies every master over its weights after a step: those of frozen operators must be equal."""
        for name in operators:
            for trained in self._views.trained.get(name, ()):
                if trained.master is not None and trained.weights is not None:
                    trained.master.detach().view(-1).copy_(trained.weights)

    def _compute_weights_from_masters(self, *, is_alone: bool = False) -> None:
        for member in self._members:
            if not (is_alone and weights.is_quantised(member)):
                weights.copy_masters(member)

    def _gather(self) -> None:
        weights.gather(self._chunks, force=True)


def _complete(tensors: Sequence[Replicated]) -> None:
    """Bring the range that each replica has loaded to all others."""
    by_group: dict[int, list[Replicated]] = {}
    for tensor in tensors:
        by_group.setdefault(id(tensor.group), []).append(tensor)
    for of_group in by_group.values():
        group = of_group[0].group
        for source in range(group.size()):
            pieces = [_range(one, source) for one in of_group]
            buffer = torch.cat(pieces)
            dist.broadcast(buffer, src=dist.get_global_rank(group, source), group=group)
            if source != group.rank():
                for piece, received in zip(pieces, buffer.split([piece.numel() for piece in pieces]), strict=True):
                    piece.copy_(received)


def _range(one: Replicated, replica: int) -> torch.Tensor:
    start, end = range_of(one.tensor.numel(), replica, one.group.size())
    return as_bytes(one.tensor[start:end])
