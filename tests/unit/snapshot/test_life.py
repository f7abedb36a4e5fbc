"""A window lives from capture until a newer one is everywhere, whatever peers, wires and buffers do."""

from __future__ import annotations

import math
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from moevement_core.device import CpuDevice
from moevement_core.engine.checkpointer import Checkpointer
from moevement_core.engine.memory import SnapshotMemory
from moevement_core.errors import SnapshotError
from moevement_core.policy.schedule import Saved
from moevement_core.policy.window import WindowKind, impose_window
from moevement_core.recovery.places import Source
from moevement_core.recovery.sources import MemorySource
from moevement_core.replication.allowance import OWN, Allowance
from moevement_core.replication.sender import ATTEMPTS
from moevement_core.replication.wire import TO_PEER, TO_SOURCE, Kind, Message, checksum
from moevement_core.snapshot import arena as arenas
from moevement_core.snapshot.agreement import NONE, Alone
from moevement_core.snapshot.arena import PAGE
from moevement_core.snapshot.snapshot import Entry, Header, digest_of
from moevement_core.strategies import SparseSchedule
from moevement_core.util.damage import Damage
from tests.unit.snapshot.job import OPERATORS, Job, record_of
from tests.unit.snapshot.loopback import CLOSED, Loopback, SharedAgreement


@contextmanager
def job(**options: Any) -> Iterator[Job]:
    made = Job(**options)
    try:
        yield made
    finally:
        made.close()


def reports(made: Job) -> str:
    return "\n".join(text for rank in made.members for text in rank.reports)


def damage_in(log: pytest.LogCaptureFixture) -> list[Damage]:
    return [found for record in log.records if (found := Damage.parse(record.message))]


@pytest.mark.parametrize("kind", list(WindowKind))
@pytest.mark.parametrize(("ranks", "replicas", "size"), [(3, 2, 3), (2, 1, 1), (2, 1, 6), (1, 0, 2)])
def test_windows_follow_each_other_and_nothing_is_ever_missing(
    kind: WindowKind, ranks: int, replicas: int, size: int
) -> None:
    with job(ranks=ranks, replicas=replicas, size=size, kind=kind) as made:
        made.run(4 * size + 3)
        for rank in made.members:
            progress = rank.checkpointer.progress
            # Acknowledged within its iteration here; said in the next, learnt in the one after.
            newest = made.iteration - 2 if kind is WindowKind.ROLLING else (made.iteration - 1) // size * size - 1
            assert progress.persisted == newest - size + 1
            assert progress.abandoned == 0
            assert min(rank.checkpointer.own.snapshots()) == progress.persisted, "what is older is freed"
            assert len(rank.checkpointer.own.snapshots()) <= made.history().newest.slots_kept(0, to_disk=False)
            assert all(min(one.store.snapshots()) == progress.persisted for one in rank.receivers)
        assert not reports(made)


@pytest.mark.parametrize("interval", [1, 4])
def test_another_strategy_has_the_same_life(interval: int) -> None:
    with job(ranks=3, replicas=2, size=interval, dense=True) as made:
        made.run(4 * interval + 3)
        for rank in made.members:
            progress = rank.checkpointer.progress
            assert progress.persisted == (made.iteration - 2) // interval * interval
            assert progress.abandoned == 0
            assert [one % interval for one in rank.checkpointer.own.snapshots()] == [0] * len(
                rank.checkpointer.own.snapshots()
            )
            assert min(rank.checkpointer.own.snapshots()) == progress.persisted, "what is older is freed"
            assert len(rank.checkpointer.own.snapshots()) <= made.history().newest.slots_kept(0, to_disk=False)
        assert not reports(made)


@pytest.mark.parametrize("kind", list(WindowKind))
def test_own_snapshots_that_peers_have_are_dropped_and_windows_are_persisted_as_ever(kind: WindowKind) -> None:
    with job(ranks=3, replicas=2, size=3, kind=kind, keeps_own=False) as made:
        made.run(16)
        for rank in made.members:
            own = rank.checkpointer.own
            assert not own.snapshots()
            assert own.arena.available == own.arena.nbytes, "all peers have everything"
            assert own.arena.nbytes < rank.receivers[0].store.memory_bytes
            assert rank.checkpointer.progress.persisted >= made.iteration - 7
            assert rank.checkpointer.progress.abandoned == 0
        made.wire.stopped[1] = threading.Event()
        made.run(4, settled=False)
        assert len(made.members[0].checkpointer.own.snapshots()) <= 3, "what is not there yet stays"
        made.wire.stopped.pop(1).set()
        made.run(12)
        assert all(rank.checkpointer.progress.persisted >= made.iteration - 7 for rank in made.members)


def test_what_a_recovery_reads_is_not_dropped_when_peers_come_to_have_it() -> None:
    with job(ranks=2, replicas=1, size=3, keeps_own=False) as made:
        made.wire.stopped[0] = threading.Event()
        made.run(2, settled=False)
        checkpointer = made.members[0].checkpointer
        checkpointer.capturer.settle()
        source = MemorySource(checkpointer)
        opened = source.open(Source.MEMORY, 0, 1)
        assert opened is not None
        made.wire.stopped.pop(0).set()
        made.settle()
        opened.check("while a recovery reads it")
        assert list(checkpointer.own.snapshots()) == [1]
        source.release()
        assert not checkpointer.own.snapshots()


@pytest.mark.parametrize("kind", list(WindowKind))
def test_memory_is_allocated_once(kind: WindowKind) -> None:
    with job(ranks=2, kind=kind) as made:
        made.run(4)
        before = [(slab.data_ptr(), slab.numel()) for r in made.members for slab in r.checkpointer.own.arena._slabs]
        made.run(40)
        after = [(slab.data_ptr(), slab.numel()) for r in made.members for slab in r.checkpointer.own.arena._slabs]
        assert after == before


def memory_of(made: Job) -> list[tuple[int, int]]:
    """What each rank has set aside for itself, and for others."""
    return [(rank.checkpointer.own.arena.nbytes, rank.checkpointer.replicator.memory_bytes) for rank in made.members]


@pytest.fixture
def small_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arenas, "SMALLEST_SLAB", PAGE)
    monkeypatch.setattr(arenas, "WATCHED", 16)


@pytest.mark.usefixtures("small_slabs")
@pytest.mark.parametrize(
    ("kind", "keeps_own"),
    [
        (WindowKind.ROLLING, True), (WindowKind.ALIGNED, False),
        pytest.param(WindowKind.ROLLING, False, marks=pytest.mark.full),
        pytest.param(WindowKind.ALIGNED, True, marks=pytest.mark.full),
    ],
)  # fmt: skip
def test_memory_of_larger_windows_goes_when_they_are_over_and_comes_again(kind: WindowKind, keeps_own: bool) -> None:
    with job(ranks=3, replicas=2, size=6, kind=kind, keeps_own=keeps_own) as made:
        made.run(13)
        first = made.members[0].checkpointer
        large = memory_of(made)
        for size in (1, 6, 2):
            made.change_window(size)
            made.run(36)
            newest = first.history.newest
            assert newest.size == size
            assert first.progress.persisted >= made.iteration - 2 * size - 1
            here, at_peer = first.memory.here([newest]), first.memory.at_peer([newest])
            for rank in made.members:
                assert rank.checkpointer.progress.abandoned == 0
                assert rank.checkpointer._allowance.of(OWN) == here, "as much may be taken"
                assert rank.checkpointer.asked_bytes == at_peer
                assert [one._allowance.of(one.store.key) for one in rank.receivers] == [at_peer] * 2
            for own, others in memory_of(made):
                assert own <= (here - 2 * PAGE if keeps_own else here), "nothing for lag where none comes"
                assert others <= 2 * at_peer
                assert (others == large[0][1]) == (size == 6)
        assert not reports(made)


@pytest.mark.usefixtures("small_slabs")
def test_memory_for_lag_comes_again_when_a_peer_lags() -> None:
    with job(ranks=2, replicas=1, size=6) as made:
        made.run(13)
        made.change_window(1)
        made.run(36)
        before = memory_of(made)
        made.wire.stopped[1] = threading.Event()
        made.run(2, settled=False)
        made.wire.stopped.pop(1).set()
        made.run(4)
        assert all(rank.checkpointer.progress.abandoned == 0 for rank in made.members)
        assert made.members[0].checkpointer.own.arena.nbytes > before[0][0]
        here = made.members[0].checkpointer.memory.here([made.members[0].checkpointer.history.newest])
        assert made.members[0].checkpointer.own.arena.nbytes <= here
        assert not reports(made)


@pytest.mark.usefixtures("small_slabs")
def test_memory_that_was_given_back_does_not_come_again_after_a_failure() -> None:
    """The schedules that are remembered are those of before, too."""
    with job(ranks=2, replicas=1, size=6) as made:
        made.run(13)
        made.change_window(1)
        made.run(36)
        before, asked = memory_of(made), [rank.checkpointer.asked_bytes for rank in made.members]
        assert len(made.members[0].checkpointer.history.all) == 2
        for rank in made.members:
            rank.checkpointer.make_room_for_kept()
            for sender in rank.senders:
                sender.open(rank.checkpointer.asked_bytes)  # as over new connections
        made.run(3)
        assert memory_of(made) == before
        assert [rank.checkpointer.asked_bytes for rank in made.members] == asked


@pytest.mark.parametrize("kind", list(WindowKind))
def test_a_peer_that_lags_costs_the_window_under_way_and_never_the_persisted_one(kind: WindowKind) -> None:
    with job(ranks=3, size=3, kind=kind) as made:
        made.run(8)
        before = made.members[0].checkpointer.progress.persisted
        made.wire.stopped[1] = threading.Event()  # rank 1 answers nobody, and sends nothing
        made.run(20, settled=False)
        stuck = made.members[0].checkpointer
        assert before <= stuck.progress.persisted <= made.iteration - 20
        assert stuck.progress.abandoned > 0
        assert re.search(r"\biteration \d+\b.*\bhost memory\b.*\bwindow\b", reports(made))
        made.wire.stopped.pop(1).set()
        made.run(8)
        assert all(rank.checkpointer.progress.persisted > before + 8 for rank in made.members), "it catches up"


def test_a_rank_that_joins_has_room_for_snapshots_of_schedules_before() -> None:
    """A large slot of the window before, where the newest has small ones."""
    with job(ranks=1, replicas=0, size=1) as made:
        member, history = made.members[0], made.history()
        small = impose_window(history.newest.table, np.arange(OPERATORS), 4, WindowKind.ALIGNED)
        history.change(0, SparseSchedule(history.newest.table, np.arange(OPERATORS), small))
        joined = Checkpointer(
            0,
            member.states,
            made.strategy(),
            history,
            CpuDevice(),
            (),
            (),
            SharedAgreement(1, {}, 0),
            SnapshotMemory(member.states, 256, to_disk=False),
            Allowance(math.inf),
            print,
        )
        assert joined.take(history.oldest.start, record_of(0))
        joined.wait()
        joined.capturer.settle()
        assert list(joined.own.snapshots()) == [history.oldest.start]
        joined.close()


def test_a_planned_end_is_agreed_on_again_after_a_failure() -> None:
    """A rank that is new knows nothing of it: survivors that went by it would exit alone."""
    agreed = Alone()
    agreed.winding_down = lambda: True
    with job(ranks=1, replicas=0) as made:
        checkpointer = made.members[0].checkpointer
        checkpointer.rewire((), (), agreed, {})
        made.run(2)
        assert checkpointer.progress.is_winding_down
        checkpointer.rewire((), (), SharedAgreement(1, {}, 0), {})
        assert not checkpointer.progress.is_winding_down


def test_training_never_waits_for_a_silent_peer() -> None:
    with job(ranks=2) as made:
        made.run(2)
        made.wire.stopped[1] = threading.Event()
        began = time.monotonic()
        made.run(30, settled=False)
        assert time.monotonic() - began < 5
        assert made.members[0].senders[0].silent_s > 0


def test_a_snapshot_that_is_damaged_on_the_way_is_asked_for_again(caplog: pytest.LogCaptureFixture) -> None:
    with job(ranks=2) as made:
        damaged: list[int] = []

        def flip_once(source: int, peer: int, data: torch.Tensor) -> torch.Tensor:
            if source == 0 and data.numel() > 600 and data[0] != ord("{") and not damaged:
                damaged.append(data.numel())
                data[100] ^= 1
            return data

        made.wire.damage = flip_once
        made.run(8)
        assert damaged
        (found,) = damage_in(caplog)
        assert found.what.startswith("snapshot"), "and which"
        assert "again" in found.instead
        assert made.members[0].checkpointer.progress.persisted == 3


def test_a_snapshot_that_is_always_damaged_never_counts_as_persisted() -> None:
    with job(ranks=2) as made:
        made.run(6)
        persisted = made.members[0].checkpointer.progress.persisted

        def flip(source: int, peer: int, data: torch.Tensor) -> torch.Tensor:
            if source == 0 and data.numel() > 600 and data[0] != ord("{"):
                data[100] ^= 1
            return data

        made.wire.damage = flip
        made.run(9, settled=False)
        time.sleep(0.2)
        made.run(2, settled=False)
        assert made.members[0].checkpointer.progress.persisted <= persisted + 3
        told = rf"\bpeer 1\b.*\bsnapshot \d+\b.*\brank 0\b.*\bdamaged\b.*\b{ATTEMPTS}\b"
        assert re.search(told, reports(made))


def test_a_peer_that_dies_is_reported_and_its_window_stays() -> None:
    with job(ranks=3) as made:
        made.run(6)
        persisted = made.members[0].checkpointer.progress.persisted
        made.wire.cut.add(1)
        made.run(10, settled=False)
        assert made.members[0].checkpointer.progress.persisted <= persisted + 3
        assert any(re.search(rf"\bpeer 1\b.*\brank 0\b.*{CLOSED}", text) for text in made.members[0].reports)
        (keeper,) = made.placement[1]
        assert any(re.search(rf"\brank 1\b.*{CLOSED}", text) for text in made.members[keeper].reports)


def test_a_source_that_asks_for_more_than_its_allowance_is_refused() -> None:
    with job(ranks=2, allowance_bytes=1000) as made:
        made.run(3, settled=False)
        time.sleep(0.2)
        assert re.search(r"^rank 0\b.*\bGB\b.*\b0\.000 GB\b", "\n".join(made.members[1].reports), re.MULTILINE)
        assert any(re.search(r"\bpeer 1\b.*\brank 0\b.*\bhost memory\b", text) for text in made.members[0].reports)
        assert made.members[0].checkpointer.progress.persisted == NONE
        assert all(one.store.memory_bytes == 0 for rank in made.members for one in rank.receivers)


def stranger(made: Job) -> Loopback:
    """Somebody who speaks in rank 0's name once rank 0 is silent."""
    made.settle()
    return Loopback(made.wire, 0)


def header(rank: int = 0, iteration: int = 50, nbytes: int = 64) -> Header:
    entry = Entry("o", Saved.FULL, "k", "uint8", 0, nbytes, "0" * 32)
    return Header(rank, iteration, "x", 0, "2", (entry,), None, iteration)


def announce(sent: Header, iteration: int, payload_bytes: int) -> Message:
    data = torch.frombuffer(bytearray(sent.encode()), dtype=torch.uint8)
    return Message(Kind.SNAPSHOT, 0, iteration, data.numel(), payload_bytes, check=checksum(data))


def offer(transport: Loopback, sent: Header, announced: Message) -> Kind:
    data = torch.frombuffer(bytearray(sent.encode()), dtype=torch.uint8)
    transport.send(1, TO_PEER, announced.encode())
    transport.send(1, TO_PEER, data)
    answer = torch.empty(64, dtype=torch.uint8)
    transport.receive(1, TO_SOURCE, answer)
    return Message.decode(answer).kind


def test_a_header_that_is_damaged_on_the_way_is_asked_for_again(caplog: pytest.LogCaptureFixture) -> None:
    """It names tensors and holds the record of an iteration: digests of tensors say nothing of that."""
    with job(ranks=2) as made:
        damaged: list[int] = []

        def flip_once(source: int, peer: int, data: torch.Tensor) -> torch.Tensor:
            if source == 0 and data[0] == ord("{") and not damaged:
                where = bytes(data.numpy().tobytes()).index(b'"record"') + 3  # it stays JSON, of another key
                damaged.append(where)
                data[where] ^= 1
            return data

        made.wire.damage = flip_once
        made.run(8)
        assert damaged
        assert any("header" in found.by for found in damage_in(caplog))
        assert made.members[1].receivers[0].store.snapshots(), "it came at the second attempt"


@pytest.mark.parametrize(
    ("sent", "payload_bytes", "found"),
    [
        (header(rank=7), 64, r"\brank 7\b.*\biteration 50\b.*\brank 0\b"),
        (header(iteration=49), 64, r"\brank 0\b.*\biteration 49\b.*\biteration 50\b"),
        (header(nbytes=32), 64, r"\b32 bytes\b.*\b64\b"),
        (header(nbytes=10**9), 10**9, rf"\b{10**9} bytes\b"),
    ],
)
def test_a_foreign_or_torn_snapshot_never_becomes_state(sent: Header, payload_bytes: int, found: str) -> None:
    with job(ranks=2) as made:
        made.run(4)
        before = made.members[1].receivers[0].store.snapshots().keys()
        announced = announce(sent, 50, payload_bytes)
        assert offer(stranger(made), sent, announced) is Kind.REFUSED
        assert re.search(found, reports(made)), reports(made)
        assert made.members[1].receivers[0].store.snapshots().keys() == before


def test_a_stale_snapshot_is_turned_away_in_silence() -> None:
    with job(ranks=2) as made:
        made.run(9)
        sent = header(iteration=1)
        announced = announce(sent, 1, 64)
        assert offer(stranger(made), sent, announced) is Kind.STALE
        assert not reports(made), "it was on its way when the window was agreed on, and is nobody's fault"


def test_bytes_of_no_message_end_the_connection_and_nothing_else() -> None:
    with job(ranks=2) as made:
        made.run(9)
        kept = made.members[1].receivers[0].store.snapshots().keys()
        stranger(made).send(1, TO_PEER, torch.randint(256, (64,), dtype=torch.uint8))
        assert made.members[1].receivers[0].ended.wait(5)
        assert re.search(r"\brank 0\b.*\bchecksum\b", reports(made))
        assert made.members[1].receivers[0].store.snapshots().keys() == kept


def test_a_record_that_outgrows_its_room_is_an_error_not_a_torn_snapshot() -> None:
    with job(ranks=1, replicas=0) as made:
        with pytest.raises(SnapshotError, match=r"\b2048 bytes\b.*\b1024\b"):
            made.members[0].checkpointer.capture(0, {"rng": torch.zeros(2048, dtype=torch.uint8)})


def test_live_tensors_may_change_right_after_the_wait() -> None:
    with job(ranks=1, replicas=0, size=1) as made:
        rank = made.members[0]
        for iteration in range(50):
            rank.change_state(iteration)
            rank.checkpointer.capture(iteration, record_of(iteration))
            rank.checkpointer.wait()
            expected = rank.live[iteration]
            rank.change_state(iteration + 1000)  # digests and sends may still be under way
            made.settle()
            for entry in rank.checkpointer.own.snapshots()[iteration].header.entries:
                assert not entry.operator or entry.digest == expected[entry.operator, entry.key]


def test_a_failed_copy_shows_on_the_training_thread() -> None:
    with job(ranks=1, replicas=0) as made:
        rank = made.members[0]
        made.run(1)
        with patch.object(rank.checkpointer.capturer._engine, "_complete", side_effect=OSError("no memory")):
            rank.checkpointer.capture(1, {})
            with pytest.raises(OSError, match="no memory"):
                rank.checkpointer.wait()


def test_digests_are_of_the_host_copy() -> None:
    assert digest_of(torch.arange(3)) != digest_of(torch.arange(4))


@pytest.mark.parametrize("kind", list(WindowKind))
@pytest.mark.parametrize("size", [1, 4, pytest.param(8, marks=pytest.mark.full)])
def test_an_order_that_changes_costs_no_window_under_way(kind: WindowKind, size: int) -> None:
    with job(ranks=2, size=size, kind=kind) as made:
        for round_ in range(4):
            made.order = np.roll(np.arange(OPERATORS)[::-1], round_)
            made.run(2 * size)
        made.run(2 * size + 2)
        for rank in made.members:
            assert rank.checkpointer.progress.abandoned == 0
            assert rank.checkpointer.progress.persisted >= made.iteration - 3 * size - 2


@pytest.mark.parametrize(
    ("kind", "slowness"),
    [
        (WindowKind.ROLLING, 1.2),
        *(
            pytest.param(kind, slowness, marks=pytest.mark.full)
            for kind, slowness in ((WindowKind.ALIGNED, 1.2), (WindowKind.ALIGNED, 2.5), (WindowKind.ROLLING, 2.5))
        ),
    ],
)
def test_replication_that_is_too_slow_still_persists_windows_only_fewer(kind: WindowKind, slowness: float) -> None:
    with job(ranks=2, size=6, kind=kind) as made:
        snapshot_s = 0.004

        def slow(source: int, peer: int, data: torch.Tensor) -> torch.Tensor:
            if data.numel() > 600 and data[0] != ord("{"):
                time.sleep(snapshot_s * slowness)
            return data

        made.wire.damage = slow
        persisted = []
        for _ in range(120):
            made.run(1, settled=False)
            time.sleep(max(0.0, snapshot_s - 0.002))
            persisted.append(made.members[0].checkpointer.progress.persisted)
        assert persisted[-1] > persisted[60] > NONE, persisted


def test_what_goes_wrong_behind_the_back_of_training_is_shown_at_the_next_snapshot() -> None:
    with job(ranks=1, replicas=0) as made:
        rank = made.members[0].checkpointer
        made.run(1)
        with patch("moevement_core.snapshot.copies.digest_of", side_effect=OSError("no digest")):
            made.members[0].change_state(1)
            rank.capture(1, record_of(1))
            assert rank.capturer.last is not None
            rank.capturer.last.finished.wait()  # as if training had passed its wait long before
        with pytest.raises(OSError, match="no digest"):
            rank.capture(2, record_of(2))
        assert rank.own.arena.available == rank.own.arena.nbytes - PAGE, "the memory came back"


@pytest.mark.parametrize("seed", [0, 1, 2, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(3, 8))])
def test_whatever_lags_and_breaks_the_persisted_window_stays_and_the_job_gets_going_again(seed: int) -> None:
    print(f"seed {seed}")
    random = Random(seed)
    kind = random.choice(list(WindowKind))
    with job(ranks=random.randint(2, 4), size=random.randint(1, 8), kind=kind) as made:

        def damage(source: int, peer: int, data: torch.Tensor) -> torch.Tensor:
            if data.numel() > 600 and data[0] != ord("{") and random.random() < 0.2:
                data[random.randrange(data.numel())] ^= 1 << random.randrange(8)
            return data

        made.wire.damage = damage
        for _ in range(12):
            rank = random.randrange(made.ranks)
            if stopped := made.wire.stopped.pop(rank, None):
                stopped.set()
            elif random.random() < 0.5:
                made.wire.stopped[rank] = threading.Event()
            if random.random() < 0.3:
                made.order = np.array(random.sample(range(OPERATORS), OPERATORS))
            made.run(random.randint(1, 5), settled=False)  # checks what is persisted after every iteration
            time.sleep(random.random() * 0.02)
        made.wire.damage = lambda source, peer, data: data
        for rank in list(made.wire.stopped):
            made.wire.stopped.pop(rank).set()
        healed_at = made.iteration
        deadline = time.monotonic() + 60  # of a busy machine; a window is persisted within some ten iterations
        while not all(rank.checkpointer.progress.persisted > healed_at for rank in made.members):
            assert time.monotonic() < deadline, reports(made)
            made.run(1, settled=False)
            time.sleep(0.02)


def test_a_window_has_room_beside_a_persisted_run_that_is_longer() -> None:
    """A run that reaches over a reorder is; else the new window would be abandoned for ever, one snapshot short."""
    with job(ranks=2, size=4, kind=WindowKind.ROLLING) as made:
        made.run(6)
        checkpointer = made.members[0].checkpointer
        memory, schedule = checkpointer.memory, checkpointer.history.at(made.iteration)
        slots = [(schedule, slot) for slot in range(4)]
        longer = memory.run_bytes([*slots, *slots[:2]])
        assert memory.beside(longer, schedule) > memory.run_bytes(slots) + longer
        checkpointer.lifetime.last_needed = checkpointer.lifetime.persisted + 5
        before = checkpointer.asked_bytes
        checkpointer._make_more_room(schedule)
        assert checkpointer.asked_bytes >= memory.beside(longer, schedule) > before


class _Logs:
    """A capturer that notes from which mark on gradients are copied."""

    def __init__(self) -> None:
        self.marks: list[object] = []
        self.logged: list[object] = []

    def mark_gradients(self) -> object:
        self.marks.append(object())
        return self.marks[-1]

    def logs_gradients(self, iteration: int, schedule: object) -> bool:
        return True

    def log(self, iteration: int, schedule: object, ready: object) -> bool:
        self.logged.append(ready)
        return True

    def let_gradients_change(self) -> float:
        return 0.0


def test_gradients_are_copied_from_the_mark_of_their_own_update_on(monkeypatch: pytest.MonkeyPatch) -> None:
    with job(ranks=1, replicas=0) as made, monkeypatch.context() as patch:
        checkpointer, logs = made.members[0].checkpointer, _Logs()
        patch.setattr(checkpointer, "capturer", logs)
        checkpointer.mark_gradients()
        checkpointer.log_gradients(1)
        checkpointer.mark_gradients()
        checkpointer.let_gradients_go(1)  # logged by nobody
        checkpointer.log_gradients(2)
        checkpointer.mark_gradients()
        checkpointer.log_gradients(2, is_replayed=True)
        checkpointer.log_gradients(3)
    assert logs.logged == [logs.marks[0], None, None, None]
