"""A page belongs to one snapshot at a time, free pages can be used or returned, and nothing is allocated twice."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from moevement_core.device import CpuDevice
from moevement_core.errors import SnapshotError
from moevement_core.snapshot import arena as arenas
from moevement_core.snapshot.arena import PAGE, SLABS, Arena, in_pages
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
    """Bound each call, because a rank that page-locks all its memory in one call would count as hanging."""
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
    """Compare the arena with a record of the owner of every page."""
    print(f"seed {seed}")
    random = Random(seed)
    arena = Arena(CpuDevice())
    total = 96
    arena.grow(total * PAGE)
    addresses = {slab.data_ptr() + at for slab in arena._slabs for at in range(0, slab.nbytes, PAGE)}
    assert len(addresses) == total
    held: list[tuple[int, Buffer, set[int]]] = []
    mark = 0
    for _ in range(windows):
        order = random.sample(range(1, 9), 8)  # slots of other sizes in every window
        for pages in order:
            mark = mark % 251 + 1
            nbytes = pages * PAGE - random.randrange(PAGE)
            free = total - sum(len(own_pages) for _, _, own_pages in held)
            buffer = arena.acquire(nbytes)
            assert (buffer is not None) == (pages <= free), "whatever is free can be used"
            assert arena.available == (free - pages if buffer else free) * PAGE
            if buffer is None:
                for _, old, _ in held[: len(held) // 2 + 1]:
                    arena.release(old)
                held = held[len(held) // 2 + 1 :]
                continue
            own_pages = _pages(buffer)
            assert len(own_pages) == pages
            assert own_pages <= addresses, "nothing else is allocated"
            assert not any(own_pages & others for _, _, others in held), "a page belongs to one"
            for piece in buffer.pieces(0, pages * PAGE):
                piece.fill_(mark)
            held.append((mark, buffer, own_pages))
            if random.random() < 0.3:  # a newer full state has superseded a part
                _, some, own_pages = held[random.randrange(len(held))]
                start = random.randrange(PAGE * 8)
                arena.release_parts(some, [(start, start + random.randrange(3 * PAGE))])
                own_pages &= _pages(some)
        for value, buffer, _ in random.sample(held, min(3, len(held))):
            assert all(bool((np.asarray(extent.memory) == value).all()) for extent in buffer.extents)
    for _, buffer, _ in held:
        arena.release(buffer)
    assert arena.available == arena.nbytes == total * PAGE
    assert len(arena._free) == len(arena._slabs), "free pages that touch are one piece again"


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


def test_what_is_given_back_leaves_the_process() -> None:
    process, arena, nbytes = psutil.Process(), Arena(CpuDevice()), 256 << 20
    before = process.memory_info().rss
    arena.grow(nbytes)
    assert process.memory_info().rss - before > 0.9 * nbytes
    kept = arena.acquire(nbytes // 8)
    assert kept is not None
    for piece in kept.pieces(0, nbytes // 8):
        piece.fill_(7)
    while arena.shrink(nbytes // 8):
        pass
    assert nbytes // 8 <= arena.nbytes < nbytes // 8 + nbytes // SLABS
    assert process.memory_info().rss - before < 0.25 * nbytes
    assert kept.view(0, nbytes // 8).eq(7).all()


def test_slabs_go_a_few_at_a_time_and_only_those_that_hold_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arenas, "SMALLEST_SLAB", 2 * PAGE)
    monkeypatch.setattr(arenas, "RETURNED_AT_ONCE", 4 * PAGE)
    arena = Arena(CpuDevice())
    arena.grow(16 * PAGE)
    buffers = [arena.acquire(2 * PAGE) for _ in range(8)]
    held = [buffer for buffer in buffers if buffer is not None]
    assert len(held) == 8
    assert arena.shrink(4 * PAGE), "everything is in use"
    assert arena.nbytes == 16 * PAGE
    for number, buffer in enumerate(held):
        buffer.view(0, 2 * PAGE).fill_(number)
    for buffer in held[:7]:
        arena.release(buffer)
    sizes = []
    while arena.shrink(4 * PAGE):
        sizes.append(arena.nbytes // PAGE)
    assert (sizes, arena.nbytes) == ([12, 8], 4 * PAGE)
    assert arena.available == 2 * PAGE
    assert held[7].view(0, 2 * PAGE).eq(7).all()
    assert not arena.shrink(4 * PAGE), "nothing is left to do"


def test_new_buffers_stay_out_of_slabs_that_are_to_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that windows cannot keep a slab forever because each new one puts a page into it."""
    monkeypatch.setattr(arenas, "SMALLEST_SLAB", 8 * PAGE)
    arena = Arena(CpuDevice())
    arena.grow(32 * PAGE)
    halves = [buffer for buffer in (arena.acquire(4 * PAGE) for _ in range(8)) if buffer is not None]
    for half in halves[::2]:
        arena.release(half)
    turns = halves[1::2]  # a half of every slab
    for _ in range(len(turns)):  # like snapshots: a new one is allocated before the oldest is freed
        assert arena.shrink(24 * PAGE)
        assert arena.nbytes == 32 * PAGE
        new = arena.acquire(4 * PAGE)
        assert new is not None
        turns.append(new)
        arena.release(turns.pop(0))
        if not arena.shrink(24 * PAGE):
            break
    assert arena.nbytes == 24 * PAGE
    assert arena.available == 8 * PAGE


def test_growing_makes_use_of_what_was_to_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arenas, "SMALLEST_SLAB", PAGE)
    arena = Arena(CpuDevice())
    arena.grow(8 * PAGE)
    held = arena.acquire(8 * PAGE)
    assert held is not None
    assert arena.shrink(2 * PAGE)
    arena.grow(8 * PAGE)
    arena.release(held)
    assert arena.nbytes == arena.available == 8 * PAGE
    assert not arena._leaving


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(2, 20))])
def test_nothing_that_is_held_changes_while_memory_comes_and_goes(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arenas, "SMALLEST_SLAB", 4 * PAGE)
    monkeypatch.setattr(arenas, "RETURNED_AT_ONCE", 8 * PAGE)
    print(f"seed {seed}")
    random, arena, held = Random(seed), Arena(CpuDevice()), list[tuple[int, Buffer]]()
    for mark in range(400):
        match random.randrange(6):
            case 0:
                arena.grow(random.randrange(1, 100) * PAGE)
            case 1:
                least = random.randrange(100) * PAGE
                before, available = arena.nbytes, arena.available
                arena.shrink(least)
                assert arena.nbytes >= min(least, before)
                assert before - arena.nbytes == available - arena.available, "what goes was free"
            case 2 | 3:
                wanted = random.randrange(1, 20) * PAGE
                is_there = arena.available >= wanted
                buffer = arena.acquire(wanted)
                assert (buffer is not None) == is_there, "whatever is free can be used"
                if buffer is not None:
                    for piece in buffer.pieces(0, wanted):
                        piece.fill_(mark % 251)
                    held.append((mark % 251, buffer))
            case 4 if held:
                arena.release(held.pop(random.randrange(len(held)))[1])
            case _ if held:
                _, buffer = random.choice(held)
                start = random.randrange(buffer.nbytes)
                arena.release_parts(buffer, [(start, start + random.randrange(6 * PAGE))])
        taken = sum(extent.memory.nbytes for _, buffer in held for extent in buffer.extents)
        assert taken + arena.available == arena.nbytes
    for value, buffer in held:
        assert all(bool((np.asarray(extent.memory) == value).all()) for extent in buffer.extents)
    free = arena.available
    arena.reclaim([buffer for _, buffer in held])
    assert arena.available == free
    for _, buffer in held:
        arena.release(buffer)
    while arena.shrink(0):
        pass
    assert arena.nbytes == 0


class _Interrupted(Exception):
    pass


_SOURCE = Path(arenas.__file__).read_text().splitlines()


def _interrupted_at(line: int, call: Callable[[], object]) -> bool:
    """Run ``call`` with an exception before the arena's ``line``-th executed line; return True if it was raised.

    Lines with a lock's ``with`` do not count, because no exception from outside can interrupt the release of a lock.
    """
    lines = itertools.count()

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        if frame.f_code.co_filename != arenas.__file__:
            return None
        is_lock = _SOURCE[frame.f_lineno - 1].strip().startswith("with ")
        if event == "line" and not is_lock and next(lines) == line:
            raise _Interrupted
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except _Interrupted:
        return True
    finally:
        sys.settrace(before)
    return False


def test_an_exception_at_any_moment_of_shrinking_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arenas, "SMALLEST_SLAB", PAGE)
    arena, line = Arena(CpuDevice()), 0
    while True:
        arena.grow(8 * PAGE)
        held = [buffer for buffer in (arena.acquire(PAGE) for _ in range(8)) if buffer is not None]
        for buffer in held[::2]:
            arena.release(buffer)
        was_interrupted = _interrupted_at(line, lambda: arena.shrink(5 * PAGE))
        arena.reclaim(held[1::2])
        assert arena.available == arena.nbytes - 4 * PAGE
        assert arena.nbytes in (5 * PAGE, 8 * PAGE)
        for buffer in held[1::2]:
            arena.release(buffer)
        if not was_interrupted:
            break
        line += 1
    assert line > 20
    assert arena.nbytes == 5 * PAGE


def test_memory_in_pages() -> None:
    assert [in_pages(n) for n in (0, 1, PAGE, PAGE + 1)] == [0, PAGE, PAGE, 2 * PAGE]
