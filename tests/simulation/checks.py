"""What has to hold, whatever happens."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from moevement_core.policy.runs import restore_points
from moevement_core.policy.schedule import LATE_AT_PEERS
from moevement_core.rendezvous.roster import NoticedBy
from moevement_core.rendezvous.takeover import split_blocks
from moevement_core.session.rejoin import Unrecoverable
from moevement_core.snapshot.arena import PAGE
from moevement_core.snapshot.snapshot import Snapshot
from tests.simulation.hosts import Job
from tests.simulation.scenario import Kind
from tests.simulation.trainer import Trainer, failure_free


class Violation(AssertionError):
    """Something does not hold that has to."""


@dataclass
class Copied:
    """What is true of a snapshot of a rank, whatever anybody knows of it."""

    schedule: str
    contents: np.ndarray
    by: set[Any] = field(default_factory=set)
    """Processes that have said that they have all of it."""
    is_persisted: bool = False
    """Whether all peers that the rank had then did."""


class Checks:
    """Of one simulation."""

    def __init__(self, job: Job) -> None:
        self.job = job
        its = job.scenario
        self.expected = failure_free(its.shape, its.iterations)
        self.newest = 0
        """The newest iteration that anybody has committed."""
        self.on_commit: Callable[[], None] = lambda: None
        """Called when that changes."""
        self.made: dict[int, set[int]] = {}
        """By generation, ranks that have a process."""
        self.copies: dict[int, dict[int, Copied]] = {rank: {} for rank in range(its.shape.ranks)}
        """By rank and iteration."""
        self.resumed_at = 0
        self.has_parity = any(flag.startswith("parity") for flag in its.flags)
        self._roster: Any = None
        self._nodes: dict[int, str] = {}
        """The node of each rank, in the newest roster."""

    def every_event(self) -> None:
        """Called after each of them; looks only where something may have changed."""
        roster = self.job.coordinator.roster
        if roster is not self._roster:
            self._roster = roster
            if len(set(roster.ranks.values())) < len(roster.ranks):
                raise Violation(f"one member has two ranks: {dict(roster.ranks)}")
            if roster.ranks and sorted(roster.ranks) != list(range(self.job.scenario.shape.ranks)):
                raise Violation(f"ranks are missing: {dict(roster.ranks)}")
            self._nodes_are_kept(roster)

    def _nodes_are_kept(self, roster: Any) -> None:
        """No rank leaves its node for a spare of another one while a process of its own node waits, and is heard."""
        before, self._nodes = self._nodes, dict(roster.nodes)
        coordinator = self.job.coordinator
        waiting = [coordinator.members[member].node for member in coordinator.waiting()]
        silent = coordinator.membership.silent_nodes()
        for rank, node in roster.nodes.items():
            if before and node != before[rank] and before[rank] in waiting and before[rank] not in silent:
                block = self._block(rank)
                is_together = len({before[one] for one in block}) == 1 == len({roster.nodes[one] for one in block})
                if not is_together:
                    raise Violation(f"rank {rank} goes to {node}, and a process waits on {before[rank]}, where it was")
        size = self.job.scenario.shape.replicas
        for number in split_blocks(roster.nodes, size) - split_blocks(before, size) if before else ():
            left = {before[rank] for rank in self._block(number * size) if roster.nodes[rank] != before[rank]}
            if any(coordinator._respawns.is_expected(node) for node in left - silent):
                raise Violation(
                    f"group {number} comes to span nodes, and a process starts where it was: {roster.nodes}"
                )

    def _block(self, rank: int) -> range:
        size = self.job.scenario.shape.replicas
        return range(rank // size * size, rank // size * size + size)

    def enters(self, process: Any) -> None:
        """A process has a rank."""
        generation = process.generation.roster.generation
        ranks = self.made.setdefault(generation, set())
        if process.rank in ranks:
            raise Violation(f"two members are rank {process.rank} in generation {generation}")
        ranks.add(process.rank)

    def enters_atomic(self, process: Any) -> None:
        """It is about to change what others could see."""
        if struct.unpack_from("<d", process.page._memory, 0)[0] <= self.job.world.now:  # whatever it believes itself
            raise Violation(f"{process.name} acts without a lease")
        for death in self.job.coordinator.deaths:
            if death.member == process.member and death.noticed_by in (NoticedBy.LEASE, NoticedBy.RESET):
                raise Violation(f"{process.name} trains, and the job goes on without it: it {death.how}")

    def updated(self, trainer: Trainer) -> None:
        """A rank has a new state: every operator that is not frozen has that of the failure-free job."""
        iteration = trainer.iteration + 1
        expected = self.expected[iteration][trainer.rank]
        for place, master in enumerate(trainer.masters.tolist()):
            if place not in trainer.frozen and master != expected[place]:
                raise Violation(f"rank {trainer.rank}: operator {place} has another state in iteration {iteration}")
        if iteration > self.newest:
            self.newest = iteration
            self.on_commit()

        if not trainer.is_replaying:
            trainer.process.committed = max(trainer.process.committed, iteration)

    # What is kept

    def acknowledged(self, rank: int, snapshot: Snapshot, peer: int, peers: set[int]) -> None:
        """A peer has a snapshot of ``rank``: whatever becomes of the rank, it can be had there."""
        process = self.job.world.current().process
        assert process.generation is not None
        its, header = self.copies[rank], snapshot.header
        known = its.get(header.iteration)
        if known is None or known.schedule != header.schedule:
            known = its[header.iteration] = Copied(header.schedule, snapshot.contents)
        known.by.add(self.job.members[process.generation.roster.ranks[peer]])
        known.is_persisted |= peers <= snapshot.acknowledged

    def forgets(self, process: Any) -> None:
        """It was interrupted before it had recovered, and starts over: copies that it had come to keep are gone."""
        for its in self.copies.values():
            for one in its.values():
                one.by.discard(process)

    def _newest_whole_run(self, alive: set[Any]) -> int | None:
        """Where the newest run begins that was persisted on all ranks, if a copy of all of it lives."""
        runs: list[dict[int, int]] = []
        for its in self.copies.values():
            held = {at: one.contents for at, one in its.items() if one.is_persisted}
            runs.append({run.first: run.last for run in restore_points(held)} if held else {})
        everywhere = set.intersection(*(set(one) for one in runs))
        if not everywhere:
            return None
        first = max(everywhere)
        last = max(one[first] for one in runs)
        whole = all(its[at].by & alive for its in self.copies.values() for at in range(first, last + 1) if at in its)
        return first if whole else None

    def _alive(self, process: Any) -> list[Any]:
        """Who lives of the generation that ``process`` is in."""
        members = process.generation.roster.ranks.values()
        return [self.job.members[one] for one in members if self.job.members[one].is_alive]

    # After a failure

    def went_on(self, process: Any, until: int) -> None:
        """Ranks have agreed on where they go on."""
        newest = max((one.committed for one in self._alive(process)), default=0)
        self.resumed_at = until
        if until < newest:
            raise Violation(f"the job goes on from iteration {until}, and a rank that lives has committed {newest}")

    def starts_over(self, process: Any, why: str) -> None:
        """The job begins again from its beginning."""
        alive = self._alive(process)
        known = [one for one in alive if one.committed > 0]
        self.job.world.say(f"{process.name} starts over: {why}")
        if known and len(alive) == self.job.scenario.shape.ranks and all(one.committed > 0 for one in alive):
            raise Violation(f"the job starts over ({why}), and no rank has lost its state")
        self.resumed_at = 0
        for one in alive:
            one.committed = 0

    def failed(self, process: Any, error: Exception) -> None:
        """A rank has found something wrong."""
        if isinstance(error, Unrecoverable):
            alive = set(self._alive(process))
            if not self.has_parity and (first := self._newest_whole_run(alive)) is not None:
                raise Violation(f"a copy of the run from {first} on lives on every rank, and {process.name}: {error}")
            process.world.say(f"{process.name}: {error}")
            process.committed = self.resumed_at = 0  # it knows of nothing that it had
        elif type(error) is not RuntimeError:
            raise Violation(f"{process.name}: {type(error).__name__}: {error}") from error

    # Bounds

    def memory(self, process: Any) -> None:
        """What is set aside for snapshots, here and for others, is what the lifetime of snapshots has for its bound."""
        checkpointer = process.training._session.saving.checkpointer
        schedules = checkpointer.history.all
        most = max(one.slots_kept(2, to_disk=False) for one in schedules)
        if len(schedules) == 1 and (count := sum(bool(one.extents) for one in checkpointer.own.buffers())) > most:
            raise Violation(f"{process.name} keeps {count} snapshots of its own; {most} are the most")
        at_peer = max(one.slots_kept(LATE_AT_PEERS, to_disk=False) for one in schedules)
        for store in () if self.has_parity else checkpointer.replicator.stores:
            if len(schedules) == 1 and (count := len(store.schedules())) > at_peer:
                raise Violation(
                    f"{process.name} keeps {count} snapshots of rank {store.source}; {at_peer} are the most"
                )
        arena = checkpointer.own.arena
        used = sum(one.memory.numel() for buffer in checkpointer.own.buffers() for one in buffer.extents)
        logged = sum(one.memory.numel() for buffer in checkpointer.capturer.buffers() for one in buffer.extents)
        if used + logged + arena.available != arena.nbytes:
            lost = (arena.nbytes - used - logged - arena.available) // PAGE
            raise Violation(f"{process.name} has lost {lost} pages of its arena")

    def placed(self, process: Any) -> None:
        """Copies are on other nodes, where there are any; unless somebody allowed them to be on their own."""
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
        """The job has come to its end, or was stopped."""
        job, its = self.job, self.job.scenario
        if job.reason:
            if not job.reason.startswith(("no spare came", "members ")):
                raise Violation(f"the job was stopped: {job.reason}")
            return
        for rank, member in job.coordinator.roster.ranks.items():
            trainer = job.members[member].training._binding
            found = tuple(trainer.masters.tolist()) if trainer is not None else None
            if trainer is None or trainer.iteration != its.iterations or found != self.expected[its.iterations][rank]:
                at = trainer.iteration if trainer is not None else None
                raise Violation(f"rank {rank} ends with another state, at iteration {at}")
            self._persisted_since(job.members[member])

    def _persisted_since(self, process: Any) -> None:
        """Where nothing has gone wrong for long, a newer window has become the one to fall back to."""
        its, lifetime = self.job.scenario, process.training._session.saving.checkpointer.lifetime
        is_calm = its.slowest_s < its.pace.compute_s and not its.drop and not its.beside_s
        is_calm &= not any(one.kind is Kind.SLOW for one in its.faults)
        reach = 3 * process.training._session.saving.checkpointer.history.newest.size + 5
        if is_calm and its.iterations - self.resumed_at > reach and lifetime.persisted < its.iterations - reach:
            raise Violation(
                f"{process.name}: nothing was persisted in the {its.iterations - self.resumed_at} iterations after "
                f"{self.resumed_at}; the window from {lifetime.persisted} on still is the newest"
            )
