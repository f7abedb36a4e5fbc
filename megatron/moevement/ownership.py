"""Prediction of the parameter elements that each rank of a pipeline stage owns, from Megatron's layout of buffers."""

from __future__ import annotations

from argparse import Namespace
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from megatron.moevement.optimizer.views import range_of

_ATTRIBUTES = ("allreduce", "shared_embedding", "is_managed_by_layer_wise_optimizer")
"""Attributes of a parameter that determine Megatron's layout, in addition to size and dtype."""

Owned = dict[torch.nn.Parameter, int]
"""Number of elements of each parameter that one rank owns; parameters with zero elements are left out."""


def weights_in_fp8(chunk: Any) -> Iterator[torch.nn.Parameter]:
    """Yield the weights that ``--fp8-param-gather`` keeps in FP8: those of linear layers in transformer layers.

    Args:
        chunk: an unwrapped virtual stage.
    """
    from megatron.core.fp8_utils import is_first_last_bf16_layer
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

    blocks = [layer for layer in _layers(chunk) if not is_first_last_bf16_layer(chunk.config, layer.layer_number - 1)]
    if (ahead := getattr(chunk, "mtp", None)) is not None:
        blocks.append(ahead)
    for block in blocks:
        for module in block.modules():
            if isinstance(module, ColumnParallelLinear | RowParallelLinear) and module.weight is not None:
                yield module.weight


def _layers(chunk: Any) -> Sequence[Any]:
    return getattr(getattr(chunk, "decoder", None), "layers", ())


def steps_are_tensors() -> bool:
    """Return True if Megatron uses torch's Adam for FP32 state, which has a step count for each tensor."""
    from megatron.core import optimizer

    return bool(optimizer.USING_PYTORCH_OPTIMIZER)


def owned_by_ranks(
    args: Namespace, chunks: Sequence[Any], stage: int, in_fp8: Collection[torch.nn.Parameter]
) -> list[Owned]:
    """Return the elements that each rank of a pipeline stage owns, in rank order.

    The experts in ``chunks`` are those of the first expert-parallel rank. Other ranks own equally many elements of
    their own experts.

    Args:
        args: Megatron's validated arguments.
        chunks: unwrapped virtual stages of the pipeline stage; they may be on the meta device.
        stage: number of the pipeline stage.
        in_fp8: parameters that are kept in FP8.
    """
    tensor = args.tensor_model_parallel_size
    dense = args.data_parallel_size * args.context_parallel_size
    ranks = dense * tensor
    models_experts = (args.expert_tensor_parallel_size or tensor) * args.expert_model_parallel_size
    counts = {False: dense, True: ranks // models_experts}
    owned = (_shards if args.use_distributed_optimizer else _ranges)(args, chunks, stage, in_fp8, counts)
    return [
        owned[False, rank // tensor % counts[False]] | owned[True, rank // models_experts % counts[True]]
        for rank in range(ranks)
    ]


def _is_expert(parameter: torch.nn.Parameter) -> bool:
    return not getattr(parameter, "allreduce", True)


def _ranges(
    args: Namespace, chunks: Sequence[Any], stage: int, in_fp8: Collection[torch.nn.Parameter], counts: dict[bool, int]
) -> dict[tuple[bool, int], Owned]:
    """Return the elements that each data-parallel rank saves in a job without the distributed optimizer.

    All data-parallel ranks have the same state, so each saves an equal range of every parameter. ``counts`` gives the
    number of data-parallel ranks, for experts (True) and for all other parameters (False). Keys of the result are pairs
    of such a kind of parameter (True or False) and a data-parallel rank.
    """
    owned: dict[tuple[bool, int], Owned] = defaultdict(dict)
    for parameter in (parameter for chunk in chunks for parameter in chunk.parameters()):
        kind = _is_expert(parameter)
        for rank in range(counts[kind]):
            start, end = range_of(parameter.numel(), rank, counts[kind])
            owned[kind, rank][parameter] = end - start
    return owned


def _shards(
    args: Namespace, chunks: Sequence[Any], stage: int, in_fp8: Collection[torch.nn.Parameter], counts: dict[bool, int]
) -> dict[tuple[bool, int], Owned]:
    """Return the elements that each data-parallel rank owns in a job with the distributed optimizer.

    This optimizer divides every bucket of Megatron's gradient buffers into equal shards, one for each rank. Arguments
    and result are those of :func:`_ranges`.
    """
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.training.training import get_megatron_ddp_config, resolve_ddp_bucket_size

    owned: dict[tuple[bool, int], Owned] = defaultdict(dict)
    instances = args.num_distributed_optimizer_instances
    config = get_megatron_ddp_config(args)
    everything = sum(parameter.numel() for chunk in chunks for parameter in chunk.parameters())
    group = SimpleNamespace(size=lambda: counts[False])
    bucket_size = resolve_ddp_bucket_size(config, group, config.overlap_grad_reduce, everything)
    for number, chunk in enumerate(chunks):
        trained = [parameter for parameter in chunk.parameters() if parameter.requires_grad]
        by_stored = {_as_stored(parameter, parameter in in_fp8): parameter for parameter in trained}
        layouts = DistributedOptimizer.compute_full_param_layout(
            list(by_stored),
            None if number or stage or args.overlap_param_gather_with_optimizer_step else bucket_size,
            counts[False] // instances,
            config,
            expert_data_parallel_world_size=counts[True] // instances,
        )
        for key, layout in layouts.layouts.items():
            kind = key.is_expert_parallel
            for stored, (start, end, bucket) in layout.param_index_map.items():
                first, last = layout.bucket_indices[bucket]
                size = (last - first) // layout.num_optimizer_shards
                for shard in range((start - first) // size, (end - 1 - first) // size + 1):
                    held = min(end, first + (shard + 1) * size) - max(start, first + shard * size)
                    for instance in range(instances):
                        owned[kind, instance * layout.num_optimizer_shards + shard][by_stored[stored]] = held
    return owned


def _as_stored(parameter: torch.nn.Parameter, is_in_fp8: bool) -> torch.nn.Parameter:
    """Return a tensor of FP8 dtype in place of a parameter that is kept in FP8; other parameters as they are.

    Megatron groups parameters by dtype when it lays out buffers.
    """
    if not is_in_fp8:
        return parameter
    stored = torch.nn.Parameter(torch.empty_like(parameter, dtype=torch.float8_e4m3fn))
    for name in _ATTRIBUTES:
        if hasattr(parameter, name):
            setattr(stored, name, getattr(parameter, name))
    return stored
