"""Sizes that an elastic job may have, from Megatron's arguments."""

from __future__ import annotations

import math
from argparse import Namespace

from moevement_core.elastic.config import ElasticConfig, SlotsConfig
from moevement_core.rendezvous.resizing import Grid
from moevement_core.util.flags import from_args


def grid_of(args: Namespace) -> Grid | None:
    """Return the sizes that the job may have; None if the job is not elastic.

    A size is the number of units in each pipeline stage; :func:`unit_of` says what a unit is. The caller has to pass
    the arguments with which the job started, because a change of size changes ``args``.

    Raises:
        ConfigError: a flag has an invalid value.
    """
    config, slots = from_args(ElasticConfig, args), from_args(SlotsConfig, args)
    if not config.is_elastic:
        return None
    unit, ranks_of_replica = unit_of(args), args.tensor_model_parallel_size * args.context_parallel_size
    units = args.world_size // (args.pipeline_model_parallel_size * unit)
    least = 1 if slots.expert_slots is None else -(-args.num_experts // slots.expert_slots)
    replicas = {size: size * unit // ranks_of_replica for size in range(least, units + 1)}
    sizes = [size for size, count in replicas.items() if can_train(args, count)]
    return Grid(args.pipeline_model_parallel_size, unit, tuple(sizes), config.join_wait_s)


def unit_of(args: Namespace) -> int:
    """Return the number of ranks in a unit: the ranks of one stage that the job adds or removes together.

    With expert slots, a unit is one data-parallel replica. Without slots, it is the smallest number of ranks that forms
    both whole replicas and whole expert-parallel groups.
    """
    replica = int(args.tensor_model_parallel_size * args.context_parallel_size)
    if args.moevement_expert_slots is not None:
        return replica
    experts = (args.expert_tensor_parallel_size or 1) * args.expert_model_parallel_size
    return math.lcm(replica, experts)


def blocks_of(args: Namespace) -> tuple[int, ...]:
    """Return the sizes of the blocks of consecutive ranks that communicate in every layer.

    The small block holds the tensor- and context-parallel ranks. The large block is a unit (:func:`unit_of`); without
    expert slots, a unit holds whole expert-parallel groups. Blocks of one rank are left out.
    """
    sizes = {int(args.tensor_model_parallel_size * args.context_parallel_size), unit_of(args)}
    return tuple(sorted(sizes - {1}))


def can_train(args: Namespace, replicas: int) -> bool:
    """Return True if Megatron can divide training and evaluation batches among ``replicas`` data-parallel replicas."""
    micro_batches, rest = divmod(args.global_batch_size, args.micro_batch_size * replicas)
    is_interleaved = (args.virtual_pipeline_model_parallel_size or 1) > 1
    stages = args.pipeline_model_parallel_size
    group = args.microbatch_group_size_per_vp_stage or stages
    evaluated = args.eval_global_batch_size or args.global_batch_size
    return not (
        rest
        or (is_interleaved and (group > micro_batches or 0 < micro_batches % group < stages))
        or (replicas * args.context_parallel_size) % args.num_distributed_optimizer_instances
        or evaluated % ((args.eval_micro_batch_size or args.micro_batch_size) * replicas)
    )
