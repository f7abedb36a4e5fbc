"""Functions that Megatron's distributed optimizer and data-parallel buffers call for weights that are kept in FP8."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron.moevement.fp8.formats import BLOCK, amax_of, amax_of_blocks, cast, scale_of, spread
from megatron.moevement.fp8.recipe import Role
from megatron.moevement.fp8.tensor import BlockQuantisedTensor, QuantisedTensor


def modify_underlying_storage(tensor: QuantisedTensor, raw: torch.Tensor) -> None:
    """Move the codes of a weight to ``raw``, a ``uint8`` range of the same size in the buffer that Megatron gathers."""
    tensor = tensor.data if not isinstance(tensor, QuantisedTensor) else tensor
    old = tensor.buffers[tensor.codes_name]
    raw.detach().copy_(old)
    tensor.buffers[tensor.codes_name] = raw.detach()


@torch.no_grad()
def quantize_param_shard(
    model_params: Sequence[QuantisedTensor],
    main_params: Sequence[torch.Tensor | None],
    start_offsets: Sequence[int | None],
    data_parallel_group: Any,
    fsdp_shard_model_params: None = None,
) -> None:
    """Compute the codes of this rank's shard of each weight from master weights, and the scales of all weights.

    Collective over ``data_parallel_group``: all ranks pass the same weights in the same order. The function rounds
    master weights to BF16 before it quantises them. So a weight has the codes that it would have without
    ``--fp8-param-gather``.
    """
    if not model_params:
        return
    shards = [
        None if main is None else main.detach().to(weight.dtype).view(-1)
        for weight, main in zip(model_params, main_params, strict=True)
    ]
    amaxes = [
        _amaxes(weight, shard, offset or 0)
        for weight, shard, offset in zip(model_params, shards, start_offsets, strict=True)
    ]
    packed = torch.cat([amax.view(-1) for amax in amaxes])
    if data_parallel_group.size() > 1:
        dist.all_reduce(packed, op=dist.ReduceOp.MAX, group=data_parallel_group)
    parts = packed.split([amax.numel() for amax in amaxes])
    for weight, shard, offset, part, own in zip(model_params, shards, start_offsets, parts, amaxes, strict=True):
        _write(weight, shard, offset or 0, part.view(own.shape))


@torch.no_grad()
def post_all_gather_processing(model_params: Sequence[torch.Tensor]) -> None:
    """Set the inverse scales of weights with delayed scaling, after a gather that brought only their codes.

    Delayed scaling reduces amaxes over ranks, so every replica has the scale with which the codes were computed.
    """
    for weight in model_params:
        if isinstance(weight, QuantisedTensor) and weight.scales is not None:
            weight.buffers[weight.scales_name].copy_(weight.scales.for_codes().reciprocal().view(1, 1))


def _amaxes(weight: QuantisedTensor, shard: torch.Tensor | None, offset: int) -> torch.Tensor:
    """Return the amaxes of this rank's shard: ``[1, 1]``, or one amax for each block of the weight."""
    if not isinstance(weight, BlockQuantisedTensor):
        return amax_of(shard).view(1, 1) if shard is not None else torch.zeros(1, 1)
    whole = torch.zeros(weight.numel(), dtype=weight.dtype)
    if shard is not None:
        whole[offset : offset + shard.numel()] = shard
    return amax_of_blocks(whole.view(weight.shape), (BLOCK, BLOCK))


def _write(weight: QuantisedTensor, shard: torch.Tensor | None, offset: int, amax: torch.Tensor) -> None:
    dtype = weight.recipe.dtype(Role.WEIGHT)
    if weight.scales is not None:  # The scale comes from earlier amaxes; this amax is recorded for the next scale.
        weight.scales.count(Role.WEIGHT, amax)
        scale = weight.scales.for_codes().view(1, 1)
    else:
        scale = scale_of(amax, dtype, power_of_two=isinstance(weight, BlockQuantisedTensor))
    weight.buffers[weight.scales_name].copy_(scale.reciprocal())
    if shard is None:
        return
    end = offset + shard.numel()
    everywhere = spread(scale, (BLOCK, BLOCK), weight.shape).expand(weight.shape).reshape(-1)
    codes = cast(shard.float() * everywhere[offset:end], dtype).view(torch.uint8)
    weight.buffers[weight.codes_name].view(-1)[offset:end] = codes
