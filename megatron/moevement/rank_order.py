"""Sums over ranks that a replacement on another node does not change.

NCCL adds along rings and trees that it builds over nodes and devices. So a replacement on another node changes the last
bits of every sum of more than two ranks. With ``--moevement-sums-in-rank-order``, every rank gathers the terms of small
sums (the gradient norm, gradients of norms and routers, losses) and adds them in rank order. Megatron's
``--ddp-reduce-scatter-with-fp32-accumulation`` does so for gradients over data-parallel ranks. :func:`widest_sum` finds
the largest sum whose order NCCL still chooses.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from typing import Any

import torch

from megatron.moevement import platform
from moevement_core.run.guarantees import MOST_GATHERED_BYTES, SAFE_SUM, Arithmetic

_SUMS = (torch.distributed.ReduceOp.SUM, torch.distributed.ReduceOp.AVG)


def sum_in_rank_order(
    arguments: Callable[[], Namespace],
    original: Callable[..., Any],
    tensor: torch.Tensor,
    op: Any = torch.distributed.ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
) -> Any:
    """Add small sums in rank order under ``--moevement-sums-in-rank-order``, in place of torch's ``all_reduce``.

    Args:
        arguments: function that returns the trainer's arguments.
        original: torch's ``all_reduce``.
        tensor: terms of the sum on this rank, and its result.
        op: kind of reduction.
        group: ranks that add; None for all.
        async_op: True if the caller waits for the sum later.
    """
    if async_op or not _is_asked_for(arguments()) or not _is_gathered(tensor, op, group):
        return original(tensor, op, group, async_op)
    ranks = torch.distributed.get_world_size(group)
    gathered = tensor.new_empty((ranks, tensor.numel()))
    torch.distributed.all_gather_into_tensor(gathered, tensor.detach().contiguous().reshape(1, -1), group=group)
    total = gathered.sum(dim=0) if op == torch.distributed.ReduceOp.SUM else gathered.mean(dim=0)
    tensor.detach().copy_(total.view_as(tensor))
    return None


def _is_gathered(tensor: torch.Tensor, op: Any, group: Any) -> bool:
    """Return True if the result depends on the order of addition, and gathering the terms costs little."""
    if op not in _SUMS or not tensor.is_floating_point() or torch.distributed.get_rank(group) < 0:
        return False
    ranks = torch.distributed.get_world_size(group)
    return ranks > SAFE_SUM and ranks * tensor.nbytes <= MOST_GATHERED_BYTES


def _is_asked_for(args: Namespace) -> bool:
    return bool(getattr(args, "moevement_sums_in_rank_order", False))  # A trainer that starts has no arguments yet.


def arithmetic_of(args: Namespace) -> Arithmetic:
    """Return the properties of a job that determine whether a recovery reproduces its sums bit for bit."""
    if platform.is_cpu():
        return Arithmetic(uses_gpus=False)
    return Arithmetic(uses_gpus=True, is_deterministic=bool(args.deterministic_mode), widest_sum=widest_sum(args))


def widest_sum(args: Namespace) -> int:
    """Return the largest number of ranks in a sum that NCCL adds in its own order.

    The result is at least :data:`SAFE_SUM`, the number of ranks whose sum has equal bits in every order.
    """
    tensor, context = args.tensor_model_parallel_size, args.context_parallel_size
    stages, expert_tensor = args.pipeline_model_parallel_size, args.expert_tensor_parallel_size or tensor
    widths = [tensor, context, expert_tensor]
    if not (args.use_distributed_optimizer and args.ddp_reduce_scatter_with_fp32_accumulation):
        replicas = args.world_size // (tensor * stages)  # These include context-parallel ranks.
        widths += [replicas, args.world_size // (expert_tensor * stages * args.expert_model_parallel_size)]
    if not args.moevement_sums_in_rank_order:
        widths.append(args.world_size)  # the gradient norm
    return max(SAFE_SUM, *widths)
