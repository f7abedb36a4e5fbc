"""Division of a rank's optimizer state into pieces, which ranks exchange when an elastic job changes its size.

A piece is a range of one tensor, with the tensor's name. Names do not depend on the number of data-parallel replicas,
so ranks of a resized job find the pieces that they need.
"""

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
class RankPosition:
    """Position of a rank in the parallel layout of a job."""

    rank: int
    world: int
    stage: int
    """Pipeline stage of the rank."""
    tensor: int
    """Tensor-parallel rank for dense parameters; ``expert_tensor`` is the tensor-parallel rank for experts."""
    expert: int
    """Position of the rank in its expert-parallel group."""
    expert_tensor: int

    @staticmethod
    def now() -> RankPosition:
        """Return the position of this rank, read from Megatron's process groups."""
        from megatron.core import parallel_state

        return RankPosition(
            rank=dist.get_rank(),
            world=dist.get_world_size(),
            stage=parallel_state.get_pipeline_model_parallel_rank(),
            tensor=parallel_state.get_tensor_model_parallel_rank(),
            expert=parallel_state.get_expert_model_parallel_rank(),
            expert_tensor=parallel_state.get_expert_tensor_parallel_rank(),
        )

    @staticmethod
    def of(settings: Mapping[str, Any], rank: int) -> RankPosition:
        """Return the position of a rank, computed from a job's settings for Megatron's default order of ranks.

        Args:
            settings: settings as :func:`~megatron.moevement.runtime.settings.settings_of` returns them.
            rank: rank in the job that has these settings.
        """
        world = settings["world_size"]
        expert_tensor = settings["expert_tensor_parallel_size"] or 1
        return RankPosition(
            rank,
            world,
            stage=rank // (world // settings["pipeline_model_parallel_size"]),
            tensor=rank % settings["tensor_model_parallel_size"],
            expert=rank // expert_tensor % settings["expert_model_parallel_size"],
            expert_tensor=rank % expert_tensor,
        )

    @property
    def is_last(self) -> bool:
        """True if this rank is the last one, which writes the metrics."""
        return self.rank == self.world - 1


def state_pieces(chunks: Sequence[Any], optimizer: Any, stand: RankPosition) -> list[Piece]:
    """Return all master weights and optimizer state of this rank as pieces, which are views of the live tensors.

    With the distributed optimizer, a piece is this rank's shard of a tensor. Without it, a piece is a whole tensor.

    Args:
        chunks: this rank's unwrapped virtual stages.
        optimizer: Megatron's optimizer.
        stand: position of this rank when model and optimizer were built.
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


def snapshot_pieces(snapshot: Snapshot, stand: RankPosition) -> Iterator[Piece]:
    """Yield the state of the operators in a snapshot, as pieces.

    Args:
        snapshot: snapshot of any rank.
        stand: position of the rank that captured the snapshot.
    """
    for entry in snapshot.header.entries:
        if entry.operator != BOUNDARY and entry.nbytes:
            tensor = snapshot.bytes_of(entry).view(getattr(torch, entry.dtype))
            yield saved_piece(StateTensor(entry.operator, entry.saved, entry.key, tensor), stand)


def saved_piece(saved: StateTensor, stand: RankPosition) -> Piece:
    """Return a tensor of a snapshot as a piece.

    Full state has the names that :func:`state_pieces` gives. The name of any other state (compute weights, gradients)
    includes its kind.

    Args:
        saved: tensor with its operator, kind of state, and key.
        stand: position of the rank that saved it.
    """
    match = _KEY.fullmatch(saved.key)
    assert match is not None, saved.key
    what = match["what"] if saved.saved is Saved.FULL else f"{saved.saved.name.lower()}.{match['what']}"
    cut = stand.expert_tensor if ".experts." in saved.operator else stand.tensor
    name = f"{stand.stage}.{match['chunk']}.{_LOCAL_EXPERT.sub('', match['name'])}/{cut}/{what}"
    start = int(match["start"])
    is_cut = saved.tensor.numel() == int(match["end"]) - start and match["what"] != "step"
    return Piece(saved.operator, f"{saved.operator}/{name}", start if is_cut else 0, saved.tensor)


def _tensors(parameter: torch.nn.Parameter, part: Part) -> Iterator[tuple[str, int, torch.Tensor]]:
    """Yield the name of each state tensor of a parameter, and this rank's part of it: first index and elements."""
    for what, tensor in part.replicated.items():
        yield what, 0, tensor
    for what, tensor in part.state.items():
        if what in part.replicated:
            continue
        flat = tensor.detach().view(-1)
        is_cut = flat.numel() == part.end - part.start and what != "step"
        if flat.numel():
            yield what, part.start if is_cut and not part.replicated else 0, flat
