"""Triton kernel for the map of tokens to slots. Each program counts the tokens of one expert, and fills one slot."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 1024
"""Number of tokens that a program counts in a step."""


@triton.jit(do_not_specialize=("tokens",))
def _to_slots(
    routing_map, expert_of, begins, ends, slot_map, tokens, experts, slots, BLOCK_T: tl.constexpr
):  # fmt: skip
    slot = tl.program_id(0)
    expert = tl.load(expert_of + slot)
    begin, end = tl.load(begins + slot), tl.load(ends + slot)
    counted = tl.zeros((), tl.int64)
    for first in range(0, tokens, BLOCK_T):
        token = first + tl.arange(0, BLOCK_T)
        inside = token < tokens
        routed = tl.load(routing_map + token.to(tl.int64) * experts + expert, mask=inside, other=0).to(tl.int64)
        place = counted + tl.cumsum(routed, 0) - 1
        is_here = (routed > 0) & (place >= begin) & (place < end)
        tl.store(slot_map + token.to(tl.int64) * slots + slot, is_here.to(tl.int8), mask=inside)
        counted += tl.sum(routed, 0)


def to_slots_kernel(
    routing_map: torch.Tensor, expert_of: torch.Tensor, begins: torch.Tensor, ends: torch.Tensor
) -> torch.Tensor:
    """Compute :func:`moevement_kernels.dispatch.to_slots`, with one pass over ``routing_map`` for each slot."""
    tokens, experts = routing_map.shape
    slots = expert_of.numel()
    slot_map = torch.empty(tokens, slots, dtype=torch.bool, device=routing_map.device)
    if tokens:
        _to_slots[(slots,)](
            routing_map.contiguous().view(torch.int8), expert_of, begins, ends, slot_map.view(torch.int8), tokens,
            experts, slots, BLOCK_T=BLOCK,
        )  # fmt: skip
    return slot_map
