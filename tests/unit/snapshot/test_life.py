"""A window lives from its capture until every rank has a newer one, whatever peers, wires and buffers do."""

from __future__ import annotations

import math
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from typing import Any
from unittest.mock import Mock, patch

import numpy as np
import pytest
import torch

from moevement_core.device import CpuDevice
from moevement_core.engine.checkpointer import Checkpointer
from moevement_core.engine.layout import OperatorState
from moevement_core.engine.lifetime import RunSpan
from moevement_core.engine.memory import SnapshotMemory
from moevement_core.engine.own import OwnSnapshots
from moevement_core.errors import SnapshotError
from moevement_core.operators import Operator, OperatorKind, OperatorTable, StateBytes, expert_name
from moevement_core.policy.schedule import Saved, slots_with_snapshot
from moevement_core.policy.window import WindowKind, impose_window
from moevement_core.recovery.holdings import Source
from moevement_core.recovery.sources import MemorySource
from moevement_core.replication.allowance import OWN, Allowance
from moevement_core.replication.sender import ATTEMPTS
from moevement_core.replication.wire import TO_PEER, TO_SOURCE, Message, MessageKind, checksum
from moevement_core.snapshot import arena as arenas
from moevement_core.snapshot.agreement import SingleRankAgreement
from moevement_core.snapshot.arena import PAGE, Arena
from moevement_core.snapshot.snapshot import Entry, Header, StateTensor, digest_of
from moevement_core.strategies import SparseSchedule
from moevement_core.strategies.moc import PartialSchedule
from moevement_core.util.damage import Damage
from moevement_core.util.iterations import is_newer
from tests.unit.snapshot.job import OPERATORS, Job, record_of
from tests.unit.snapshot.loopback import CLOSED, Loopback, SharedAgreement


@contextmanager
def job(**options: Any) -> Iterator[Job]:
    training = Job(**options)
    try:
        yield training
    finally:
        training.close()


def reports(training: Job) -> str:
    return "\n".join(text for rank in training.members for text in rank.reports)


def damage_in(log: pytest.LogCaptureFixture) -> list[Damage]:
    return [damage for record in log.records if (damage := Damage.parse(record.message))]


@pytest.mark.parametrize("kind", list(WindowKind))
@pytest.mark.parametrize(("ranks", "replicas", "size"), [(3, 2, 3), (2, 1, 1), (2, 1, 6), (1, 0, 2)])
def test_windows_follow_each_other_and_nothing_is_ever_missing(
    kind: WindowKind, ranks: int, replicas: int, size: int
) -> None:
    with job(ranks=ranks, replicas=replicas, size=size, kind=kind) as training:
        training.run(4 * size + 3)
        for rank in training.members:
            progress = rank.checkpointer.progress
            # A snapshot is acknowledged in its iteration, reported in the next, and agreed on in the one after.
            newest = (
                training.iteration - 2 if kind is WindowKind.ROLLING else (training.iteration - 1) // size * size - 1
            )
            assert progress.persisted == newest - size + 1
            assert progress.abandoned == 0
            assert min(rank.checkpointer.own.snapshots) == progress.persisted, "what is older is freed"
            assert len(rank.checkpointer.own.snapshots) <= training.history().newest.retention(0, to_disk=False).slots
            assert all(min(receiver.store.snapshots()) == progress.persisted for receiver in rank.receivers)
        assert not reports(training)


@pytest.mark.parametrize("interval", [1, 4])
def test_another_strategy_has_the_same_life(interval: int) -> None:
    with job(ranks=3, replicas=2, size=interval, dense=True) as training:
        training.run(4 * interval + 3)
        for rank in training.members:
            progress = rank.checkpointer.progress
            assert progress.persisted == (training.iteration - 2) // interval * interval
            assert progress.abandoned == 0
            assert [iteration % interval for iteration in rank.checkpointer.own.snapshots] == [0] * len(
                rank.checkpointer.own.snapshots
            )
            assert min(rank.checkpointer.own.snapshots) == progress.persisted, "what is older is freed"
            assert len(rank.checkpointer.own.snapshots) <= training.history().newest.retention(0, to_disk=False).slots
        assert not reports(training)


@pytest.mark.parametrize("kind", list(WindowKind))
def test_own_snapshots_that_peers_have_are_dropped_and_windows_are_persisted_as_ever(kind: WindowKind) -> None:
    with job(ranks=3, replicas=2, size=3, kind=kind, keeps_own_copies=False) as training:
        training.run(16)
        for rank in training.members:
            own = rank.checkpointer.own
            assert not own.snapshots
            assert own.arena.available == own.arena.nbytes, "all peers have everything"
            assert own.arena.nbytes < rank.receivers[0].store.memory.arena.nbytes
            assert rank.persisted >= training.iteration - 7
            assert rank.checkpointer.progress.abandoned == 0
        training.wire.stopped[1] = threading.Event()
        training.run(4, settled=False)
        assert len(training.members[0].checkpointer.own.snapshots) <= 3, "what is not there yet stays"
        training.wire.stopped.pop(1).set()
        training.run(12)
        assert all(rank.persisted >= training.iteration - 7 for rank in training.members)


def test_what_a_recovery_reads_is_not_dropped_when_peers_come_to_have_it() -> None:
    with job(ranks=2, replicas=1, size=3, keeps_own_copies=False) as training:
        training.wire.stopped[0] = threading.Event()
        training.run(2, settled=False)
        checkpointer = training.members[0].checkpointer
        checkpointer.capturer.settle()
        source = MemorySource(checkpointer)
        opened = source.open(Source.MEMORY, 0, 1)
        assert opened is not None
        training.wire.stopped.pop(0).set()
        training.settle()
        opened.check("while a recovery reads it")
        assert list(checkpointer.own.snapshots) == [1]
        source.release()
        assert not checkpointer.own.snapshots


@pytest.mark.parametrize("kind", list(WindowKind))
def test_memory_is_allocated_once(kind: WindowKind) -> None:
    with job(ranks=2, kind=kind) as training:
        training.run(4)
        before = [(slab.data_ptr(), slab.numel()) for r in training.members for slab in r.checkpointer.own.arena._slabs]
        training.run(40)
        after = [(slab.data_ptr(), slab.numel()) for r in training.members for slab in r.checkpointer.own.arena._slabs]
        assert after == before


def memory_of(training: Job) -> list[tuple[int, int]]:
    """Return the bytes that each rank has allocated for its own snapshots, and for those of other ranks."""
    return [
        (rank.checkpointer.own.arena.nbytes, rank.checkpointer.replicator.memory_bytes) for rank in training.members
    ]


@pytest.fixture
def small_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arenas, "SMALLEST_SLAB", PAGE)
    monkeypatch.setattr(arenas, "WATCHED", 16)


@pytest.mark.usefixtures("small_slabs")
@pytest.mark.parametrize(
    ("kind", "keeps_own_copies"),
    [
        (WindowKind.ROLLING, True), (WindowKind.ALIGNED, False),
        pytest.param(WindowKind.ROLLING, False, marks=pytest.mark.full),
        pytest.param(WindowKind.ALIGNED, True, marks=pytest.mark.full),
    ],
)  # fmt: skip
def test_memory_of_larger_windows_goes_when_they_are_over_and_comes_again(
    kind: WindowKind, keeps_own_copies: bool
) -> None:
    with job(ranks=3, replicas=2, size=6, kind=kind, keeps_own_copies=keeps_own_copies) as training:
        training.run(13)
        first = training.members[0].checkpointer
        large = memory_of(training)
        for size in (1, 6, 2):
            training.change_window(size)
            training.run(36)
            newest = first.history.newest
            assert newest.size == size
            assert training.members[0].persisted >= training.iteration - 2 * size - 1
            here, at_peer = first.memory.here([newest]), first.memory.at_peer([newest])
            for rank in training.members:
                assert rank.checkpointer.progress.abandoned == 0
                assert rank.checkpointer._allowance.of(OWN) == here, "as much may be taken"
                assert rank.checkpointer.room.asked_bytes == at_peer
                taken = [receiver._allowance.of(receiver.store.memory.key) for receiver in rank.receivers]
                assert taken == [at_peer] * 2
            for own, others in memory_of(training):
                assert own <= (here - 2 * PAGE if keeps_own_copies else here), "nothing for lag where none comes"
                assert others <= 2 * at_peer
                assert (others == large[0][1]) == (size == 6)
        assert not reports(training)


@pytest.mark.usefixtures("small_slabs")
def test_memory_for_lag_comes_again_when_a_peer_lags() -> None:
    with job(ranks=2, replicas=1, size=6) as training:
        training.run(13)
        training.change_window(1)
        training.run(36)
        before = memory_of(training)
        training.wire.stopped[1] = threading.Event()
        training.run(2, settled=False)
        training.wire.stopped.pop(1).set()
        training.run(4)
        assert all(rank.checkpointer.progress.abandoned == 0 for rank in training.members)
        assert training.members[0].checkpointer.own.arena.nbytes > before[0][0]
        here = training.members[0].checkpointer.memory.here([training.members[0].checkpointer.history.newest])
        assert training.members[0].checkpointer.own.arena.nbytes <= here
        assert not reports(training)


@pytest.mark.usefixtures("small_slabs")
def test_memory_that_was_given_back_does_not_come_again_after_a_failure() -> None:
    """Check that no rank allocates memory for remembered schedules of larger windows again after a failure."""
    with job(ranks=2, replicas=1, size=6) as training:
        training.run(13)
        training.change_window(1)
        training.run(36)
        before, asked = memory_of(training), [rank.checkpointer.room.asked_bytes for rank in training.members]
        assert len(training.members[0].checkpointer.history.all) == 2
        for rank in training.members:
            rank.checkpointer.room.make_for_kept(rank.checkpointer.kept_schedules)
            for sender in rank.senders:
                sender.open(rank.checkpointer.room.asked_bytes)  # as over new connections
        training.run(3)
        assert memory_of(training) == before
        assert [rank.checkpointer.room.asked_bytes for rank in training.members] == asked


@pytest.mark.parametrize("kind", list(WindowKind))
def test_a_peer_that_lags_costs_the_window_under_way_and_never_the_persisted_one(kind: WindowKind) -> None:
    with job(ranks=3, size=3, kind=kind) as training:
        training.run(8)
        before = training.members[0].persisted
        training.wire.stopped[1] = threading.Event()  # rank 1 neither answers nor sends
        training.run(20, settled=False)
        stuck = training.members[0].checkpointer
        assert before <= training.members[0].persisted <= training.iteration - 20
        assert stuck.progress.abandoned > 0
        assert re.search(r"\biteration \d+\b.*\bhost memory\b.*\bwindow\b", reports(training))
        training.wire.stopped.pop(1).set()
        training.run(8)
        assert all(rank.persisted > before + 8 for rank in training.members), "it catches up"


def test_a_rank_that_joins_has_room_for_snapshots_of_schedules_before() -> None:
    """Capture a large slot of an earlier window, while the newest window has small ones."""
    with job(ranks=1, replicas=0, size=1) as training:
        member, history = training.members[0], training.history()
        small = impose_window(history.newest.table, np.arange(OPERATORS), 4, WindowKind.ALIGNED)
        history.change(0, SparseSchedule(history.newest.table, np.arange(OPERATORS), small))
        joined = Checkpointer(
            0,
            member.states,
            OwnSnapshots(Arena(CpuDevice())),
            training.strategy(),
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
        assert list(joined.own.snapshots) == [history.oldest.start]
        joined.close()


def test_a_planned_end_is_agreed_on_again_after_a_failure() -> None:
    """Forget the planned end: a replacement does not know of it, so survivors that kept to it would exit alone."""
    agreed = SingleRankAgreement()
    agreed.winding_down = lambda: True
    with job(ranks=1, replicas=0) as training:
        checkpointer = training.members[0].checkpointer
        checkpointer.rewire((), (), agreed, {})
        training.run(2)
        assert checkpointer.progress.is_winding_down
        checkpointer.rewire((), (), SharedAgreement(1, {}, 0), {})
        assert not checkpointer.progress.is_winding_down


def test_training_never_waits_for_a_silent_peer() -> None:
    with job(ranks=2) as training:
        training.run(2)
        training.wire.stopped[1] = threading.Event()
        began = time.monotonic()
        training.run(30, settled=False)
        assert time.monotonic() - began < 5
        assert training.members[0].senders[0].silent_s > 0


def test_a_snapshot_that_is_damaged_on_the_way_is_asked_for_again(caplog: pytest.LogCaptureFixture) -> None:
    with job(ranks=2) as training:
        damaged: list[int] = []

        def flip_once(source: int, peer: int, data: torch.Tensor) -> torch.Tensor:
            if source == 0 and data.numel() > 600 and data[0] != ord("{") and not damaged:
                damaged.append(data.numel())
                data[100] ^= 1
            return data

        training.wire.damage = flip_once
        training.run(8)
        assert damaged
        (damage,) = damage_in(caplog)
        assert damage.data.startswith("snapshot"), "and which"
        assert "again" in damage.action
        assert training.members[0].checkpointer.progress.persisted == 3


def test_a_snapshot_that_is_always_damaged_never_counts_as_persisted() -> None:
    with job(ranks=2) as training:
        training.run(6)
        persisted = training.members[0].persisted

        def flip(source: int, peer: int, data: torch.Tensor) -> torch.Tensor:
            if source == 0 and data.numel() > 600 and data[0] != ord("{"):
                data[100] ^= 1
            return data

        training.wire.damage = flip
        training.run(9, settled=False)
        time.sleep(0.2)
        training.run(2, settled=False)
        assert training.members[0].persisted <= persisted + 3
        pattern = rf"\bpeer 1\b.*\bsnapshot \d+\b.*\brank 0\b.*\bdamaged\b.*\b{ATTEMPTS}\b"
        assert re.search(pattern, reports(training))


def test_a_peer_that_dies_is_reported_and_its_window_stays() -> None:
    with job(ranks=3) as training:
        training.run(6)
        persisted = training.members[0].persisted
        training.wire.cut.add(1)
        training.run(10, settled=False)
        assert training.members[0].persisted <= persisted + 3
        assert any(re.search(rf"\bpeer 1\b.*\brank 0\b.*{CLOSED}", text) for text in training.members[0].reports)
        (keeper,) = training.placement[1]
        assert any(re.search(rf"\brank 1\b.*{CLOSED}", text) for text in training.members[keeper].reports)


def test_a_source_that_asks_for_more_than_its_allowance_is_refused() -> None:
    with job(ranks=2, allowance_bytes=1000) as training:
        training.run(3, settled=False)
        time.sleep(0.2)
        assert re.search(r"^rank 0\b.*\bGB\b.*\b0\.000 GB\b", "\n".join(training.members[1].reports), re.MULTILINE)
        assert any(re.search(r"\bpeer 1\b.*\brank 0\b.*\bhost memory\b", text) for text in training.members[0].reports)
        assert training.members[0].checkpointer.progress.persisted is None
        assert all(receiver.store.memory.arena.nbytes == 0 for rank in training.members for receiver in rank.receivers)


def stranger(training: Job) -> Loopback:
    """Return the transport of an impostor, which sends as rank 0 once rank 0 is silent."""
    training.settle()
    return Loopback(training.wire, 0)


def header(rank: int = 0, iteration: int = 50, nbytes: int = 64) -> Header:
    entry = Entry("o", Saved.FULL, "k", "uint8", 0, nbytes, "0" * 32)
    return Header(rank, iteration, "x", 0, "2", (entry,), None, iteration)


def announce(sent: Header, iteration: int, payload_bytes: int) -> Message:
    data = torch.frombuffer(bytearray(sent.encode()), dtype=torch.uint8)
    return Message(MessageKind.SNAPSHOT, 0, iteration, data.numel(), payload_bytes, check=checksum(data))


def offer(transport: Loopback, sent: Header, announced: Message) -> MessageKind:
    data = torch.frombuffer(bytearray(sent.encode()), dtype=torch.uint8)
    transport.send(1, TO_PEER, announced.encode())
    transport.send(1, TO_PEER, data)
    answer = torch.empty(64, dtype=torch.uint8)
    transport.receive(1, TO_SOURCE, answer)
    return Message.decode(answer).kind


def test_a_header_that_is_damaged_on_the_way_is_asked_for_again(caplog: pytest.LogCaptureFixture) -> None:
    """Flip a bit in the record of a header, which no digest of a tensor covers."""
    with job(ranks=2) as training:
        damaged: list[int] = []

        def flip_once(source: int, peer: int, data: torch.Tensor) -> torch.Tensor:
            if source == 0 and data[0] == ord("{") and not damaged:
                position = bytes(data.numpy().tobytes()).index(b'"record"') + 3  # still JSON, with another key
                damaged.append(position)
                data[position] ^= 1
            return data

        training.wire.damage = flip_once
        training.run(8)
        assert damaged
        assert any("header" in damage.check for damage in damage_in(caplog))
        assert training.members[1].receivers[0].store.snapshots(), "it came at the second attempt"


@pytest.mark.parametrize(
    ("sent", "payload_bytes", "pattern"),
    [
        (header(rank=7), 64, r"\brank 7\b.*\biteration 50\b.*\brank 0\b"),
        (header(iteration=49), 64, r"\brank 0\b.*\biteration 49\b.*\biteration 50\b"),
        (header(nbytes=32), 64, r"\b32 bytes\b.*\b64\b"),
        (header(nbytes=10**9), 10**9, rf"\b{10**9} bytes\b"),
    ],
)
def test_a_foreign_or_torn_snapshot_never_becomes_state(sent: Header, payload_bytes: int, pattern: str) -> None:
    with job(ranks=2) as training:
        training.run(4)
        before = training.members[1].receivers[0].store.snapshots().keys()
        announced = announce(sent, 50, payload_bytes)
        assert offer(stranger(training), sent, announced) is MessageKind.REFUSED
        assert re.search(pattern, reports(training)), reports(training)
        assert training.members[1].receivers[0].store.snapshots().keys() == before


def test_a_stale_snapshot_is_turned_away_in_silence() -> None:
    with job(ranks=2) as training:
        training.run(9)
        sent = header(iteration=1)
        announced = announce(sent, 1, 64)
        assert offer(stranger(training), sent, announced) is MessageKind.STALE
        assert not reports(training), "it was on its way when the window was agreed on, and is nobody's fault"


def test_bytes_of_no_message_end_the_connection_and_nothing_else() -> None:
    with job(ranks=2) as training:
        training.run(9)
        kept = training.members[1].receivers[0].store.snapshots().keys()
        stranger(training).send(1, TO_PEER, torch.randint(256, (64,), dtype=torch.uint8))
        assert training.members[1].receivers[0].ended.wait(5)
        assert re.search(r"\brank 0\b.*\bchecksum\b", reports(training))
        assert training.members[1].receivers[0].store.snapshots().keys() == kept


def test_a_record_that_outgrows_its_room_is_an_error_not_a_torn_snapshot() -> None:
    with job(ranks=1, replicas=0) as training:
        with pytest.raises(SnapshotError, match=r"\b2048 bytes\b.*\b1024\b"):
            training.members[0].checkpointer.capture(0, {"rng": torch.zeros(2048, dtype=torch.uint8)})


def test_live_tensors_may_change_right_after_the_wait() -> None:
    with job(ranks=1, replicas=0, size=1) as training:
        rank = training.members[0]
        for iteration in range(50):
            rank.change_state(iteration)
            rank.checkpointer.capture(iteration, record_of(iteration))
            rank.checkpointer.wait()
            expected = rank.live[iteration]
            rank.change_state(iteration + 1000)  # digests and sends may still be under way
            training.settle()
            for entry in rank.checkpointer.own.snapshots[iteration].header.entries:
                assert not entry.operator or entry.digest == expected[entry.operator, entry.key]


def test_a_failed_copy_shows_on_the_training_thread() -> None:
    with job(ranks=1, replicas=0) as training:
        rank = training.members[0]
        training.run(1)
        with patch.object(rank.checkpointer.capturer._engine, "_complete", side_effect=OSError("no memory")):
            rank.checkpointer.capture(1, {})
            with pytest.raises(OSError, match="no memory"):
                rank.checkpointer.wait()


def test_digests_are_of_the_host_copy() -> None:
    assert digest_of(torch.arange(3)) != digest_of(torch.arange(4))


@pytest.mark.parametrize("kind", list(WindowKind))
@pytest.mark.parametrize("size", [1, 4, pytest.param(8, marks=pytest.mark.full)])
def test_an_order_that_changes_costs_no_window_under_way(kind: WindowKind, size: int) -> None:
    with job(ranks=2, size=size, kind=kind) as training:
        for round_ in range(4):
            training.order = np.roll(np.arange(OPERATORS)[::-1], round_)
            training.run(2 * size)
        training.run(2 * size + 2)
        for rank in training.members:
            assert rank.checkpointer.progress.abandoned == 0
            assert rank.persisted >= training.iteration - 3 * size - 2


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
    with job(ranks=2, size=6, kind=kind) as training:
        snapshot_s = 0.004

        def slow(source: int, peer: int, data: torch.Tensor) -> torch.Tensor:
            if data.numel() > 600 and data[0] != ord("{"):
                time.sleep(snapshot_s * slowness)
            return data

        training.wire.damage = slow
        persisted = []
        for _ in range(120):
            training.run(1, settled=False)
            time.sleep(max(0.0, snapshot_s - 0.002))
            persisted.append(training.members[0].checkpointer.progress.persisted)
        assert persisted[60] is not None
        assert is_newer(persisted[-1], persisted[60]), persisted


def test_what_goes_wrong_behind_the_back_of_training_is_shown_at_the_next_snapshot() -> None:
    with job(ranks=1, replicas=0) as training:
        rank = training.members[0].checkpointer
        training.run(1)
        with patch("moevement_core.snapshot.copies.digest_of", side_effect=OSError("no digest")):
            training.members[0].change_state(1)
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
    with job(ranks=random.randint(2, 4), size=random.randint(1, 8), kind=kind) as training:

        def damage(source: int, peer: int, data: torch.Tensor) -> torch.Tensor:
            if data.numel() > 600 and data[0] != ord("{") and random.random() < 0.2:
                data[random.randrange(data.numel())] ^= 1 << random.randrange(8)
            return data

        training.wire.damage = damage
        for _ in range(12):
            rank = random.randrange(training.ranks)
            if stopped := training.wire.stopped.pop(rank, None):
                stopped.set()
            elif random.random() < 0.5:
                training.wire.stopped[rank] = threading.Event()
            if random.random() < 0.3:
                training.order = np.array(random.sample(range(OPERATORS), OPERATORS))
            training.run(random.randint(1, 5), settled=False)  # checks what is persisted after every iteration
            time.sleep(random.random() * 0.02)
        training.wire.damage = lambda source, peer, data: data
        for rank in list(training.wire.stopped):
            training.wire.stopped.pop(rank).set()
        healed_at = training.iteration
        deadline = time.monotonic() + 60  # for a busy machine; a window is persisted within about ten iterations
        while not all(is_newer(rank.checkpointer.progress.persisted, healed_at) for rank in training.members):
            assert time.monotonic() < deadline, reports(training)
            training.run(1, settled=False)
            time.sleep(0.02)


def test_a_window_has_room_beside_a_persisted_run_that_is_longer() -> None:
    """Use a recoverable run across a reorder. Without more memory, each new window would lack its last snapshot."""
    with job(ranks=2, size=4, kind=WindowKind.ROLLING) as training:
        training.run(6)
        checkpointer = training.members[0].checkpointer
        memory, schedule = checkpointer.memory, checkpointer.history.at(training.iteration)
        slots = [(schedule, slot) for slot in range(4)]
        longer = memory.run_bytes([*slots, *slots[:2]])
        assert memory.beside(longer, schedule) > memory.run_bytes(slots) + longer
        first = training.members[0].persisted
        checkpointer.lifetime.persisted = RunSpan(first, first + 5)
        before = checkpointer.room.asked_bytes
        checkpointer.room.make_beside(checkpointer._persisted_bytes(), schedule)
        assert checkpointer.room.asked_bytes >= memory.beside(longer, schedule) > before


def test_the_bytes_of_a_run_are_those_of_its_snapshots_also_with_an_interval() -> None:
    names = [expert_name(0, expert) for expert in range(4)]
    masters = [torch.zeros(20_000 * (expert + 1)) for expert in range(4)]
    states = {
        name: OperatorState((), (StateTensor(name, Saved.FULL, "master", master),))
        for name, master in zip(names, masters, strict=True)
    }
    table = OperatorTable(
        Operator(name, OperatorKind.EXPERT, StateBytes(0, master.nbytes, 0))
        for name, master in zip(names, masters, strict=True)
    )
    schedule, memory = PartialSchedule(table, interval=3, experts=1, most=4), SnapshotMemory(states, 0, to_disk=False)
    whole = dict(zip(slots_with_snapshot(schedule), memory.slots_here(schedule), strict=True))
    assert list(whole) == [0, 3, 6, 9]
    assert len(set(whole.values())) == 4
    for slots in ([6], [0, 3], [9, 0, 3, 6]):
        assert memory.run_bytes((schedule, slot) for slot in slots) == sum(whole[slot] for slot in slots)


class _Marks:
    """Device that keeps the events from which gradients are copied."""

    def __init__(self) -> None:
        self.events: list[Mock] = []

    def event(self) -> Mock:
        self.events.append(Mock())
        return self.events[-1]


def test_gradients_are_copied_from_the_mark_of_their_own_update_on(monkeypatch: pytest.MonkeyPatch) -> None:
    with job(ranks=1, replicas=0) as training, monkeypatch.context() as patch:
        checkpointer, marks, ready = training.members[0].checkpointer, _Marks(), list[object]()

        def copy(iteration: int, schedule: object) -> bool:
            ready.append(gradients._ready)
            return True

        gradients = checkpointer.gradients
        patch.setattr(gradients, "_device", marks)
        patch.setattr(gradients, "are_due", lambda iteration, schedule: True)
        patch.setattr(gradients, "copy", copy)
        gradients.mark()
        checkpointer.log_gradients(1)
        gradients.mark()
        gradients.wait(1)  # never logged
        checkpointer.log_gradients(2)
        gradients.mark()
        checkpointer.log_gradients(2, is_replayed=True)
        checkpointer.log_gradients(3)
    assert ready == [marks.events[0], None, None, None]
