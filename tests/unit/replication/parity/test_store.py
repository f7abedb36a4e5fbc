"""Snapshots that all holders had are rebuilt byte for byte, whichever nodes of a group are lost, at any moment."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from random import Random

import pytest
import torch

from moevement_core.device import CpuDevice
from moevement_core.policy.schedule import Saved
from moevement_core.recovery.fetch import fetch
from moevement_core.recovery.holdings import Fetch, Holding, Place, Source
from moevement_core.recovery.plan import RecoveryPlan
from moevement_core.recovery.sums import places_in_sums
from moevement_core.recovery.take_part import summed
from moevement_core.replication.parity.groups import Groups, make_groups
from moevement_core.replication.parity.store import GroupStore, Stripe
from moevement_core.snapshot import arena
from moevement_core.snapshot.arena import PAGE
from moevement_core.snapshot.blocks import blocks_of
from moevement_core.snapshot.buffer import Buffer
from moevement_core.snapshot.snapshot import Entry, Header, Snapshot, digest_of
from tests.unit.snapshot.loopback import Loopback, Wire


def snapshot_of(random: Random, owner: int, iteration: int) -> Snapshot:
    """Return a snapshot of tensors of random sizes, with padding between them."""
    sizes = [random.choice((0, 1, 63, 64, 1000, 70_000)) for _ in range(random.randint(1, 6))]
    ends = list(itertools.accumulate(-(-size // 64) * 64 for size in sizes))
    generator = torch.Generator().manual_seed(random.randrange(1 << 30))
    data = torch.randint(256, (max(ends[-1], 1),), dtype=torch.uint8, generator=generator)
    entries = tuple(
        Entry(f"o{place}", Saved.FULL, "w", "uint8", end - -(-size // 64) * 64, size,
              digest_of(data[end - -(-size // 64) * 64 :][:size]), place)
        for place, (size, end) in enumerate(zip(sizes, ends, strict=True))
    )  # fmt: skip
    header = Header(owner, iteration, "s", 0, "2" * len(sizes), entries, None, iteration)
    return Snapshot(header, Buffer(data[: ends[-1] // 2].clone(), data[ends[-1] // 2 :].clone()))


def deliver(store: GroupStore, snapshot: Snapshot, stop_after: int | None = None) -> bool:
    """Add a snapshot to the parity as a receiver does; return True if the sum contains all of it."""
    header, _ = snapshot.packed()
    stripe = store.begin(header.rank, header)
    assert stripe is not None
    wanted = sorted(stripe.missing.get(header.rank, ()))
    for number in wanted[:stop_after]:
        block = blocks_of(header)[number]
        held = {entry.key + entry.operator: entry for entry in snapshot.header.entries}
        data = [(entry, snapshot.bytes_of(held[entry.key + entry.operator])) for entry in block]
        store.add(stripe, header.rank, number, data)
    store.end(stripe, header.rank)
    return header.rank not in stripe.missing


class Nodes:
    """Ranks, one on each node, with their snapshots and the parity that they keep."""

    def __init__(self, count: int, members: int, blocks: int) -> None:
        self.groups: Groups = make_groups(range(count), members, blocks)
        self.own: dict[int, dict[int, Snapshot]] = {rank: {} for rank in range(count)}
        self.stores: dict[int, list[GroupStore]] = {rank: [] for rank in range(count)}
        for group in self.groups:
            for number, holder in enumerate(group.holders):
                store = GroupStore(group, number, CpuDevice())
                store.memory.arena.grow(400 * PAGE)
                self.stores[holder].append(store)

    def lose(self, rank: int) -> None:
        self.own[rank] = {}
        self.stores[rank] = []

    def plan(self) -> list[Fetch]:
        places: dict[int, dict[int, list[Place]]] = {rank: {} for rank in self.own}
        for rank, snapshots in self.own.items():
            for iteration, snapshot in snapshots.items():
                header = snapshot.header
                holding = Holding(rank, iteration, iteration, header.schedule, header.contents, Source.MEMORY)
                places[rank].setdefault(iteration, []).append((Source.MEMORY, rank, holding))
        reported = {
            rank: [report for store in stores for report in summed(store)] for rank, stores in self.stores.items()
        }
        return [
            Fetch(holding.owner, holding.iteration, holder, source, holding.sum)
            for source, holder, holding in places_in_sums(reported, places)
        ]

    def execute(self, fetches: list[Fetch]) -> dict[tuple[int, int], Snapshot | Fetch]:
        plan, wire = RecoveryPlan(0, 0, 0, 0, {}, tuple(fetches)), Wire()

        def of(rank: int) -> dict[int, Snapshot | Fetch]:
            return fetch(rank, plan, self._open(rank), Loopback(wire, rank), self._open_sum(rank))

        with ThreadPoolExecutor(len(self.own)) as threads:
            results = list(threads.map(of, self.own))
        return {
            (rank, at): snapshot
            for rank, snapshots in zip(self.own, results, strict=True)
            for at, snapshot in snapshots.items()
        }

    def _open(self, rank: int) -> Callable[[Source, int, int], Snapshot | None]:
        return lambda source, owner, iteration: self.own[rank].get(iteration) if owner == rank else None

    def _open_sum(self, rank: int) -> Callable[[int, int], tuple[GroupStore, Stripe] | None]:
        def open_sum(first: int, iteration: int) -> tuple[GroupStore, Stripe] | None:
            for store in self.stores[rank]:
                if store.group.members[0] == first and (stripe := store.lease(iteration)) is not None:
                    return store, stripe
            return None

        return open_sum


@pytest.mark.parametrize(
    ("count", "members", "blocks"),
    [
        (4, 3, 1),
        (5, 4, 1),
        (5, 3, 2),
        pytest.param(7, 3, 2, marks=pytest.mark.full),
        pytest.param(7, 4, 3, marks=pytest.mark.full),
    ],
)
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.full), pytest.param(2, marks=pytest.mark.full)])
def test_every_set_of_nodes_that_may_be_lost_at_any_moment(count: int, members: int, blocks: int, seed: int) -> None:
    print(f"seed {seed}")
    for lost in itertools.chain.from_iterable(itertools.combinations(range(count), n) for n in range(1, blocks + 1)):
        random = Random(f"{seed} {lost}")
        nodes = Nodes(count, members, blocks)
        had: dict[tuple[int, int], Snapshot] = {}  # snapshots that all holders have
        deliveries = []
        for iteration in range(3):
            for rank in range(count):
                nodes.own[rank][iteration] = snapshot = snapshot_of(random, rank, iteration)
                holders = next(group.holders for group in nodes.groups if rank in group.members)
                deliveries.append((iteration, rank, snapshot, holders))
        for iteration, rank, snapshot, holders in deliveries[: random.randrange(len(deliveries) + 1)]:
            stores = [s for holder in holders for s in nodes.stores[holder] if rank in s.group.members]
            for store in stores[:-1]:
                deliver(store, snapshot)
            if deliver(stores[-1], snapshot, random.choice((None, None, None, 0, 1))):
                had[rank, iteration] = snapshot
        for rank in lost:
            nodes.lose(rank)
        rebuilt = nodes.execute(nodes.plan())
        for (rank, iteration), snapshot in had.items():
            in_part = any(
                stripe.missing
                for rank_stores in nodes.stores.values()
                for store in rank_stores
                if rank in store.group.members
                for stripe in store._stripes.values()
                if stripe.iteration == iteration
            )
            if rank in lost and not in_part:  # a snapshot sent in part need not be recoverable
                again = rebuilt[rank, iteration]
                assert isinstance(again, Snapshot)
                again.check("made again")
                assert again.header.entries == snapshot.packed()[0].entries
        assert all(rank in lost for rank, _ in rebuilt)


def test_a_snapshot_that_came_in_part_goes_on_where_it_stopped() -> None:
    random = Random(1)
    nodes = Nodes(3, 2, 1)
    (store,) = nodes.stores[nodes.groups[-1].holders[0]]
    first, second = nodes.groups[-1].members
    data = torch.randint(256, (5 << 20,), dtype=torch.uint8)
    parts = [data[at : at + (1 << 20)] for at in range(0, 5 << 20, 1 << 20)]
    entries = tuple(
        Entry("o", Saved.FULL, str(n), "uint8", n << 20, 1 << 20, digest_of(part), 0) for n, part in enumerate(parts)
    )
    snapshot = Snapshot(Header(first, 0, "s", 0, "2", entries, None, 0), Buffer(data))
    assert not deliver(store, snapshot, stop_after=2)
    assert store.stripes() == []
    assert store.schedules_of(first) == {}
    assert deliver(store, snapshot)
    assert store.schedules_of(first) == {0: "s"}
    other = snapshot_of(random, second, 0)
    assert deliver(store, other)
    (stripe,) = store.stripes()
    assert stripe.digest is not None
    nodes.own = {first: {0: snapshot}, second: {}, 3 - first - second: {}}
    rebuilt = nodes.execute(nodes.plan())
    again = rebuilt[second, 0]
    assert isinstance(again, Snapshot)
    again.check("made again")


def test_another_snapshot_of_the_same_iteration_begins_a_new_sum() -> None:
    random = Random(2)
    nodes = Nodes(3, 2, 1)
    (store,) = nodes.stores[nodes.groups[-1].holders[0]]
    first, second = nodes.groups[-1].members
    deliver(store, snapshot_of(random, first, 0))
    deliver(store, snapshot_of(random, second, 0))
    deliver(store, snapshot_of(random, first, 0))
    (stripe,) = store.stripes()
    assert list(stripe.members) == [first]
    store.drop(second, 0, 1)
    assert store.stripes(), "a member that is not in it cannot take it away"
    store.drop(first, 0, 1)
    assert not store.stripes()
    assert store.memory.arena.available == store.memory.arena.nbytes, "nothing is lost of the memory"


def test_damaged_parity_is_found_and_not_used() -> None:
    random = Random(3)
    nodes = Nodes(3, 2, 1)
    holder = nodes.groups[-1].holders[0]
    (store,) = nodes.stores[holder]
    for rank in nodes.groups[-1].members:
        nodes.own[rank][0] = snapshot_of(random, rank, 0)
        deliver(store, nodes.own[rank][0])
    lost = nodes.groups[-1].members[0]
    nodes.own[lost] = {}
    (stripe,) = store.stripes()
    stripe.total.view(0, 1)[0] ^= 1
    rebuilt = nodes.execute(nodes.plan())
    assert isinstance(rebuilt[lost, 0], Fetch), "it is named as what could not be had"


def test_members_of_other_sizes_add_at_the_same_time() -> None:
    random = Random(4)
    nodes = Nodes(7, 5, 1)
    group = nodes.groups[-1]
    store = next(candidate for candidate in nodes.stores[group.holders[0]] if candidate.group == group)
    members = store.group.members
    every = {rank: {t: snapshot_of(random, rank, t) for t in range(20)} for rank in members}
    started = threading.Barrier(len(members))

    def send(rank: int) -> None:
        started.wait()
        for snapshot in every[rank].values():
            assert deliver(store, snapshot)

    with ThreadPoolExecutor(len(members)) as threads:
        list(threads.map(send, members))
    nodes.own |= {rank: dict(snapshots) for rank, snapshots in every.items()}
    lost = members[2 % len(members)]
    nodes.own[lost] = {}
    rebuilt = nodes.execute(nodes.plan())
    for iteration, snapshot in every[lost].items():
        again = rebuilt[lost, iteration]
        assert isinstance(again, Snapshot)
        again.check("made again")
        assert again.header.entries == snapshot.packed()[0].entries


def test_memory_is_one_block_for_the_group_and_where_there_is_none_a_snapshot_has_no_room() -> None:
    group = make_groups(range(3), 2, 1)[-1]
    store = GroupStore(group, 0, CpuDevice())
    store.memory.arena.grow(2 * PAGE)

    def header(rank: int, iteration: int, nbytes: int) -> Header:
        return Header(rank, iteration, "s", 0, "2", (Entry("o", Saved.FULL, "w", "uint8", 0, nbytes, "", 0),), None, 0)

    first, second = group.members
    assert store.begin(first, header(first, 0, 10)) is store.begin(second, header(second, 0, PAGE)) is not None
    assert store.memory.arena.available == PAGE
    assert store.begin(first, header(first, 1, PAGE + 1)) is None
    assert store.begin(second, header(second, 0, PAGE)) is not None


def test_memory_goes_back_when_every_member_needs_less(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena, "SMALLEST_SLAB", PAGE)
    group = make_groups(range(3), 2, 1)[-1]
    store = GroupStore(group, 0, CpuDevice())
    (first, second), memory = group.members, store.memory
    memory.need(first, 9 * PAGE)
    memory.grow(9 * PAGE)
    assert not memory.trim(), "the other has not said what it needs"
    memory.need(second, 6 * PAGE)
    memory.need(first, 2 * PAGE)
    assert memory.trim()
    assert memory.arena.nbytes == 6 * PAGE
    memory.need(second, PAGE)
    assert memory.trim()
    assert memory.arena.nbytes == 2 * PAGE
    assert not memory.trim()
