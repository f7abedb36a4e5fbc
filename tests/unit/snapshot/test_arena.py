"""Pages belong to one snapshot at a time, all that is free can be used, and nothing is allocated twice."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from random import Random

import numpy as np
import pytest
import torch

from moevement_core.device import CpuDevice
from moevement_core.errors import SnapshotError
from moevement_core.snapshot import arena as arenas
from moevement_core.snapshot.arena import PAGE, Arena, in_pages
from moevement_core.snapshot.buffer import Buffer, spread


def test_a_buffer_in_several_pieces_is_read_and_written_as_one() -> None:
    whole = torch.randint(256, (100,), dtype=torch.uint8)
    buffer = Buffer(*(whole[at : at + 30].clone() for at in range(0, 100, 30)))
    assert buffer.nbytes == 100
    for start, nbytes in ((0, 100), (29, 2), (30, 30), (95, 5), (7, 0)):
        assert torch.equal(buffer.view(start, nbytes), whole[start : start + nbytes])
    new = torch.randint(256, (50,), dtype=torch.uint8)
    for source, target in spread(new, list(buffer.pieces(20, 50))):
        target.copy_(source)
    assert torch.equal(buffer.view(0, 100), torch.cat([whole[:20], new, whole[70:]]))
    with pytest.raises(SnapshotError, match=r"\b100\b.*\b101\b.*\b100\b"):
        buffer.view(99, 2)


def test_parts_that_are_given_back_are_no_more_and_the_rest_is_as_it_was() -> None:
    arena = Arena(CpuDevice())
    arena.grow(8 * PAGE)
    buffer = arena.acquire(8 * PAGE)
    assert buffer is not None
    buffer.view(0, 8 * PAGE).copy_(torch.arange(8, dtype=torch.uint8).repeat_interleave(PAGE))
    arena.release_parts(buffer, [(PAGE - 1, 3 * PAGE + 1), (5 * PAGE + 1, 7 * PAGE - 1)])
    assert arena.available == 2 * PAGE, "only whole pages"
    with pytest.raises(SnapshotError, match=rf"\b{PAGE}\b.*\b{PAGE + 1}\b.*\b{8 * PAGE}\b"):
        buffer.view(0, PAGE + 1)
    for page in (0, 3, 4, 5, 6, 7):
        assert buffer.view(page * PAGE, PAGE).eq(page).all()
    other = arena.acquire(2 * PAGE)
    assert other is not None
    other.view(0, 2 * PAGE).fill_(9)
    arena.release(buffer)
    assert arena.available == 6 * PAGE
    arena.release(buffer)
    assert arena.available == 6 * PAGE, "it is given back once"
    assert other.view(0, 2 * PAGE).eq(9).all()


def test_memory_is_allocated_by_calls_of_a_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that page-locks all of it in one call would be taken to hang."""
    monkeypatch.setattr(arenas, "MOST_AT_ONCE", 3 * PAGE)
    device, asked = CpuDevice(), list[int]()

    def host_empty(nbytes: int) -> torch.Tensor:
        asked.append(nbytes)
        return CpuDevice.host_empty(device, nbytes)

    monkeypatch.setattr(device, "host_empty", host_empty)
    arena = Arena(device)
    arena.grow(8 * PAGE)
    arena.grow(9 * PAGE)
    assert asked == [3 * PAGE, 3 * PAGE, 2 * PAGE, PAGE]
    assert arena.nbytes == arena.available == 9 * PAGE
    buffer = arena.acquire(9 * PAGE)
    assert buffer is not None
    new = torch.randint(256, (9 * PAGE,), dtype=torch.uint8)
    for source, target in spread(new, list(buffer.pieces(0, 9 * PAGE))):
        target.copy_(source)
    assert torch.equal(buffer.view(0, 9 * PAGE), new)


def test_memory_that_cannot_be_had_as_a_whole_is_not_taken_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arenas, "MOST_AT_ONCE", PAGE)
    device, left = CpuDevice(), [2]

    def host_empty(nbytes: int) -> torch.Tensor:
        left[0] -= 1
        if left[0] < 0:
            raise RuntimeError("no memory")
        return CpuDevice.host_empty(device, nbytes)

    monkeypatch.setattr(device, "host_empty", host_empty)
    arena = Arena(device)
    with pytest.raises(RuntimeError):
        arena.grow(3 * PAGE)
    assert arena.nbytes == arena.available == 0


@pytest.mark.parametrize(
    ("seed", "windows"), [(0, 200), *(pytest.param(seed, 1000, marks=pytest.mark.full) for seed in range(1, 4))]
)
def test_nothing_is_torn_or_lost_over_windows_that_are_reordered(seed: int, windows: int) -> None:
    """Beside an allocator that knows of every page who has it."""
    print(f"seed {seed}")
    random = Random(seed)
    arena = Arena(CpuDevice())
    total = 96
    arena.grow(total * PAGE)
    addresses = {arena._slabs[0].data_ptr() + page * PAGE for page in range(total)}
    held: list[tuple[int, Buffer, set[int]]] = []
    mark = 0
    for _ in range(windows):
        order = random.sample(range(1, 9), 8)  # slots of other sizes in every window
        for pages in order:
            mark = mark % 251 + 1
            nbytes = pages * PAGE - random.randrange(PAGE)
            free = total - sum(len(its) for _, _, its in held)
            buffer = arena.acquire(nbytes)
            assert (buffer is not None) == (pages <= free), "whatever is free can be used"
            assert arena.available == (free - pages if buffer else free) * PAGE
            if buffer is None:
                for _, old, _ in held[: len(held) // 2 + 1]:
                    arena.release(old)
                held = held[len(held) // 2 + 1 :]
                continue
            its = _pages(buffer)
            assert len(its) == pages
            assert its <= addresses, "nothing else is allocated"
            assert not any(its & others for _, _, others in held), "a page belongs to one"
            for piece in buffer.pieces(0, pages * PAGE):
                piece.fill_(mark)
            held.append((mark, buffer, its))
            if random.random() < 0.3:  # what a newer full state has superseded
                _, some, its = held[random.randrange(len(held))]
                start = random.randrange(PAGE * 8)
                arena.release_parts(some, [(start, start + random.randrange(3 * PAGE))])
                its &= _pages(some)
        for value, buffer, _ in random.sample(held, min(3, len(held))):
            assert all(bool((np.asarray(extent.memory) == value).all()) for extent in buffer.extents)
    for _, buffer, _ in held:
        arena.release(buffer)
    assert arena.available == arena.nbytes == total * PAGE
    assert len(arena._free) == 1, "free pages that touch are one piece again"


def _pages(buffer: Buffer) -> set[int]:
    return {extent.memory.data_ptr() + at for extent in buffer.extents for at in range(0, extent.memory.numel(), PAGE)}


def test_several_that_find_too_little_allocate_it_once() -> None:
    arena = Arena(CpuDevice())
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda _: arena.grow(400 * PAGE), range(8)))
    assert arena.nbytes == arena.available == 400 * PAGE


def test_what_nobody_has_after_an_exception_is_free_again() -> None:
    arena = Arena(CpuDevice())
    arena.grow(10 * PAGE)
    arena.grow(16 * PAGE)
    first, lost, second = (arena.acquire(4 * PAGE) for _ in range(3))
    assert first is not None
    assert lost is not None
    assert second is not None
    second.view(0, 4 * PAGE).fill_(7)
    arena.release_parts(first, [(PAGE, 2 * PAGE)])
    arena.reclaim([first, second])
    assert arena.available == (16 - 3 - 4) * PAGE
    taken = arena.acquire(9 * PAGE)
    assert taken is not None
    for piece in taken.pieces(0, 9 * PAGE):
        piece.fill_(1)
    assert second.view(0, 4 * PAGE).eq(7).all()


def test_memory_in_pages() -> None:
    assert [in_pages(n) for n in (0, 1, PAGE, PAGE + 1)] == [0, PAGE, PAGE, 2 * PAGE]
