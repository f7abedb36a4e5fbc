"""Capacity of Megatron's experts, and extra capacity for experts that have lost updates (MoEtion, section 6).

All experts have equal capacity, and Megatron drops the tokens that exceed it. While some experts have extra capacity,
the router computes twice which tokens to drop: for the normal capacity, and for the larger capacity. It applies the
second result to these experts alone. With a capacity factor of 1 or more, all experts together have room for every
routed token. So the extra tokens of one expert never exceed the free room of the other experts.
"""

from __future__ import annotations

import functools
from argparse import Namespace
from collections.abc import Callable, Collection
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch

from megatron.moevement.patches import replace_on
from megatron.moevement.transformer.popularity import by_operator, routed_layers
from moevement_core.operators import OperatorTable, expert_name


def expert_capacity(args: Namespace) -> int:
    """Return the most tokens that an expert takes from one router in a micro-batch (C in MoEvement, appendix B).

    The number is the same for all experts of all layers, because Megatron has one capacity factor. It is at most the
    number of the router's tokens, because a token comes to an expert at most once.

    Args:
        args: Megatron's arguments, with a capacity factor; ``preflight/sparse.py`` refuses a job without one.
    """
    from megatron.core.transformer.moe.moe_utils import get_capacity

    shares = args.context_parallel_size * (args.tensor_model_parallel_size if args.sequence_parallel else 1)
    tokens = args.micro_batch_size * args.seq_length // shares
    return min(
        tokens, int(get_capacity(tokens * args.moe_router_topk, args.num_experts, args.moe_expert_capacity_factor))
    )


@dataclass(eq=False)
class _Room:
    """Extra capacity of one router's experts."""

    router: Any
    share: float
    has_more: torch.Tensor
    """True for each expert with extra capacity, bool ``[experts]``."""
    observe_extra_tokens: torch.Tensor
    """Number of tokens that each expert took only because of extra capacity, float64 ``[experts]``."""
    counts: Callable[[], bool]
    is_open: bool = False


_room: ContextVar[_Room | None] = ContextVar("_room", default=None)
"""Extra capacity for the router that now runs on this thread; None if all of its experts have normal capacity."""


class RouterRoom:
    """Switch that gives experts of this rank's routers extra capacity. All ranks of a stage switch at the same time.

    Args:
        chunks: this rank's unwrapped virtual stages.
        table: operators of the stage.
        share: extra capacity, as a share of the normal capacity.
    """

    def __init__(self, chunks: list[Any], table: OperatorTable, share: float) -> None:
        self.paused = False
        """True while this object counts no tokens, as in a replay."""
        self.tokens_of_run = None
        """Number of tokens that a router assigns in the run; None, because this object counts only extra tokens."""
        self._table = table
        self._rooms: list[_Room] = []
        self._places: list[int] = []
        """Position of each expert in the operator table, router by router."""
        for chunk in chunks:
            for layer in routed_layers(chunk):
                router, experts = layer.mlp.router, int(chunk.config.num_moe_experts)
                number = int(layer.layer_number) - 1
                self._places += [table.index_of[expert_name(number, expert)] for expert in range(experts)]
                device = router.weight.device
                has_more = torch.zeros(experts, dtype=torch.bool, device=device)
                observe_extra_tokens = torch.zeros(experts, dtype=torch.float64, device=device)
                room = _Room(
                    router,
                    share,
                    has_more=has_more,
                    observe_extra_tokens=observe_extra_tokens,
                    counts=lambda: not self.paused,
                )
                self._rooms.append(room)
                replace_on(router, "routing", functools.partial(_routing_in, room))

    def open(self, operators: Collection[str]) -> None:
        """Give the experts in ``operators`` extra capacity, and all other experts normal capacity."""
        wanted, places = {self._table.index_of[name] for name in operators}, iter(self._places)
        for room in self._rooms:
            has_more = [next(places) in wanted for _ in range(len(room.has_more))]
            room.is_open = any(has_more)
            room.has_more.copy_(torch.tensor(has_more))

    def take(self) -> torch.Tensor:
        """Return the number of tokens that each expert took only because of extra capacity, and reset the counts.

        Only tokens of this rank are counted. The result is float64 on the device, one number for each expert of all
        routers.
        """
        if not self._rooms:
            return torch.zeros(0, dtype=torch.float64)
        taken = torch.cat([room.observe_extra_tokens for room in self._rooms])
        for room in self._rooms:
            room.observe_extra_tokens.zero_()
        return taken

    def by_operator(self, taken: list[torch.Tensor]) -> torch.Tensor:
        """Convert the results of several calls of :meth:`take` to float64 ``[calls, operators]`` on the host.

        The call waits for the device.
        """
        return by_operator(taken, self._places, len(self._table))


def _routing_in(room: _Room, routing: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    # Extra capacity applies to both passes of a recomputed layer, but not to evaluation.
    token = _room.set(room if room.is_open and room.router.training else None)
    try:
        return routing(*args, **kwargs)
    finally:
        _room.reset(token)


def dropping_with_room(
    original: Callable[..., Any],
    routing_probs: torch.Tensor,
    routing_map: torch.Tensor,
    router_topk: int,
    capacity_factor: float,
    drop_policy: str = "probs",
    pad_to_capacity: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Drop fewer tokens of experts that now have extra capacity, in ``apply_router_token_dropping``."""

    def dropped(factor: float) -> tuple[torch.Tensor, torch.Tensor]:
        probs, kept = original(routing_probs, routing_map, router_topk, factor, drop_policy, pad_to_capacity)
        return probs, kept

    probs, kept = dropped(capacity_factor)
    room = _room.get()
    if room is None:
        return probs, kept
    more_probs, more = dropped(capacity_factor * (1 + room.share))
    if torch.is_grad_enabled() and room.counts():
        with torch.no_grad():
            room.observe_extra_tokens.add_((more & ~kept & room.has_more).sum(0))
    return torch.where(room.has_more, more_probs, probs), torch.where(room.has_more, more, kept)
