"""Extra capacity of an expert admits as many tokens as a count by hand, and changes no other expert."""

from __future__ import annotations

from argparse import Namespace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer.moe.moe_utils import apply_router_token_dropping, get_capacity

from megatron.moevement.transformer.capacity import RouterRoom, dropping_with_room, expert_capacity
from moevement_core.operators import Operator, OperatorKind, OperatorTable, StateBytes, expert_name

TOKENS, EXPERTS, TOPK, FACTOR, SHARE = 64, 4, 2, 1.0, 0.25
drop = partial(dropping_with_room, apply_router_token_dropping)


class Router:
    """Stand-in for Megatron's router. It drops tokens with Megatron's own function."""

    def __init__(self) -> None:
        self.weight, self.training = torch.zeros(1), True

    def routing(self, logits: torch.Tensor) -> Any:
        probs, places = logits.softmax(-1).topk(TOPK, dim=-1)
        routed = torch.zeros_like(logits, dtype=torch.bool).scatter(1, places, True)
        return drop(torch.zeros_like(logits).scatter(1, places, probs), routed, TOPK, FACTOR)


def _room_of(router: Router, layer: int = 0) -> RouterRoom:
    chunk = SimpleNamespace(
        config=SimpleNamespace(num_moe_experts=EXPERTS),
        decoder=SimpleNamespace(layers=[SimpleNamespace(mlp=SimpleNamespace(router=router), layer_number=layer + 1)]),
    )
    state = StateBytes(compute=2, master=4, optimizer=8)
    operators = [Operator(expert_name(layer, expert), OperatorKind.EXPERT, state) for expert in range(EXPERTS)]
    return RouterRoom([chunk], OperatorTable(operators), SHARE)


def _logits(seed: int) -> torch.Tensor:
    print(f"seed {seed}")
    return torch.randn(TOKENS, EXPERTS, generator=torch.Generator().manual_seed(seed)) + torch.tensor([2.0, 0, 1, 0])


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_an_expert_with_more_room_takes_more_tokens_and_no_other_does(seed: int) -> None:
    router, logits = Router(), _logits(seed)
    _, before = router.routing(logits)
    room = _room_of(router)
    assert torch.equal(router.routing(logits)[1], before), "nothing is open yet"
    room.open([expert_name(0, 0)])
    probs, kept = router.routing(logits)
    assert torch.equal(kept[:, 1:], before[:, 1:])
    wanted = int((logits.topk(TOPK, dim=-1).indices == 0).sum())
    capacity = get_capacity(TOKENS * TOPK, EXPERTS, FACTOR * (1 + SHARE))
    assert before[:, 0].sum() == get_capacity(TOKENS * TOPK, EXPERTS, FACTOR) < wanted
    assert kept[:, 0].sum() == min(capacity, wanted)
    assert bool((probs[kept] > 0).all())
    assert kept.sum() <= TOKENS * TOPK, "what is let in, others leave free"
    observe_extra_tokens = room.by_operator([room.take()])[0]
    assert observe_extra_tokens.tolist() == [float(kept[:, 0].sum() - before[:, 0].sum()), 0.0, 0.0, 0.0]
    room.open([])
    assert torch.equal(router.routing(logits)[1], before)
    assert not room.take().any()


def test_evaluation_has_no_more_room_and_what_is_not_to_be_counted_is_not() -> None:
    router, logits = Router(), _logits(4)
    _, before = router.routing(logits)
    room = _room_of(router)
    room.open([expert_name(0, 0), expert_name(0, 2)])
    _, more = router.routing(logits)
    room.take()
    with torch.no_grad():  # a recomputed layer routes twice with the same capacity, and only one pass is counted
        assert torch.equal(router.routing(logits)[1], more)
    room.paused = True
    assert torch.equal(router.routing(logits)[1], more)
    assert not room.take().any()
    router.training = False
    assert torch.equal(router.routing(logits)[1], before)


@pytest.mark.parametrize(
    ("factor", "shares"),
    [(0.75, {}), (1.25, {"context_parallel_size": 2}), (9.0, {}),
     (1.0, {"tensor_model_parallel_size": 2, "sequence_parallel": True}), (1.0, {"tensor_model_parallel_size": 2})],
)  # fmt: skip
def test_the_capacity_is_what_megatron_admits_to_an_expert_that_every_token_wants(
    factor: float, shares: dict[str, Any]
) -> None:
    """Route every token of a router to expert 0 and count the tokens that Megatron lets through."""
    args = {
        "micro_batch_size": 2, "seq_length": TOKENS, "num_experts": EXPERTS, "moe_router_topk": TOPK,
        "moe_expert_capacity_factor": factor, "context_parallel_size": 1, "tensor_model_parallel_size": 1,
        "sequence_parallel": False,
    } | shares  # fmt: skip
    tokens = 2 * TOKENS // args["context_parallel_size"]
    if args["sequence_parallel"]:
        tokens //= args["tensor_model_parallel_size"]
    wanted = torch.zeros(tokens, EXPERTS, dtype=torch.bool)
    wanted[:, :TOPK] = True
    _, admitted = apply_router_token_dropping(wanted.float(), wanted, TOPK, factor)
    assert expert_capacity(Namespace(**args)) == int(admitted[:, 0].sum())
