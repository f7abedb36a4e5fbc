"""Experts in slots: the slot that computes each token, the placement of experts, and experts that keep their slots."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from moevement_kernels.dispatch import SlotTable, shares, to_slots_reference

from megatron.moevement.elastic.slots import Slots
from moevement_core.elastic.tables import StageExperts
from tests.unit.elastic.whole_tokens import schedule


def drawn(seed: int) -> tuple[torch.Tensor, list[list[int]], int]:
    """Return random routing ``[N, T, E]``, the experts in the slots of each rank, and E."""
    draw = np.random.default_rng(seed)
    ranks, slots = int(draw.integers(1, 6)), int(draw.integers(1, 5))
    experts = int(draw.integers(1, ranks * slots + 1))
    held = [*range(experts), *draw.integers(0, experts, ranks * slots - experts).tolist()]
    draw.shuffle(held)
    routing = torch.from_numpy(draw.random((ranks, int(draw.integers(0, 60)), experts)) < draw.random(experts))
    return routing, [held[rank * slots : (rank + 1) * slots] for rank in range(ranks)], experts


@pytest.mark.parametrize("seed", range(60))
def test_every_token_is_in_one_slot_of_its_expert_and_replicas_are_even(seed: int) -> None:
    routing, held, experts = drawn(seed)
    table = SlotTable.of(held, experts)
    tokens = routing.sum(1)
    maps = [to_slots_reference(routing[rank], table, shares(tokens, table, rank)) for rank in range(len(held))]
    for rank, slot_map in enumerate(maps):
        by_expert = torch.zeros_like(routing[rank], dtype=torch.int64)
        by_expert.index_add_(1, table.expert, slot_map.long())
        assert torch.equal(by_expert, routing[rank].long()), "each pair of a token and its expert once, and no other"
    computed = torch.stack([slot_map.sum(0) for slot_map in maps]).sum(0)
    wanted = schedule(tokens.T.numpy(), table.replicas.numpy())
    for expert in range(experts):
        for rank in range(len(held)):
            here = (table.expert == expert) & (table.rank == rank)
            assert int(computed[here].sum()) == int(wanted[expert, :, rank].sum())
            for source in range(len(held)):
                assert int(maps[source][:, here].sum()) == int(wanted[expert, source, rank])
        of_expert = computed[table.expert == expert]
        # The replicas on one rank share the tokens of each source rank evenly, to one token.
        assert int(of_expert.max() - of_expert.min()) <= len(held) + 1


def test_shares_of_a_worked_example() -> None:
    """Check expert 0 with two slots on rank 0 and one on rank 1.

    Rank 0 routes 5 tokens to the expert, and rank 1 routes 1. Each slot computes two, so rank 0 sends one to rank 1.
    """
    table = SlotTable.of([[0, 0], [0, 1]], 2)
    tokens = torch.tensor([[5, 0], [1, 2]])
    first, second = shares(tokens, table, 0), shares(tokens, table, 1)
    assert (first.begin.tolist(), first.end.tolist()) == ([0, 2, 4, 0], [2, 4, 5, 0])
    assert (second.begin.tolist(), second.end.tolist()) == ([0, 0, 0, 0], [0, 0, 1, 2])


def test_experts_are_placed_for_the_ranks_that_are_left() -> None:
    slots = Slots(experts=4, of_rank=2, floor=2)
    before = slots.table(0, ["a", "b", "c", "d"])
    assert sorted(expert for rank in before for expert in rank) == [0, 0, 1, 1, 2, 2, 3, 3]
    left = [rank for rank in range(4) if rank != 1]
    slots.place(StageExperts(["a", "c", "d"], {0: [10, 20, 30, 60]}, {0: [before[old] for old in left]}), [])
    after = slots.tables[0]
    assert len(after) == 3
    assert {expert for rank in after for expert in rank} == {0, 1, 2, 3}
    firsts = [(rank, slot) for rank in range(3) for slot in range(2) if slots.is_first(0, rank, slot)]
    assert len(firsts) == 4
