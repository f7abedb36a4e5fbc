"""Live state of every operator on this rank, as views of Megatron's own tensors.

A rank saves the part that it owns. With the distributed optimizer, that is its shard of the master weights and moments,
and the matching range of the parameter. Ranges refer to flat buffers, so an operator's parts on two ranks may have
different sizes. Without the distributed optimizer, every data-parallel replica has the whole state, and owns an equal
range of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from megatron.moevement.operators import OperatorId, operators_of_chunk
from megatron.moevement.optimizer.quantised import quantised_buffers
from megatron.moevement.optimizer.torch_adam import make_adam_state
from megatron.moevement.optimizer.weights import HALF
from megatron.moevement.state_digest import layer_wise, members
from moevement_core.engine.layout import OperatorState, in_order
from moevement_core.errors import OperatorError
from moevement_core.operators import Operator, StateBytes
from moevement_core.policy.schedule import Saved
from moevement_core.snapshot.snapshot import StateTensor

_MASTERS = ("/master", "/upper", "/weight")


@dataclass(frozen=True)
class ParameterPart:
    """Range of one parameter that this rank owns, with the master weights and optimizer state of this range."""

    start: int
    end: int
    state: dict[str, torch.Tensor]
    """Master weights and optimizer state of this range, flat."""
    master: torch.Tensor | None = None
    """Tensor that Adam updates for this range, not flattened; None if Adam does not train the parameter."""
    replicated: dict[str, torch.Tensor] = field(default_factory=dict)
    """State of the whole parameter, flat, if every data-parallel rank has it; empty with the distributed optimizer."""


@dataclass(frozen=True, slots=True, eq=False)
class Trained:
    """Parameter, with the master weights that this rank's inner optimizer (Adam) updates for it."""

    parameter: torch.nn.Parameter
    master: torch.Tensor | None
    """Tensor that this rank's optimizer updates; None if the optimizer updates no part of the parameter."""
    weights: torch.Tensor | None
    """Range of the parameter that Megatron computes from ``master``, flat.

    For MXFP8, the BF16 values of the range (:data:`HALF`); None for other FP8 recipes.
    """


@dataclass(frozen=True, slots=True, eq=False)
class Replicated:
    """State tensor that every data-parallel rank has. Each of these ranks saves one range of it."""

    operator: str
    saved: Saved
    tensor: torch.Tensor
    """Whole tensor, flat."""
    group: Any
    """Process group of the data-parallel ranks that have the tensor."""


@dataclass(frozen=True, slots=True, eq=False)
class OperatorViews:
    """Live state of the operators of one rank, as views of Megatron's tensors, which training changes in place."""

    states: dict[OperatorId, OperatorState]
    """State of each operator that this rank saves."""
    trained: dict[str, list[Trained]]
    """Parameters of each operator, by its name."""
    replicated: list[Replicated]


Whose = Callable[[Any], int]
"""Function that chooses the rank whose part of the state is viewed: from a data-parallel group to an index in it."""


def _own(group: Any) -> int:
    return int(group.rank())


def operator_views(chunks: list[Any], optimizer: Any, whose: Whose = _own) -> OperatorViews:
    """Return views of every operator that this rank holds.

    The caller must have loaded any checkpoint before, because loading may replace the optimizer's tensors. The function
    creates optimizer state that Adam would otherwise create at its first step.

    Args:
        chunks: this rank's unwrapped virtual stages.
        optimizer: Megatron's optimizer.
        whose: function that chooses the data-parallel rank whose part is viewed, if all of them have the whole state;
            this rank by default.

    Raises:
        OperatorError: a tensor holds several experts, or a parameter is not contiguous.
    """
    from megatron.core import parallel_state

    make_optimizer_state(optimizer)
    part_of = parts_of(optimizer, whose)
    compute: dict[OperatorId, list[StateTensor]] = {}
    full: dict[OperatorId, list[StateTensor]] = {}
    gradients: dict[OperatorId, list[StateTensor]] = {}
    trained: dict[str, list[Trained]] = {}
    replicated: list[Replicated] = []
    expert_rank = parallel_state.get_expert_model_parallel_rank()
    for number, chunk in enumerate(chunks):
        for operator, name, parameter in operators_of_chunk(chunk, expert_rank):
            weights, states = compute.setdefault(operator, []), full.setdefault(operator, [])
            part = part_of(parameter)
            trained.setdefault(operator.name, []).append(_trained(parameter, part))
            if part is None:  # Megatron gathers codes from the rank that owns the parameter, but not scales.
                for saved, tensors in ((Saved.COMPUTE, weights), (Saved.FULL, states)):
                    tensors += [
                        StateTensor(operator.name, saved, f"{number}.{name}[0:0]/{what}", tensor)
                        for what, tensor in _scales(parameter)
                    ]
                continue
            replicated += _replicas(operator.name, parameter, part)
            key = f"{number}.{name}[{part.start}:{part.end}]"
            stored = [
                StateTensor(operator.name, Saved.COMPUTE, f"{key}/{what}", tensor)
                for what, tensor in _stored(parameter, part.start, part.end)
            ]
            weights += stored
            if part.state:
                states += [
                    StateTensor(operator.name, Saved.FULL, f"{key}/{what}", tensor.detach().view(-1))
                    for what, tensor in part.state.items()
                ]
                gradients.setdefault(operator, []).extend(_gradient(operator.name, parameter, part, key))
            else:  # The weights of an untrained parameter are all of its state.
                states += [StateTensor(t.operator, Saved.FULL, t.key, t.tensor) for t in stored]
    every = {
        operator: OperatorState(tuple(compute[operator]), tuple(full[operator]), tuple(gradients.get(operator, ())))
        for operator in compute
    }
    return OperatorViews(every, trained, replicated)


def _trained(parameter: torch.nn.Parameter, part: ParameterPart | None) -> Trained:
    master = part.master if part is not None else None
    if quantised_buffers(parameter) is not None:
        return Trained(parameter, master, getattr(parameter, HALF, None))
    weights = parameter.data.view(-1)
    if part is not None and master is not None and master.numel() != parameter.numel():
        weights = weights[part.start : part.end]
    return Trained(parameter, master, weights)


def _gradient(operator: str, parameter: torch.nn.Parameter, part: ParameterPart, key: str) -> Iterator[StateTensor]:
    """Yield the view of the gradient buffer that has the reduced gradient of a range.

    The optimizer unscales and clips FP32 gradients in this buffer. Of gradients of other dtypes, it unscales and clips
    a copy, so the buffer keeps them as the reduction left them.
    """
    buffer = getattr(parameter, "main_grad", None)
    if buffer is not None:
        flat = buffer.detach().view(-1)[part.start : part.end]
        yield StateTensor(operator, Saved.GRADIENT, f"{key}/gradient", flat)


def _replicas(operator: str, parameter: torch.nn.Parameter, part: ParameterPart) -> Iterator[Replicated]:
    group = _replicas_of(parameter)
    if part.replicated and group.size() > 1:
        for what, weights in _stored(parameter, 0, parameter.numel()):
            if what == "weight":  # Each replica saves all scales.
                yield Replicated(operator, Saved.COMPUTE, weights, group)
        for tensor in part.replicated.values():
            yield Replicated(operator, Saved.FULL, tensor, group)


def operators_of(states: dict[OperatorId, OperatorState]) -> list[Operator]:
    """Return the operators with their sizes, as the policy needs them."""
    return [Operator(operator.name, operator.kind, _weigh(state)) for operator, state in states.items()]


def _weigh(state: OperatorState) -> StateBytes:
    masters = [t.tensor for t in state.full if t.key.endswith(_MASTERS)]
    others = [t.tensor for t in state.full if not t.key.endswith(_MASTERS)]
    gradients = [t.tensor for t in state.gradient]
    return StateBytes.of_tensors([t.tensor for t in state.compute], masters, others, gradients)


def make_optimizer_state(optimizer: Any) -> None:
    """Create the initial optimizer state of every parameter that has no state yet."""
    for member in members(optimizer):
        inner = getattr(member, "optimizer", None)
        if isinstance(inner, torch.optim.Adam):
            make_adam_state(inner)
        elif inner is not None and getattr(member, "init_state_fn", None) is not None:
            member.init_state_fn(inner, member.config)


def parts_of(optimizer: Any, whose: Whose = _own) -> Callable[[torch.nn.Parameter], ParameterPart | None]:
    """Return a function that maps a parameter to the part of it that a rank owns; to None if the rank owns no part.

    If all data-parallel ranks have the whole parameter, ``whose`` chooses the rank. Otherwise, it is this rank.
    """
    parts: dict[torch.nn.Parameter, ParameterPart | None] = {}
    for member in members(optimizer):
        if hasattr(member, "model_param_gbuf_map"):
            parts.update(_distributed(member))
        elif any(member in chain.chained_optimizers for chain in layer_wise(optimizer)):
            parts.update(_whole(member))
        elif getattr(member, "optimizer", None) is not None:
            parts.update(_replicated(member, whose))
    elsewhere = is_sharded(optimizer)

    def part_of(parameter: torch.nn.Parameter) -> ParameterPart | None:
        if parameter in parts:
            return parts[parameter]
        if parameter.requires_grad and elsewhere:
            return None
        return ParameterPart(*_range_in(parameter, whose), {}, replicated={"weight": parameter.data.view(-1)})

    return part_of


def is_sharded(optimizer: Any) -> bool:
    """Return True if each data-parallel rank owns another part of the optimizer's state."""
    return bool(layer_wise(optimizer)) or any(hasattr(member, "model_param_gbuf_map") for member in members(optimizer))


def _distributed(member: Any) -> Iterator[tuple[torch.nn.Parameter, ParameterPart]]:
    """Yield each parameter with its shard of the distributed optimizer."""
    for parameter in member.model_param_gbuf_map:
        owned = member._get_model_param_range_map(parameter)["param"]
        stepped, state = _stepped(member, parameter)
        buffers = quantised_buffers(parameter)
        if buffers is not None and not buffers.is_one_form:
            setattr(parameter, HALF, stepped.detach().view(-1).to(parameter.dtype))
        yield parameter, ParameterPart(owned.start, owned.end, state, stepped)


def _stepped(member: Any, parameter: torch.nn.Parameter) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the tensor that the distributed optimizer updates for a parameter, and the state of that tensor by name.

    Under ``--use-precision-aware-optimizer``, Adam may keep master weights in its state and update a range of the
    parameter. If Adam keeps only the lower 16 bits of master weights, this range has the upper 16 bits.
    """
    group, place = member.model_param_group_index_map[parameter]
    inner = member.optimizer
    stepped = inner.param_groups[group]["params"][place]
    state = {} if "master_param" in inner.state[stepped] else {"master": stepped}
    for name, value in in_order(inner.state[stepped]).items():
        if not torch.is_tensor(value):
            continue
        name = "master" if name == "master_param" else name
        if name == "master" and value.dtype == torch.int16:
            state["upper"] = stepped
        quantised = quantised_buffers(value)
        stored = {name: value} if quantised is None else {f"{name}/{form}": raw for form, raw in quantised.all.items()}
        state.update(stored)
    for name, scale in getattr(inner, "_scales", {}).get(stepped, {}).items():
        if torch.is_tensor(scale):
            state[f"{'master' if name == 'master_param' else name}/scale"] = scale
    return stepped, state


def _replicated(member: Any, whose: Whose) -> Iterator[tuple[torch.nn.Parameter, ParameterPart]]:
    """Yield each parameter of a non-distributed optimizer, with the range of the rank that ``whose`` chooses."""
    for parameter, master, flat in _states_of(member):
        start, end = _range_in(parameter, whose)
        cut = {what: tensor for what, tensor in flat.items() if tensor.numel() == parameter.numel() > 1}
        part = {what: tensor[start:end] if what in cut else tensor for what, tensor in flat.items()}
        yield parameter, ParameterPart(start, end, state=part, master=master, replicated=cut)


def _whole(member: Any) -> Iterator[tuple[torch.nn.Parameter, ParameterPart]]:
    """Yield each parameter that Megatron has assigned to this rank alone, with all of its state."""
    for parameter, master, flat in _states_of(member):
        yield parameter, ParameterPart(0, parameter.numel(), state=flat, master=master)


def _states_of(member: Any) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor, dict[str, torch.Tensor]]]:
    """Yield each parameter of a non-distributed optimizer, the tensor that is updated, and its state, flat."""
    pairs: list[tuple[torch.nn.Parameter, torch.Tensor]] = []
    if hasattr(member, "float16_groups"):
        for halves, masters in zip(member.float16_groups, member.fp32_from_float16_groups, strict=True):
            pairs += zip(halves, masters, strict=True)
        pairs += [(parameter, parameter) for group in member.fp32_from_fp32_groups for parameter in group]
    else:
        pairs += [(parameter, parameter) for group in member.optimizer.param_groups for parameter in group["params"]]
    for parameter, master in pairs:
        state = {"master": master, **in_order(member.optimizer.state[master])}
        flat = {what: tensor.detach().view(-1) for what, tensor in state.items() if isinstance(tensor, torch.Tensor)}
        yield parameter, master, flat


def _range_in(parameter: torch.nn.Parameter, whose: Whose) -> tuple[int, int]:
    """Return the range of a parameter that one rank saves; ``whose`` chooses the rank.

    All data-parallel ranks have the whole parameter.
    """
    group = _replicas_of(parameter)
    return range_of(parameter.numel(), whose(group), group.size())


def live_replicas(chunks: list[Any], optimizer: Any) -> frozenset[int]:
    """Return the live replicas of this rank: other ranks that have all of its state.

    Args:
        chunks: this rank's unwrapped virtual stages.
        optimizer: Megatron's optimizer.
    """
    if is_sharded(optimizer):
        return frozenset()  # each rank has another shard
    groups = {id(group): group for chunk in chunks for group in map(_replicas_of, chunk.parameters())}
    ranks = [set(dist.get_process_group_ranks(group)) for group in groups.values()]
    return frozenset(set.intersection(*ranks) - {dist.get_rank()}) if ranks else frozenset()


def part_of_rank(rank: int) -> Whose:
    """Return a function that chooses the part of ``rank``, which must have the same state as this rank."""
    return lambda group: dist.get_process_group_ranks(group).index(rank)


def range_of(numel: int, rank: int, size: int) -> tuple[int, int]:
    """Return the range that replica ``rank`` of ``size`` replicas saves of a tensor with ``numel`` elements.

    A tensor with one element is saved by every replica.
    """
    return (0, 1) if numel == 1 else (numel * rank // size, numel * (rank + 1) // size)


def _replicas_of(parameter: torch.nn.Parameter) -> Any:
    """Return the data-parallel group whose ranks have this parameter."""
    from megatron.core import parallel_state

    if getattr(parameter, "allreduce", True):
        return parallel_state.get_data_parallel_group(with_context_parallel=True)
    return parallel_state.get_expert_data_parallel_group()


def _scales(parameter: torch.nn.Parameter) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the scales of an FP8 parameter of which other ranks own all codes.

    This rank saves the scales, because a gather brings only codes. Nothing is yielded for MXFP8, because this rank
    computes codes and scales from gathered BF16 values.
    """
    quantised = quantised_buffers(parameter)
    if quantised is not None and quantised.is_one_form:
        for scale in quantised.scales.values():
            yield "scale", scale.view(-1)


def _stored(parameter: torch.nn.Parameter, start: int, end: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield compute weights of a range without conversion: FP8 weights as codes and scales, others as they are.

    MXFP8 weights are an exception: they are saved as the BF16 values from which they are computed.
    """
    quantised = quantised_buffers(parameter)
    if quantised is None:
        if not parameter.data.is_contiguous():
            raise OperatorError(
                f"a parameter of shape {list(parameter.shape)} is not contiguous; a snapshot needs it in one piece"
            )
        yield "weight", parameter.data.view(-1)[start:end]
        return
    if (half := getattr(parameter, HALF, None)) is not None:
        yield "half", half
        return
    yield "weight", quantised.codes.view(-1)[start:end]
    for scale in quantised.scales.values():
        yield "scale", scale.view(-1)
