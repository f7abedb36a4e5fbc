"""Ranks send each other snapshots; missing and damaged ones are named, so that the next plan avoids them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch

from moevement_core.policy.window import WindowKind
from moevement_core.recovery.fetch import fetch
from moevement_core.recovery.holdings import Fetch, Source
from moevement_core.recovery.plan import RecoveryPlan
from moevement_core.snapshot.snapshot import Snapshot
from tests.unit.recovery.toy import Toy
from tests.unit.snapshot.loopback import Loopback, Wire


def execute(
    fetches: list[Fetch], held: dict[int, dict[tuple[int, int], Snapshot]], wire: Wire
) -> list[dict[int, Snapshot | Fetch]]:
    plan = RecoveryPlan(0, 0, 0, 0, {}, tuple(fetches))

    def of(rank: int) -> Callable[[Source, int, int], Snapshot | None]:
        return lambda source, owner, iteration: held[rank].get((owner, iteration))

    with ThreadPoolExecutor(len(held)) as threads:
        return list(threads.map(lambda rank: fetch(rank, plan, of(rank), Loopback(wire, rank)), range(len(held))))


def snapshot(owner: int, iteration: int) -> Snapshot:
    from dataclasses import replace

    original = Toy(2, WindowKind.ALIGNED).snapshot(iteration, iteration, {"rank": owner})
    return Snapshot(replace(original.header, rank=owner), original.buffer)


def test_everyone_gets_its_own_from_where_it_is() -> None:
    fetches = [
        Fetch(0, 0, 0, Source.MEMORY), Fetch(1, 0, 2, Source.PEER), Fetch(2, 0, 1, Source.PEER),
        Fetch(0, 1, 1, Source.PEER), Fetch(1, 1, 1, Source.MEMORY), Fetch(2, 1, 0, Source.FILE),
    ]  # fmt: skip
    held: dict[int, dict[tuple[int, int], Snapshot]] = {0: {}, 1: {}, 2: {}}
    for request in fetches:
        held[request.holder][request.owner, request.iteration] = snapshot(request.owner, request.iteration)
    for rank, got in enumerate(execute(fetches, held, Wire())):
        assert set(got) == {0, 1}
        for iteration, received in got.items():
            assert isinstance(received, Snapshot)
            assert (received.header.rank, received.iteration) == (rank, iteration)
            assert received.record()["iteration"] == {"rank": rank}
            received.check("here")


def test_what_is_gone_damaged_or_somebody_elses_is_named() -> None:
    wire = Wire()

    def flip(source: int, peer: int, data: torch.Tensor) -> torch.Tensor:
        if (source, peer) == (1, 2) and data.numel() > 200 and data[0] != ord("{"):
            data[64] ^= 4
        return data

    wire.damage = flip
    damaged, foreign = snapshot(0, 1), snapshot(2, 2)
    damaged.bytes_of(damaged.header.entries[0])[3] ^= 1
    fetches = [
        Fetch(0, 0, 1, Source.PEER), Fetch(0, 1, 0, Source.MEMORY), Fetch(0, 2, 0, Source.MEMORY),
        Fetch(2, 0, 1, Source.PEER), Fetch(1, 0, 1, Source.MEMORY),
    ]  # fmt: skip
    held: dict[int, dict[tuple[int, int], Snapshot]] = {
        0: {(0, 1): damaged, (0, 2): foreign}, 1: {(2, 0): snapshot(2, 0), (1, 0): snapshot(1, 0)}, 2: {},
    }  # fmt: skip
    got = execute(fetches, held, wire)
    assert got[0] == {0: fetches[0], 1: fetches[1], 2: fetches[2]}, "gone at its peer, damaged, another's"
    assert got[2] == {0: replace(fetches[3], was_sent=True)}, "damaged on the way, and whole where it was"
    assert isinstance(got[1][0], Snapshot)
