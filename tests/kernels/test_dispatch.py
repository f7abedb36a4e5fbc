"""The dispatcher's kernel gives each slot the tokens that the reference gives it."""

from __future__ import annotations

import pytest
import torch
from moevement_kernels.dispatch import Shares, SlotTable, shares, to_slots_reference
from moevement_kernels.triton_dispatch import to_slots_kernel


@pytest.mark.parametrize("tokens", [0, 1, 7, 1024, 2500])
def test_slots_of_tokens(tokens: int) -> None:
    torch.manual_seed(tokens)
    table = SlotTable.of([[0, 1, 1], [2, 0, 3], [1, 3, 0]], 4)
    routing = torch.rand(3, tokens, 4) < torch.tensor([0.9, 0.5, 0.1, 0.3])
    for rank in range(3):
        rank_shares: Shares = shares(routing.sum(1), table, rank)
        expected = to_slots_reference(routing[rank], table, rank_shares)
        assert torch.equal(to_slots_kernel(routing[rank], table.expert, rank_shares.begin, rank_shares.end), expected)
