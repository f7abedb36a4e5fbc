"""Restoration of Megatron's live tensors from snapshots."""

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
    """Loader of snapshots into the live tensors of one rank.

    All data-parallel replicas of a stage load the same operators at the same time.

    Args:
        chunks: this rank's virtual stages in their data-parallel wrappers.
        optimizer: Megatron's optimizer.
        views: views of this rank's operators.
    """

    def __init__(self, chunks: Sequence[Any], optimizer: Any, views: OperatorViews) -> None:
        self._chunks = chunks
        self._optimizer, self._members = optimizer, members(optimizer)
        self._views = views
        self._live = {
            (tensor.operator, tensor.saved, tensor.key): tensor.tensor
            for state in views.states.values()
            for tensor in (*state.compute, *state.full)
        }

    @torch.no_grad()
    def load(self, snapshot: Snapshot, loads: Mapping[str, Saved], *, is_shared: bool = True) -> None:
        """Load full state or compute weights of some operators, and recompute all compute weights of this rank.

        If ``is_shared`` is False, the rank loads only the part of the state that it had saved, and waits for no other
        rank. The caller completes the state by :meth:`gather_replicas`.

        Args:
            snapshot: snapshot of this rank.
            loads: kind of state to load (full state or compute weights), by operator.
            is_shared: True if all replicas of the stage load together, and send each other the parts that they saved.

        Raises:
            RecoveryError: the snapshot belongs to another model.
        """
        for entry, tensor in snapshot.tensors_of(loads):
            live = self._live.get((entry.operator, entry.saved, entry.key))
            if live is None or live.numel() != tensor.numel() or live.dtype != tensor.dtype:
                raise RecoveryError(
                    f"snapshot {snapshot.iteration} of rank {snapshot.header.rank} holds {entry.key} of "
                    f"{entry.operator}, {tensor.numel()} x {entry.dtype}, which this rank's model does not have; "
                    "recover with the flags of the job that captured the snapshot"
                )
            live.copy_(tensor)
        if not is_shared:
            self._compute_weights_from_masters(is_alone=True)
            return
        _complete([tensor for tensor in self._views.replicated if loads.get(tensor.operator) is tensor.saved])
        self._masters_of_frozen([name for name, saved in loads.items() if saved is Saved.COMPUTE])
        self._compute_weights_from_masters()
        for entry, tensor in snapshot.tensors_of(loads):
            if (
                entry.saved is Saved.COMPUTE
            ):  # Recomputed FP8 weights of frozen operators are wrong: the snapshot has no masters of these.
                self._live[entry.operator, entry.saved, entry.key].copy_(tensor)
        self._gather()

    @torch.no_grad()
    def gather_replicas(self) -> None:
        """Exchange ranges of the full state so that each replica has all of it, and gather compute weights.

        Each replica sends the range that it has loaded.

        Collective over the ranks of the stage. Survivors take part, and their state does not change.
        """
        _complete([tensor for tensor in self._views.replicated if tensor.saved is Saved.FULL])
        self._compute_weights_from_masters()
        self._gather()

    def _masters_of_frozen(self, operators: Sequence[str]) -> None:
        """Copy compute weights of frozen operators into their master weights.

        Megatron later copies all master weights over compute weights, and must not change those of frozen operators.
        """
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
        weights.gather_matrices(self._optimizer)


def _complete(tensors: Sequence[Replicated]) -> None:
    """Send the ranges that this replica has loaded to all other replicas, and receive the ranges that they have loaded.

    Collective over the replicas.
    """
    by_group: dict[int, list[Replicated]] = {}
    for tensor in tensors:
        by_group.setdefault(id(tensor.group), []).append(tensor)
    for of_group in by_group.values():
        group = of_group[0].group
        for source in range(group.size()):
            pieces = [_range(tensor, source) for tensor in of_group]
            buffer = torch.cat(pieces)
            dist.broadcast(buffer, src=dist.get_global_rank(group, source), group=group)
            if source != group.rank():
                for piece, received in zip(pieces, buffer.split([piece.numel() for piece in pieces]), strict=True):
                    piece.copy_(received)


def _range(replicated: Replicated, replica: int) -> torch.Tensor:
    start, end = range_of(replicated.tensor.numel(), replica, replicated.group.size())
    return as_bytes(replicated.tensor[start:end])
