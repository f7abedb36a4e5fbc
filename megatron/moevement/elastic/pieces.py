"""The optimizer's state on a rank as pieces, whose names do not depend on how many data-parallel replicas there are."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron.moevement.operators import operators_of_chunk
from megatron.moevement.optimizer.views import Part, make_optimizer_state, parts_of
from moevement_core.elastic.exchange import Piece
from moevement_core.policy.schedule import Saved
from moevement_core.snapshot.snapshot import BOUNDARY, Snapshot, StateTensor

_LOCAL_EXPERT = re.compile(r"local_experts\.\d+\.|(?<=\.weight)\d+$|(?<=\.bias)\d+$")


@dataclass(frozen=True, slots=True)
class Stand:
    """Position of a rank in the job when its model is built."""

    rank: int
    world: int
    stage: int
    """Pipeline stage of the rank."""
    tensor: int
    """Tensor-parallel rank; of experts: ``expert_tensor``."""
    expert: int
    """Expert-parallel rank."""
    expert_tensor: int

    @staticmethod
    def now() -> Stand:
        """Return the position by Megatron's process groups."""
        from megatron.core import parallel_state

        return Stand(
            dist.get_rank(),
            dist.get_world_size(),
            parallel_state.get_pipeline_model_parallel_rank(),
            parallel_state.get_tensor_model_parallel_rank(),
            parallel_state.get_expert_model_parallel_rank(),
            parallel_state.get_expert_tensor_parallel_rank(),
        )

    @staticmethod
    def of(settings: Mapping[str, Any], rank: int) -> Stand:
        """Return the position by the flags of a job, for Megatron's default order of ranks.

        Args:
            settings: as :func:`~megatron.moevement.runtime.settings.settings_of` has them.
            rank: of the job.
        """
        world = settings["world_size"]
        expert_tensor = settings["expert_tensor_parallel_size"] or 1
        return Stand(
            rank,
            world,
            rank // (world // settings["pipeline_model_parallel_size"]),
            rank % settings["tensor_model_parallel_size"],
            rank // expert_tensor % settings["expert_model_parallel_size"],
            rank % expert_tensor,
        )

    @property
    def is_last(self) -> bool:
        """Return whether this is the rank that writes what is logged."""
        return self.rank == self.world - 1


def state_pieces(chunks: Sequence[Any], optimizer: Any, stand: Stand) -> list[Piece]:
    """Return all master weights and optimizer state of this rank, as views: its shard with the distributed optimizer,
    everything without.

    Args:
        chunks: this rank's unwrapped virtual stages.
        optimizer: Megatron's.
        stand: where this rank stood when they were built.
    """
    make_optimizer_state(optimizer)
    part_of = parts_of(optimizer)
    pieces: list[Piece] = []
    for number, chunk in enumerate(chunks):
        for operator, name, parameter in operators_of_chunk(chunk, stand.expert):
            part = part_of(parameter)
            if part is None:
                continue
            cut = stand.tensor if getattr(parameter, "allreduce", True) else stand.expert_tensor
            whole = f"{operator.name}/{stand.stage}.{number}.{_LOCAL_EXPERT.sub('', name)}/{cut}"
            pieces += [
                Piece(operator.name, f"{whole}/{what}", begin, tensor)
                for what, begin, tensor in _tensors(parameter, part)
            ]
    return pieces


_KEY = re.compile(r"(?P<chunk>\d+)\.(?P<name>.*)\[(?P<start>\d+):(?P<end>\d+)\]/(?P<what>.*)")


def snapshot_pieces(snapshot: Snapshot, stand: Stand) -> Iterator[Piece]:
    """Yield the state of operators in a snapshot, as pieces.

    Args:
        snapshot: of a rank.
        stand: where that rank stood.
    """
    for entry in snapshot.header.entries:
        if entry.operator != BOUNDARY and entry.nbytes:
            tensor = snapshot.bytes_of(entry).view(getattr(torch, entry.dtype))
            yield saved_piece(StateTensor(entry.operator, entry.saved, entry.key, tensor), stand)


def saved_piece(saved: StateTensor, stand: Stand) -> Piece:
    """A tensor of a snapshot as a piece: full state as :func:`state_pieces` names it, the rest by what it is.

    Args:
        saved: as the views of a rank have it.
        stand: where that rank stood.
    """
    found = _KEY.fullmatch(saved.key)
    assert found is not None, saved.key
    what = found["what"] if saved.saved is Saved.FULL else f"{saved.saved.name.lower()}.{found['what']}"
    cut = stand.expert_tensor if ".experts." in saved.operator else stand.tensor
    name = f"{stand.stage}.{found['chunk']}.{_LOCAL_EXPERT.sub('', found['name'])}/{cut}/{what}"
    start = int(found["start"])
    is_cut = saved.tensor.numel() == int(found["end"]) - start and found["what"] != "step"
    return Piece(saved.operator, f"{saved.operator}/{name}", start if is_cut else 0, saved.tensor)


def _tensors(parameter: torch.nn.Parameter, part: Part) -> Iterator[tuple[str, int, torch.Tensor]]:
    """Yield the name of each tensor, the position of its first element, and the part of it that is here, flat."""
    for what, tensor in part.replicated.items():
        yield what, 0, tensor
    for what, tensor in part.state.items():
        if what in part.replicated:
            continue
        flat = tensor.detach().view(-1)
        is_cut = flat.numel() == part.end - part.start and what != "step"
        if flat.numel():
            yield what, part.start if is_cut and not part.replicated else 0, flat
