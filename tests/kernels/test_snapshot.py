"""Snapshot pack and popularity: kernels against their references."""

from __future__ import annotations

import pytest
import torch
from moevement_kernels.pack import ALIGNMENT, Piece, digest_reference, layout, pack, reference
from moevement_kernels.popularity import popularity
from moevement_kernels.popularity import reference as count


def pieces() -> list[Piece]:
    draw = torch.Generator().manual_seed(1)
    whole = torch.randn(9001, generator=draw)
    half = torch.randn(33, 7, generator=draw)
    return [
        Piece(whole, torch.float32), Piece(half, torch.bfloat16), Piece(whole[5:77], torch.float16),
        Piece(torch.arange(300).to(torch.uint8), torch.uint8), Piece(torch.arange(41, dtype=torch.int32), torch.int32),
        Piece(torch.empty(0), torch.float32), Piece(half.bfloat16(), torch.bfloat16),
    ]  # fmt: skip


def test_pieces_are_cast_packed_and_digested() -> None:
    found, wanted = pack(pieces()), reference(pieces())
    assert torch.equal(found.buffer, wanted.buffer)
    assert torch.equal(found.digests, wanted.digests)
    assert all(begin % ALIGNMENT == 0 for begin in found.begins)
    third = found.buffer[found.begins[2] :][: 72 * 2].view(torch.float16)
    assert torch.equal(third, pieces()[2].source.half())


def test_a_buffer_is_used_again() -> None:
    _, size = layout(pieces())
    buffer = torch.full((size + 10,), 7, dtype=torch.uint8)
    assert pack(pieces(), buffer).buffer.data_ptr() == buffer.data_ptr()
    with pytest.raises(ValueError, match=f"needs {size} bytes"):
        pack(pieces(), buffer[:100])


def test_any_change_shows_in_the_digest() -> None:
    values = torch.arange(5000, dtype=torch.int32)
    known = digest_reference(values)
    swapped = values.clone()
    swapped[[3, 4]] = swapped[[4, 3]]
    flipped = values.clone()
    flipped[4999] ^= 1 << 30
    others = [swapped, flipped, values[:-1], torch.cat([values, torch.zeros(1, dtype=torch.int32)])]
    assert known not in {digest_reference(one) for one in others}
    assert digest_reference(torch.zeros(4)) != digest_reference(torch.zeros(5))


def test_a_cast_that_loses_more_than_precision_is_refused() -> None:
    with pytest.raises(ValueError, match=r"torch\.int32 as torch\.float32"):
        Piece(torch.arange(3, dtype=torch.int32), torch.float32)
    with pytest.raises(ValueError, match="not contiguous"):
        Piece(torch.ones(3, 4).T, torch.float32)


@pytest.mark.parametrize(("tokens", "experts"), [(1, 1), (300, 70), (128, 32), (1000, 128), (0, 4)])
def test_popularity_is_counted(tokens: int, experts: int) -> None:
    draw = torch.Generator().manual_seed(tokens)
    routed = torch.rand(tokens, experts, generator=draw) < 0.2
    probabilities = torch.rand(tokens, experts, generator=draw)
    found, wanted = popularity(routed, probabilities), count(routed, probabilities)
    assert torch.equal(found.tokens, wanted.tokens)
    torch.testing.assert_close(found.probability, wanted.probability, rtol=1e-6, atol=1e-6)
    with pytest.raises(ValueError, match="needs bool"):
        popularity(probabilities, probabilities)
