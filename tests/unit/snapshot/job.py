"""Small job of several ranks in one process: real checkpointers, senders and receivers over a loopback wire."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import torch

from moevement_core.device import CpuDevice
from moevement_core.engine.checkpointer import Checkpointer
from moevement_core.engine.layout import OperatorState
from moevement_core.engine.memory import SnapshotMemory
from moevement_core.engine.own import OwnSnapshots
from moevement_core.operators import Operator, OperatorKind, OperatorTable, StateBytes, expert_name
from moevement_core.policy.popularity import Ordering, OrderingConfig
from moevement_core.policy.recoverable import recoverable_runs
from moevement_core.policy.schedule import Saved, ScheduleHistory
from moevement_core.policy.window import WindowKind, impose_window
from moevement_core.replication.allowance import Allowance
from moevement_core.replication.placement import place, sources_of
from moevement_core.replication.receiver import CopyReceiver
from moevement_core.replication.replica_store import ReplicaStore
from moevement_core.replication.sender import Sender
from moevement_core.snapshot.agreement import RunStatus
from moevement_core.snapshot.arena import Arena
from moevement_core.snapshot.snapshot import Snapshot, StateTensor, digest_of
from moevement_core.strategies import DenseToPeers, MoEvement, SparseSchedule, Strategy
from tests.unit.snapshot.loopback import Loopback, SharedAgreement, Wire

OPERATORS, PARAMETERS = 12, 40
RECORD_BYTES = 1024


def record_of(iteration: int) -> dict[str, object]:
    return {"iteration": iteration, "rng": torch.get_rng_state()[:9]}


class Rank:
    """Rank with live tensors that change every iteration, and a checkpointer that saves them."""

    def __init__(self, job: Job, number: int) -> None:
        self.number = number
        self.reports: list[str] = []
        self.states: dict[str, OperatorState] = {}
        self.live: dict[int, dict[tuple[str, str], str]] = {}
        for expert in range(OPERATORS):
            name = expert_name(0, expert)
            weight, master = torch.zeros(PARAMETERS, dtype=torch.bfloat16), torch.zeros(PARAMETERS)
            self.states[name] = OperatorState(
                (StateTensor(name, Saved.COMPUTE, "weight", weight),),
                (StateTensor(name, Saved.FULL, "master", master),),
            )
        transport = Loopback(job.wire, number)
        allowance, own = Allowance(job.allowance_bytes), OwnSnapshots(Arena(CpuDevice()))
        self.receivers = [
            CopyReceiver(number, ReplicaStore(source, CpuDevice()), transport, allowance, self.reports.append)
            for source in sources_of(job.placement, number)
        ]
        self.senders = [
            Sender(number, peer, transport, own.acknowledged, own.undelivered, self.reports.append)
            for peer in job.placement[number]
        ]  # fmt: skip
        agreement = SharedAgreement(job.ranks, job.board, number)
        self.checkpointer = Checkpointer(
            number, self.states, own, job.strategy(), job.history(), CpuDevice(), self.senders, self.receivers,
            agreement, SnapshotMemory(self.states, RECORD_BYTES, to_disk=False, keeps_own_copies=job.keeps_own_copies),
            Allowance(math.inf),
            self.reports.append,
        )  # fmt: skip

    @property
    def persisted(self) -> int:
        """First snapshot of the run that is persisted on every rank; there has to be one."""
        first = self.checkpointer.progress.persisted
        assert first is not None
        return first

    def change_state(self, iteration: int) -> None:
        generator = torch.Generator().manual_seed(1000 * iteration + self.number)
        for state in self.states.values():
            for tensor in (*state.compute, *state.full):
                tensor.tensor.copy_(torch.randn(PARAMETERS, generator=generator))
        self.live[iteration] = {
            (t.operator, t.key): digest_of(t.tensor.clone())
            for s in self.states.values()
            for t in (*s.compute, *s.full)
        }


class Job:
    """Job of ``ranks`` ranks on nodes of their own, each with ``replicas`` copies; windows have ``size`` iterations."""

    def __init__(
        self, ranks: int = 3, replicas: int = 1, size: int = 3, kind: WindowKind = WindowKind.ALIGNED,
        allowance_bytes: float = float("inf"), dense: bool = False, keeps_own_copies: bool = True,
    ) -> None:  # fmt: skip
        self.ranks, self.size, self.kind, self.allowance_bytes, self.dense = ranks, size, kind, allowance_bytes, dense
        self.keeps_own_copies = keeps_own_copies
        self.wire = Wire()
        self.board: dict[int, dict[int, Mapping[int, RunStatus]]] = {}
        self.placement = place(range(ranks), replicas)
        self.iteration = -1
        self.order: np.ndarray | None = None
        """Order of operators from the next window on; None if it stays."""
        self.members = [Rank(self, number) for number in range(ranks)]

    def strategy(self) -> Strategy:
        table = OperatorTable(
            Operator(expert_name(0, e), OperatorKind.EXPERT, StateBytes(2 * PARAMETERS, 4 * PARAMETERS, 0))
            for e in range(OPERATORS)
        )
        if self.dense:
            return DenseToPeers(table, self.size)
        return MoEvement(table, self.kind, self.size, OrderingConfig(Ordering.BACK_TO_FRONT))

    def history(self) -> ScheduleHistory:
        first = replace(self.strategy().first(0, OPERATORS), start=0)
        if isinstance(first, SparseSchedule):
            order = np.arange(OPERATORS)
            first = replace(first, order=order, window=impose_window(first.table, order, self.size, self.kind))
        return ScheduleHistory(first)

    def run(self, iterations: int, *, settled: bool = True, check: Callable[[], None] | None = None) -> None:
        for _ in range(iterations):
            self.iteration += 1
            self._reorder_at_boundary()
            for rank in self.members:
                rank.change_state(self.iteration)
            for rank in self.members:
                rank.checkpointer.capture(
                    self.iteration, {"iteration": self.iteration, "rng": torch.get_rng_state()[:9]}
                )
            for rank in self.members:
                rank.checkpointer.wait()
            if settled:
                self.settle()
            self.check()
            if check:
                check()

    def change_window(self, size: int) -> None:
        """Use windows of ``size`` iterations from the next window on."""
        self.size, self.order = size, np.arange(OPERATORS)

    def _reorder_at_boundary(self) -> None:
        schedule = self.members[0].checkpointer.history.at(self.iteration)
        if self.order is None or schedule.slot(self.iteration):
            return
        for rank in self.members:
            window = impose_window(schedule.table, self.order, self.size, self.kind)
            wanted = SparseSchedule(schedule.table, self.order, window)
            rank.checkpointer.room.make(rank.checkpointer.history.change(self.iteration - 1, wanted))
        self.order = None

    def settle(self, timeout_s: float = 10.0) -> None:
        """Wait until every captured snapshot is acknowledged, or until the remaining ones wait for memory of a peer."""
        deadline = time.monotonic() + timeout_s
        for rank in self.members:
            own, peers = rank.checkpointer.own, rank.checkpointer.replicator.peers
            had, since = -1, time.monotonic()
            while (acknowledged := own.acked_by(peers)).keys() != own._held.keys():
                assert time.monotonic() < deadline, f"rank {rank.number}: {rank.reports}"
                if (now := len(acknowledged)) != had:
                    had, since = now, time.monotonic()
                if time.monotonic() - since > 0.5 and any(sender.is_full for sender in rank.senders):
                    break
                time.sleep(0.001)

    def check(self) -> None:
        """Check that each rank and peer has all snapshots of the agreed persisted run, and that memory is bounded."""
        for rank in self.members:
            own = rank.checkpointer.own.snapshots
            persisted = rank.checkpointer.progress.persisted
            if persisted is not None:
                contents = {i: held.contents for i, held in rank.checkpointer.own._held.items()}
                (run,) = (run for run in recoverable_runs(contents) if run.first == persisted)
                for peer in self.placement[rank.number]:
                    (store,) = (
                        receiver.store
                        for receiver in self.members[peer].receivers
                        if receiver.store.source == rank.number
                    )
                    kept = store.snapshots()
                    for iteration in range(run.first, run.last + 1):
                        if self.keeps_own_copies:
                            self._is_what_was_live(rank, own[iteration])
                        self._is_what_was_live(rank, kept[iteration])
            own_ = rank.checkpointer.own
            held = sum(extent.memory.numel() for snapshot in own_._held.values() for extent in snapshot.buffer.extents)
            assert held + own_.arena.available <= own_.arena.nbytes

    def _is_what_was_live(self, rank: Rank, snapshot: Snapshot) -> None:
        snapshot.check(f"of rank {rank.number}")
        live = rank.live[snapshot.iteration]
        for entry in snapshot.header.entries:
            if entry.operator:
                assert entry.digest == live[entry.operator, entry.key]
        record = snapshot.record()
        assert record["iteration"] == snapshot.iteration
        assert torch.equal(record["rng"], torch.get_rng_state()[:9])

    def close(self) -> None:
        for event in self.wire.stopped.values():
            event.set()
        # All ranks at once, like processes: each waits for the BYE of the others.
        with ThreadPoolExecutor(self.ranks) as threads:
            list(threads.map(lambda rank: rank.checkpointer.close(timeout_s=1), self.members))
