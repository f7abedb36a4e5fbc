"""Invariants of a simulated job. docs/simulation_of_failures.md lists when each is checked."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from moevement_core.policy.runs import restore_points
from moevement_core.policy.schedule import LATE_AT_PEERS
from moevement_core.rendezvous.roster import NoticedBy, is_drained
from moevement_core.rendezvous.takeover import split_blocks
from moevement_core.session.rejoin import Unrecoverable
from moevement_core.snapshot.arena import PAGE
from moevement_core.snapshot.snapshot import Snapshot
from moevement_core.util.iterations import is_newer
from tests.simulation.hosts import Job
from tests.simulation.scenario import MOVES, Kind
from tests.simulation.trainer import Trainer, failure_free


class Violation(AssertionError):
    """Error raised when an invariant does not hold."""


@dataclass
class Copied:
    """Actual state of the copies of one snapshot, independent of what ranks know about it."""

    schedule: str
    contents: np.ndarray
    by: set[Any] = field(default_factory=set)
    """Processes that acknowledged the whole snapshot."""
    is_persisted: bool = False
    """True if all peers that the rank had at that time acknowledged it."""


class Checks:
    """Checks of one simulation, with the history that they need."""

    def __init__(self, job: Job) -> None:
        self.job = job
        scenario = job.scenario
        self.expected = failure_free(scenario.shape, scenario.iterations)
        self.newest = self.repeated = 0
        """Newest iteration that any rank has committed, and number of updates in replays."""
        self.on_commit: Callable[[], None] = lambda: None
        """Callback after a change of :attr:`newest`."""
        self.entered: dict[int, set[int]] = {}
        """Ranks that have a process, by generation."""
        self.copies: dict[int, dict[int, Copied]] = {rank: {} for rank in range(scenario.shape.ranks)}
        """Copies of each snapshot, by rank and iteration."""
        self.resumed_at = 0
        self.has_parity = any(flag.startswith("parity") for flag in scenario.flags)
        self._control: Any = None
        """Coordinator that was in office at the last event."""
        self._roster: Any = None
        self._ranks: dict[int, Mapping[int, int]] = {}
        """Member of each rank, by generation. Rosters of members have only some of the ranks."""
        self._nodes: dict[int, str] = {}
        """Node of each rank in the newest roster."""

    def every_event(self) -> None:
        """Check the roster after an event, if the coordinator has a new one."""
        roster = self.job.coordinator.roster
        if self.job.control is not self._control:
            # The coordinator before this one may have formed a roster that nobody has received.
            self._control, self._nodes = self.job.control, dict(roster.nodes)
        if roster is not self._roster:
            self._roster = roster
            self._ranks[roster.generation] = roster.ranks
            if len(set(roster.ranks.values())) < len(roster.ranks):
                raise Violation(f"one member has two ranks: {dict(roster.ranks)}")
            if roster.ranks and sorted(roster.ranks) != list(range(self.job.scenario.shape.ranks)):
                raise Violation(f"ranks are missing: {dict(roster.ranks)}")
            self._nodes_are_kept(roster)

    def _nodes_are_kept(self, roster: Any) -> None:
        """Check that ranks and groups leave a node only if they must.

        A rank may change its node only if no process waits on the old one, or if its group is on one node afterwards. A
        group may come to span nodes only if no process is starting on the old node. Silent and drained nodes may always
        be left, and a rank that was drained goes to another node if it can.
        """
        before, self._nodes = self._nodes, dict(roster.nodes)
        coordinator = self.job.coordinator
        waiting = [coordinator.membership.alive[member].node for member in coordinator.spares.waiting(roster)]
        silent = coordinator.membership.silent_nodes() | coordinator.drains.nodes.keys()
        moved = {death.rank for death in roster.deaths if is_drained(death)}
        for rank, node in roster.nodes.items():
            if rank in moved:
                continue
            if before and node != before[rank] and before[rank] in waiting and before[rank] not in silent:
                block = self._block(rank)
                is_together = len({roster.nodes[peer] for peer in block}) == 1
                if not is_together:
                    raise Violation(f"rank {rank} goes to {node}, and a process waits on {before[rank]}, where it was")
        size = self.job.scenario.shape.replicas
        for number in split_blocks(roster.nodes, size) - split_blocks(before, size) if before else ():
            left = {
                before[rank] for rank in self._block(number * size)
                if roster.nodes[rank] != before[rank] and rank not in moved
            }  # fmt: skip
            if any(coordinator.respawns.is_expected(node) for node in left - silent):
                raise Violation(
                    f"group {number} comes to span nodes, and a process starts where it was: {roster.nodes}"
                )

    def _block(self, rank: int) -> range:
        size = self.job.scenario.shape.replicas
        return range(rank // size * size, rank // size * size + size)

    def enters(self, process: Any) -> None:
        """Check that no two processes have the same rank in a generation."""
        generation = process.generation.roster.generation
        ranks = self.entered.setdefault(generation, set())
        if process.rank in ranks:
            raise Violation(f"two members are rank {process.rank} in generation {generation}")
        ranks.add(process.rank)

    def enters_atomic(self, process: Any) -> None:
        """Check that a process holds its lease and is still in the job before it changes shared state."""
        if struct.unpack_from("<d", process.page._memory, 0)[0] <= self.job.world.now:  # not by the product's own check
            raise Violation(f"{process.name} acts without a lease")
        for death in self.job.coordinator.losses.all:
            if death.member == process.member and death.noticed_by in (NoticedBy.LEASE, NoticedBy.RESET):
                raise Violation(f"{process.name} trains, and the job goes on without it: it {death.how}")

    def updated(self, trainer: Trainer) -> None:
        """Check that after an update every active operator has the state of the failure-free job."""
        iteration = trainer.iteration + 1
        expected = self.expected[iteration][trainer.rank]
        for place, master in enumerate(trainer.masters.tolist()):
            if place not in trainer.frozen and master != expected[place]:
                raise Violation(f"rank {trainer.rank}: operator {place} has another state in iteration {iteration}")
        self.repeated += trainer.is_replaying
        if iteration > self.newest:
            self.newest = iteration
            self.on_commit()

        if not trainer.is_replaying:
            trainer.process.committed = max(trainer.process.committed, iteration)

    # Copies of snapshots

    def acknowledged(self, rank: int, snapshot: Snapshot, peer: int, peers: set[int]) -> None:
        """Record that a peer has a snapshot of ``rank``, from where it can be fetched even if the rank is lost."""
        process = self.job.world.current().process
        assert process.generation is not None
        copies, header = self.copies[rank], snapshot.header
        known = copies.get(header.iteration)
        if known is None or known.schedule != header.schedule:
            known = copies[header.iteration] = Copied(header.schedule, snapshot.contents)
        known.by.add(self.job.members[self._ranks[process.generation.roster.generation][peer]])
        known.is_persisted |= peers <= snapshot.acknowledged

    def forgets(self, process: Any) -> None:
        """Record that a process starts over before it has recovered, and so loses the copies that it had received."""
        for copies in self.copies.values():
            for copy in copies.values():
                copy.by.discard(process)

    def _newest_whole_run(self, alive: set[Any]) -> int | None:
        """Return the first iteration of the newest recoverable run that all ranks have persisted.

        Return None if there is no such run, or if no living process has a copy of one of its snapshots.
        """
        runs: list[dict[int, int]] = []
        for copies in self.copies.values():
            held = {at: copy.contents for at, copy in copies.items() if copy.is_persisted}
            runs.append({run.first: run.last for run in restore_points(held)} if held else {})
        everywhere = set.intersection(*(set(of_rank) for of_rank in runs))
        if not everywhere:
            return None
        first = max(everywhere)
        last = max(of_rank[first] for of_rank in runs)
        whole = all(
            copies[at].by & alive for copies in self.copies.values() for at in range(first, last + 1) if at in copies
        )
        return first if whole else None

    def _alive(self, process: Any) -> list[Any]:
        """Return the living processes of the generation that ``process`` is in."""
        members = self._ranks[process.generation.roster.generation].values()
        return [self.job.members[member] for member in members if self.job.members[member].is_alive]

    # After a failure

    def went_on(self, process: Any, until: int) -> None:
        """Check that ranks resume the newest iteration that any living rank has committed."""
        newest = max((peer.committed for peer in self._alive(process)), default=0)
        self.resumed_at = until
        if until < newest:
            raise Violation(f"the job goes on from iteration {until}, and a rank that lives has committed {newest}")

    def starts_over(self, process: Any, why: str) -> None:
        """Check that the job starts over only if a rank has lost its state."""
        alive = self._alive(process)
        known = [peer for peer in alive if peer.committed > 0]
        self.job.world.say(f"{process.name} starts over: {why}")
        if all(fault.kind in MOVES for fault in self.job.scenario.faults):
            raise Violation(f"the job starts over ({why}), and nothing but moves has happened")
        if known and len(alive) == self.job.scenario.shape.ranks and all(peer.committed > 0 for peer in alive):
            raise Violation(f"the job starts over ({why}), and no rank has lost its state")
        self.resumed_at = 0
        for peer in alive:
            peer.committed = 0

    def failed(self, process: Any, error: Exception) -> None:
        """Check that a rank may raise this error.

        A ``RuntimeError`` follows from a broken connection. An ``Unrecoverable`` follows from lost copies, and is a
        violation if no copy is lost. Every other error is a violation.
        """
        if isinstance(error, Unrecoverable):
            alive = set(self._alive(process))
            if not self.has_parity and (first := self._newest_whole_run(alive)) is not None:
                raise Violation(f"a copy of the run from {first} on lives on every rank, and {process.name}: {error}")
            process.world.say(f"{process.name}: {error}")
            process.committed = self.resumed_at = 0  # the rank forgets what it had committed
        elif type(error) is not RuntimeError:
            raise Violation(f"{process.name}: {type(error).__name__}: {error}") from error

    # Bounds

    def memory(self, process: Any) -> None:
        """Check that a process keeps no more snapshots than their lifetime allows, and that its arena lost no page."""
        checkpointer = process.training._session.saving.checkpointer
        schedules = checkpointer.history.all
        most = max(schedule.retention(2, to_disk=False).slots for schedule in schedules)
        if len(schedules) == 1 and (count := sum(bool(buffer.extents) for buffer in checkpointer.own.buffers)) > most:
            raise Violation(f"{process.name} keeps {count} snapshots of its own; {most} are the most")
        at_peer = max(schedule.retention(LATE_AT_PEERS, to_disk=False).slots for schedule in schedules)
        for store in () if self.has_parity else checkpointer.replicator.stores:
            if len(schedules) == 1 and (count := len(store.schedules())) > at_peer:
                raise Violation(
                    f"{process.name} keeps {count} snapshots of rank {store.source}; {at_peer} are the most"
                )
        arena = checkpointer.own.arena
        used = sum(extent.memory.numel() for buffer in checkpointer.own.buffers for extent in buffer.extents)
        logged = sum(extent.memory.numel() for buffer in checkpointer.gradients.buffers for extent in buffer.extents)
        if used + logged + arena.available != arena.nbytes:
            lost = (arena.nbytes - used - logged - arena.available) // PAGE
            raise Violation(f"{process.name} has lost {lost} pages of its arena")

    def placed(self, process: Any) -> None:
        """Check that copies are on other nodes, if there are any and the flags do not allow the rank's own node."""
        if "--moevement-replicas-on-same-node" in self.job.scenario.flags:
            return
        topology = process.training._session.saving.topology
        others = set(topology.nodes) - {topology.nodes[topology.rank]}
        peers = topology.peers[topology.rank]
        if (
            others
            and peers
            and topology.nodes[topology.rank] in {topology.nodes[peer] for peer in peers[: len(others)]}
        ):
            raise Violation(f"copies of rank {topology.rank} are on its own node: {topology.nodes}, peers {peers}")

    def at_end(self) -> None:
        """Check the final state of every rank, or the reason why the job was stopped."""
        job, scenario = self.job, self.job.scenario
        if job.reason:
            if not job.reason.startswith(("no spare came", "members ")):
                raise Violation(f"the job was stopped: {job.reason}")
            return
        for rank, member in job.coordinator.roster.ranks.items():
            trainer = job.members[member].training._binding
            masters = tuple(trainer.masters.tolist()) if trainer is not None else None
            if (
                trainer is None
                or trainer.iteration != scenario.iterations
                or masters != self.expected[scenario.iterations][rank]
            ):
                at = trainer.iteration if trainer is not None else None
                raise Violation(f"rank {rank} ends with another state, at iteration {at}")
            self._persisted_since(job.members[member])

    def _persisted_since(self, process: Any) -> None:
        """Check that a newer window has become the restore point if the job has had no trouble for long."""
        scenario, lifetime = self.job.scenario, process.training._session.saving.checkpointer.lifetime
        is_calm = scenario.slowest_s < scenario.pace.compute_s and not scenario.drop and not scenario.beside_s
        is_calm &= not any(fault.kind is Kind.SLOW for fault in scenario.faults)
        reach = 3 * process.training._session.saving.checkpointer.history.newest.size + 5
        if (
            is_calm
            and scenario.iterations - self.resumed_at > reach
            and is_newer(scenario.iterations - reach, lifetime.first_needed)
        ):
            raise Violation(
                f"{process.name}: nothing was persisted in the {scenario.iterations - self.resumed_at} iterations "
                f"after {self.resumed_at}; the window from {lifetime.first_needed} on still is the newest"
            )
