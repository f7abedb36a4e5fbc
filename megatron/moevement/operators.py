"""Assignment of the parameters of a Megatron model to operators.

In a model with experts, a layer with experts has one operator for each expert, one for the gate, and a non-expert
operator for attention, norms and shared experts. A layer without experts is one non-expert operator. In a model without
experts, each layer is one operator. A layer of multi-token prediction counts as one more layer after the last. An
output layer that is tied to the embedding belongs to the embedding's operator, on every stage that has a copy.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from megatron.moevement.elastic.slots import slots
from moevement_core.errors import OperatorError
from moevement_core.operators import EMBEDDING, HEAD, OperatorKind, expert_name, gate_name, layer_name, non_expert_name

_LAYER = re.compile(r"(?P<block>decoder|mtp)\.layers\.(?P<index>\d+)\.(?P<rest>.*)")
_EXPERT = re.compile(r"(?:.*\.)?mlp\.experts\.(?P<rest>.*)")
_SEQUENTIAL = re.compile(r"local_experts\.(?P<local>\d+)\.")
_GROUPED = re.compile(r"linear_fc[12]\.(?:weight|bias)(?P<local>\d+)$")


@dataclass(frozen=True, slots=True)
class OperatorId:
    """Name and kind of an operator."""

    name: str
    kind: OperatorKind


def operators_of_chunk(chunk: Any, expert_rank: int) -> Iterator[tuple[OperatorId, str, torch.nn.Parameter]]:
    """Yield the operator, name and tensor of every parameter of ``chunk``, in the model's order.

    Args:
        chunk: one virtual stage of this rank, an unwrapped ``GPTModel``.
        expert_rank: position of this rank among the expert-parallel ranks, which determines its experts.

    Raises:
        OperatorError: one tensor holds several experts.
    """
    config = chunk.config
    for name, parameter in chunk.named_parameters():
        yield _operator_of(name, chunk, config, expert_rank), name, parameter


def _operator_of(name: str, chunk: Any, config: Any, expert_rank: int) -> OperatorId:
    match = _LAYER.match(name)
    if match is None:
        tied = bool(getattr(chunk, "share_embeddings_and_output_weights", False))
        if name.startswith("embedding.") or (tied and name.startswith("output_layer.")):
            return OperatorId(EMBEDDING, OperatorKind.EMBEDDING)
        return OperatorId(HEAD, OperatorKind.HEAD)
    layer = _layer_number(chunk, config, match["block"], int(match["index"]))
    rest = match["rest"]
    if not getattr(config, "num_moe_experts", None):
        return OperatorId(layer_name(layer), OperatorKind.LAYER)
    if re.search(r"(?:^|\.)mlp\.router\.", rest):
        return OperatorId(gate_name(layer), OperatorKind.GATE)
    if expert := _EXPERT.match(rest):
        number = _expert_number(expert["rest"], layer, config, expert_rank)
        return OperatorId(expert_name(layer, number), OperatorKind.EXPERT)
    return OperatorId(non_expert_name(layer), OperatorKind.NON_EXPERT)


def _layer_number(chunk: Any, config: Any, block: str, index: int) -> int:
    """Return the layer's number in the model, counted from 0 over all stages."""
    if block == "decoder":
        return int(chunk.decoder.layers[index].layer_number) - 1
    return int(config.num_layers) + index


def _expert_number(rest: str, layer: int, config: Any, expert_rank: int) -> int:
    """Return the expert's number in its layer, from its number on this rank."""
    local = _SEQUENTIAL.match(rest) or _GROUPED.match(rest)
    if local is None:
        raise OperatorError(
            f"experts.{rest} holds several experts in one tensor, but each expert needs its own tensors; use "
            "SequentialMLP or Transformer Engine's grouped MLP"
        )
    if (expert_slots := slots()) is not None:
        return expert_slots.expert(layer, expert_rank, int(local["local"]))
    experts_here = config.num_moe_experts // config.expert_model_parallel_size
    return expert_rank * experts_here + int(local["local"])
