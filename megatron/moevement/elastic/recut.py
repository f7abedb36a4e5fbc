"""Division of the state of Megatron's trainer when an elastic job changes its number of ranks.

With the distributed optimizer, a rank holds a shard of each tensor. Without it, data-parallel replicas hold whole
tensors. Names of pieces contain neither the rank nor the number of replicas.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, override

import torch
import torch.distributed as dist

from megatron.moevement.elastic.slots import slots
from megatron.moevement.operators import operators_of_chunk
from megatron.moevement.optimizer import weights
from megatron.moevement.optimizer.norms import as_logged
from megatron.moevement.optimizer.outcome import step_counts
from megatron.moevement.optimizer.views import ParameterPart, make_optimizer_state, parts_of
from megatron.moevement.runtime.ledger import Ledger
from megatron.moevement.runtime.live import Live
from megatron.moevement.state_digest import members, random_states
from moevement_core.elastic.exchange import Piece
from moevement_core.elastic.layout import RankLayout
from moevement_core.policy.schedule import Saved
from moevement_core.snapshot.snapshot import StateTensor
from moevement_core.trainer.recut import Recut

_LOCAL_EXPERT = re.compile(r"local_experts\.\d+\.|(?<=\.weight)\d+$|(?<=\.bias)\d+$")


class Shard(NamedTuple):
    """Coordinates of a rank within its stage, without the data-parallel one (:attr:`RankLayout.shard`)."""

    tensor: int
    """Tensor-parallel rank for dense parameters; :attr:`expert_tensor` is the tensor-parallel rank for experts."""
    expert: int
    """Position of the rank in its expert-parallel group."""
    expert_tensor: int


def layout_now() -> RankLayout:
    """Return the position of this rank, read from Megatron's process groups."""
    from megatron.core import parallel_state

    shard = Shard(
        tensor=parallel_state.get_tensor_model_parallel_rank(),
        expert=parallel_state.get_expert_model_parallel_rank(),
        expert_tensor=parallel_state.get_expert_tensor_parallel_rank(),
    )
    stage = parallel_state.get_pipeline_model_parallel_rank()
    return RankLayout(dist.get_rank(), dist.get_world_size(), stage, tuple(shard))


def layout_from_flags(settings: Mapping[str, Any], rank: int) -> RankLayout:
    """Return the position of a rank, computed from a job's settings for Megatron's default order of ranks.

    Args:
        settings: settings as :func:`~megatron.moevement.runtime.settings.settings_of` returns them.
        rank: rank in the job that has these settings.
    """
    world = settings["world_size"]
    expert_tensor = settings["expert_tensor_parallel_size"] or 1
    shard = Shard(
        tensor=rank % settings["tensor_model_parallel_size"],
        expert=rank // expert_tensor % settings["expert_model_parallel_size"],
        expert_tensor=rank % expert_tensor,
    )
    return RankLayout(rank, world, rank // (world // settings["pipeline_model_parallel_size"]), tuple(shard))


class MegatronRecut(Recut):
    """Division of the state of one rank of Megatron's trainer.

    Args:
        live: Megatron's objects on this rank.
        ledger: metrics of this rank's iterations.
        loads: function that returns recent token counts of the experts in this rank's layers, by layer.
    """

    def __init__(self, live: Live, ledger: Ledger, loads: Callable[[], Mapping[int, Sequence[int]]]) -> None:
        self._live, self._ledger, self._loads = live, ledger, loads

    @property
    @override
    def free_settings(self) -> frozenset[str]:
        return super().free_settings | ({"expert_model_parallel_size"} if slots() is not None else set())

    @override
    def layout(self) -> RankLayout:
        return layout_now()

    @override
    def layout_of(self, settings: Mapping[str, Any], rank: int) -> RankLayout:
        return layout_from_flags(settings, rank)

    @override
    def is_cut_alike(self, settings: Mapping[str, Any]) -> bool:
        """Return True if the ranks of another job divided their state alike; with expert slots always False.

        In the other job, the rank may have held other experts.
        """
        return slots() is None and super().is_cut_alike(settings)

    @override
    def pieces(self, layout: RankLayout) -> list[Piece]:
        from megatron.core.utils import unwrap_model

        return state_pieces(list(unwrap_model(self._live.model or [])), self._live.optimizer, layout)

    @override
    def saved_piece(self, saved: StateTensor, layout: RankLayout) -> Piece:
        return saved_piece(saved, layout)

    @override
    def filled(self) -> None:
        for member in members(self._live.optimizer):
            weights.copy_masters(member)
        weights.gather(self._live.model or [], force=True)

    @override
    def fitted_boundary(self, boundary: Mapping[str, Any], source: RankLayout) -> dict[str, Any]:
        """Convert a boundary record of another rank of this stage to one that this rank can restore.

        A rank has one Megatron optimizer if the job has one data-parallel rank; otherwise it has a second one for
        experts. If the record is from a rank with another number of optimizers, all optimizers of this rank get the
        record's first loss scaler.
        """
        optimizer, scalers = self._live.optimizer, list(boundary["loss_scalers"])
        count = len(members(optimizer))
        if len(scalers) != count:
            scalers = [scalers[0]] * count
        steps = {step for of_member in boundary["group_steps"] for step in of_member if step is not None}
        step = max(steps, default=None)  # Each optimizer step updates all groups, so all groups have the same count.
        return {
            **boundary,
            "rng": _with_own_expert_draws(boundary["rng"]),
            "loss_scalers": scalers,
            "group_steps": [[step] * len(of_member) for of_member in step_counts(optimizer)],
        }

    @override
    def fitted_step(self, record: Mapping[str, Any], *, is_comparable: bool) -> dict[str, Any]:
        kept = dict(super().fitted_step(record, is_comparable=is_comparable))
        kept.pop("sent", None)  # Ranks of the resized job send other tensors, so this digest does not apply.
        if "step" not in kept:
            return kept
        found_inf, count = list(kept["step"]["found_inf"]), len(members(self._live.optimizer))
        if len(found_inf) != count:
            found_inf = [any(found_inf) if any(flag is not None for flag in found_inf) else None] * count
        return {**kept, "step": {**kept["step"], "found_inf": found_inf}}

    @override
    def offer(self, layout: RankLayout) -> Any:
        """Return the experts in this rank's slots and their recent token counts, both by layer; None without slots."""
        if (expert_slots := slots()) is None:
            return None
        experts = {layer: table[Shard(*layout.shard).expert] for layer, table in expert_slots.tables.items()}
        return {"experts": experts, "loads": dict(self._loads())}

    @override
    def results(self, iteration: int) -> Any:
        """Return the mean losses of ``iteration`` by name; None if this rank has none."""
        return self._ledger.losses_of(iteration)

    @override
    def put_results(self, iteration: int, parts: Mapping[RankLayout, Any], outcome: Mapping[str, Any]) -> None:
        """Keep the metrics of ``iteration`` in the ledger, which writes them if they are missing."""
        losses: dict[str, Any] = next((losses for losses in parts.values() if losses is not None), {})
        norm = as_logged(outcome.get("clip_norm"))
        self._ledger.replayed(iteration, losses, bool(outcome.get("overflow")), norm)


def state_pieces(chunks: Sequence[Any], optimizer: Any, layout: RankLayout) -> list[Piece]:
    """Return all master weights and optimizer state of this rank as pieces, which are views of the live tensors.

    With the distributed optimizer, a piece is this rank's shard of a tensor. Without it, a piece is a whole tensor.

    Args:
        chunks: this rank's unwrapped virtual stages.
        optimizer: Megatron's optimizer.
        layout: position of this rank when model and optimizer were built.
    """
    make_optimizer_state(optimizer)
    shard = Shard(*layout.shard)
    part_of = parts_of(optimizer)
    pieces: list[Piece] = []
    for number, chunk in enumerate(chunks):
        for operator, name, parameter in operators_of_chunk(chunk, shard.expert):
            part = part_of(parameter)
            if part is None:
                continue
            cut = shard.tensor if getattr(parameter, "allreduce", True) else shard.expert_tensor
            whole = f"{operator.name}/{layout.stage}.{number}.{_LOCAL_EXPERT.sub('', name)}/{cut}"
            pieces += [
                Piece(operator.name, f"{whole}/{what}", begin, tensor)
                for what, begin, tensor in _tensors(parameter, part)
            ]
    return pieces


_KEY = re.compile(r"(?P<chunk>\d+)\.(?P<name>.*)\[(?P<start>\d+):(?P<end>\d+)\]/(?P<what>.*)")


def saved_piece(saved: StateTensor, layout: RankLayout) -> Piece:
    """Return a tensor of a snapshot as a piece.

    Full state has the names that :func:`state_pieces` gives. The name of any other state (compute weights, gradients)
    includes its kind.

    Args:
        saved: tensor with its operator, kind of state, and key.
        layout: position of the rank that saved it.
    """
    match = _KEY.fullmatch(saved.key)
    assert match is not None, saved.key
    what = match["what"] if saved.saved is Saved.FULL else f"{saved.saved.name.lower()}.{match['what']}"
    shard = Shard(*layout.shard)
    cut = shard.expert_tensor if ".experts." in saved.operator else shard.tensor
    name = f"{layout.stage}.{match['chunk']}.{_LOCAL_EXPERT.sub('', match['name'])}/{cut}/{what}"
    start = int(match["start"])
    is_cut = saved.tensor.numel() == int(match["end"]) - start and match["what"] != "step"
    return Piece(saved.operator, f"{saved.operator}/{name}", start if is_cut else 0, saved.tensor)


def _tensors(parameter: torch.nn.Parameter, part: ParameterPart) -> Iterator[tuple[str, int, torch.Tensor]]:
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


def _with_own_expert_draws(rng: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return ``rng``; with expert slots, return it with this rank's present state of the generator for expert weights.

    The random states in ``rng`` are from another rank. Expert-parallel ranks have different states of this generator,
    so the other rank's state does not apply here. Megatron draws from the generator only when it builds a model.
    """
    from megatron.core import tensor_parallel

    name = tensor_parallel.random.get_expert_parallel_rng_tracker_name()
    own = random_states()["tracker"]
    if slots() is None or name not in own:
        return rng
    return {**rng, "tracker": {**rng["tracker"], name: own[name]}}
