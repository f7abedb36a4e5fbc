"""Forms the job: the first time, and again after every failure. One per job, where its store is.

It decides alone, so that nobody has to agree on anything while processes die. Every member, rank or spare, has a lease
that its supervisor renews; one whose lease runs out is dead, whether anybody saw it end or not. Survivors keep their
ranks, and a spare takes over each rank that is lost. An elastic job goes on with fewer ranks where no spare is left,
and with more again when processes have come. A roster is a proposal until all of its members have acknowledged
it: only then does any of them enter training.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from typing import Any

from moevement_core.rendezvous.attempts import Attempts
from moevement_core.rendezvous.devices import CHECK_S, assign_devices, identity, with_free_device
from moevement_core.rendezvous.entered import Entered
from moevement_core.rendezvous.losses import Losses
from moevement_core.rendezvous.membership import LEASES_TO_LEAVE, Membership
from moevement_core.rendezvous.now_and_then import Now
from moevement_core.rendezvous.resizing import Grid
from moevement_core.rendezvous.respawns import WAIT_S, Respawns
from moevement_core.rendezvous.roster import (
    ACKNOWLEDGED,
    BLOCKS,
    ELASTIC,
    GIVEN_BACK,
    GIVEN_UP,
    JOB_NAME,
    NEWEST,
    ROSTER,
    START,
    STOP,
    Death,
    GivenBack,
    MemberInfo,
    NoticedBy,
    Roster,
)
from moevement_core.rendezvous.signed_store import CLAIMED, SignedStore
from moevement_core.rendezvous.takeover import split_blocks, take_over

LEASE_S = 10.0
"""The default of ``--moevement-lease-seconds``, from which every other timeout derives."""

WRITTEN_ONCE = ("job/", "tasks/", "injected/")
"""What processes write once in the life of the job, and may not be there to write again."""


MOST_REPORTED = 5
"""Groups of ranks that span nodes, of which each is named."""


class State(Enum):
    """Where the job stands."""

    FORMING = "forming"
    PROPOSED = "proposed"
    """A roster waits for the acknowledgement of its members."""
    RUNNING = "running"
    STOPPED = "stopped"
    """No rank will go on; the reason has been published."""
    DONE = "done"
    """Every rank has come to the end."""


class Coordinator:
    """To be asked to :meth:`step` often, by one thread.

    Args:
        store: the job's.
        ranks: of the job.
        spare_timeout_s: how long to wait for a spare where none is left.
        report: called, in words, with what an operator should know.
        interrupt: interrupts the ranks of a generation; called with the generation and the rank that is lost.
        lease_s: after so many seconds without a word of it a member is dead.
        clock: seconds, monotonic.
        respawn_wait_s: how long to wait for the first process that is started in the place of another one on its node,
            where ranks that communicate in every layer would come to be on several nodes without it; 0: none comes.
    """

    def __init__(
        self,
        store: SignedStore,
        ranks: int,
        spare_timeout_s: float,
        report: Callable[[str], None],
        *,
        interrupt: Callable[[int, int], None] = lambda generation, rank: None,
        lease_s: float = LEASE_S,
        clock: Callable[[], float] = time.monotonic,
        respawn_wait_s: float = WAIT_S,
    ) -> None:
        self.state = State.FORMING
        self.roster = Roster(-1, {})
        """The newest; a proposal while the state is PROPOSED."""
        self.membership = Membership(store, lease_s, clock)
        self.losses = Losses()
        self.given_up: set[int] = set()
        """Members that the job goes on without though nobody saw them end: whoever started them ends them."""
        self.waits_for_respawn = False
        """Whether spares wait, and the job still waits for a process on the node of one that ended."""
        self._store, self._ranks, self._spare_timeout_s, self._report = store, ranks, spare_timeout_s, report
        self._interrupt, self._clock = interrupt, clock
        self._entered = Entered(store, clock)
        self._attempts = Attempts()
        self._is_reported = False
        self._interrupted_at = self._proposed_at = 0.0
        self._leave_by: dict[int, float] = {}
        """When each member is given up that has not left since the interruption."""
        self._form_at: float | None = None
        """When the job may be formed again; nothing while that is not decided for this interruption."""
        self._short_since: float | None = None
        """Since when everyone else is there and only spares are missing."""
        self._grid: Grid | None = None
        """Of an elastic job, as soon as any of its ranks has said that it is one."""
        self._is_winding_down = False
        self._judged = -1
        """The newest generation whose results that were not finite were acted upon."""
        self._suspect_nodes: set[str] = set()
        """Nodes of processes that computed them; a spare on such a node is the last to be taken."""
        self._broken: set[str] = set()
        """Identities of devices that no process can use."""
        self._respawns = Respawns(clock, respawn_wait_s)
        self._block = 1
        """Consecutive ranks that communicate in every layer, and are kept on one node."""
        self._split: set[int] = set()
        """Blocks of them that span nodes, as they were reported."""
        self._adopts = Now(clock)
        store.claim(JOB_NAME, uuid.uuid4().hex[:8])  # whoever asks later finds it, and it is kept from here on
        store.set(NEWEST, "-1")

    @property
    def members(self) -> Mapping[int, MemberInfo]:
        """Everyone who has joined and lives."""
        return self.membership.alive

    @property
    def lease_s(self) -> float:
        """After so many seconds without a word of it a member is dead."""
        return self.membership.lease_s

    @lease_s.setter
    def lease_s(self, lease_s: float) -> None:
        self.membership.lease_s = lease_s

    @property
    def deaths(self) -> Sequence[Death]:
        """All of the job, spares included, in the order in which they were noticed."""
        return self.losses.all

    # Who lives

    def renew(self, members: Mapping[int, int | None]) -> None:
        """A supervisor has found these members alive; with the newest iteration that each has committed, if any."""
        for member, committed in members.items():
            self.membership.renew(member)
            if committed is not None:
                self._attempts.committed(committed)

    def disconnected(self, members: Iterable[int]) -> None:
        """The connection of the supervisor of these members broke."""
        self.membership.disconnected(members)

    def died(self, member: int, pid: int, how: str, noticed_by: NoticedBy = NoticedBy.SUPERVISOR) -> int | None:
        """A member is gone; returns the rank that it was, nothing if it was none."""
        if member in self.membership.dead:
            return None  # given up before its process ended
        node = self.members[member].node if member in self.members else ""
        is_stopped = noticed_by is NoticedBy.LEASE and self.membership.hears(node, but=member)
        if noticed_by in (NoticedBy.SUPERVISOR, NoticedBy.TIMEOUT) or is_stopped:
            self._respawns.begins(node)
        elif noticed_by in (NoticedBy.RESET, NoticedBy.LEASE):
            self._respawns.are_lost(node)
        if (word := self._store.read(f"{GIVEN_BACK}/{member}")) is not None:
            how, noticed_by = self._take_back(node, GivenBack.decode(word)), NoticedBy.DEVICE
        rank = self.roster.rank_of(member)
        self.losses.add(member, rank, pid, how, noticed_by, self.membership.remove(member))
        if noticed_by is not NoticedBy.SUPERVISOR:
            self.given_up.add(member)
            self._store.set(GIVEN_UP.format(member), how)
        if rank is not None and self.state not in (State.STOPPED, State.DONE):
            self._interrupt(self.roster.generation, rank)
            self._interrupted()
            self._form_at = self._short_since = None  # a process for this one has only begun to start
        return rank

    def has_trained(self, member: int | None = None) -> bool:
        """Return whether the job has committed an iteration, or was formed without ``member`` among its ranks."""
        is_outside = member is not None and self.roster.generation >= 0 and self.roster.rank_of(member) is None
        return self._attempts.has_committed or is_outside

    def wind_down(self) -> None:
        """Note that the job was asked to end at the next boundary: it does not begin again once all its ranks are lost.

        It would begin with what was saved last, or with the first iteration, and end after one more.
        """
        self._is_winding_down = True

    def stop(self, reason: str) -> None:
        """End the job; everyone who waits finds the reason."""
        self._store.set(STOP, reason)
        self.state = State.STOPPED

    @property
    def rejected(self) -> int:
        """Values in the job's store that were of none of its processes, and did not count."""
        return self._store.rejected

    def _report_rejected(self) -> None:
        if rejected := self._store.rejected:
            self._report(f"{rejected} values in the job's store were of none of its processes, and did not count")

    def step(self) -> None:
        """Look at the store and the leases and do what is to be done; never waits."""
        self._store.keep_written()
        if self._adopts.is_due(rung=self._store.has_rung(CLAIMED)):
            with self._adopts:
                self._store.adopt(*WRITTEN_ONCE)
        for info in self.membership.welcome():
            self._respawns.has_joined(info.node)
        for member, how, noticed_by in self.membership.lost():
            self._lose(member, how, noticed_by)
        if self._store.has_rung(GIVEN_BACK):  # a process that cannot end, because of its device, is not waited for
            for member in [one for one in self.members if self._store.check([f"{GIVEN_BACK}/{one}"])]:
                self._lose(member, "gave its rank back", NoticedBy.DEVICE)
        if self.state in (State.STOPPED, State.DONE):
            return
        if self._all_finished():
            self._report_rejected()
            self.state = State.DONE
            self._store.set(STOP, "")
        elif self.state is State.RUNNING and (self._leaving() or self._is_to_grow()):
            self._interrupted()
        elif self.state is State.PROPOSED:
            self._start_if_acknowledged()
        elif self.state is State.FORMING:
            self._form()

    def waiting(self) -> list[int]:
        """Members that could take a rank, those of the roster not among them; in the order in which they came.

        Those on the nodes of processes that computed results that were not finite come last. Those for which no device
        is left are not among them, once the job was formed.
        """
        waiting = sorted(self._without_rank(), key=lambda info: info.node in self._suspect_nodes)
        if self.roster.generation >= 0 and any(info.devices for info in waiting):
            waiting = with_free_device(waiting, self._devices_in_use())
        return [info.member for info in waiting]

    def _without_rank(self) -> list[MemberInfo]:
        return [self.members[member] for member in self.membership.waiting(set(self.roster.ranks.values()))]

    def _devices_in_use(self) -> set[str]:
        ranks = [(self.members.get(member), self.roster.devices[rank]) for rank, member in self.roster.ranks.items()]
        return {identity(info, number) for info, number in ranks if info is not None} | self._broken

    def who(self) -> list[dict[str, Any]]:
        """Return everyone who takes part, as ``ranks.json`` has it: ranks in their order, spares, those that start."""
        ranks: list[tuple[int | None, int]] = [
            *sorted(self.roster.ranks.items()),
            *((None, info.member) for info in self._without_rank()),
        ]
        known = [(rank, self.members[member]) for rank, member in ranks if member in self.members]
        starting = [
            {"rank": None, "pid": None, "host": node, "node": node, "role": "starting"}
            for node, count in self._respawns.starting().items()
            for _ in range(count)
        ]
        there = [
            {
                "rank": rank, "pid": info.pid, "host": info.host, "node": info.node,
                "role": "spare" if rank is None else "active",
            }
            for rank, info in known
        ]  # fmt: skip
        return there + starting

    def _lose(self, member: int, how: str, noticed_by: NoticedBy) -> None:
        info = self.members.get(member)
        self.died(member, info.pid if info is not None else 0, how, noticed_by)

    def _take_back(self, node: str, given_back: GivenBack) -> str:
        """Leave out the device of a member that has given its rank back, if it is broken; return why, in words."""
        how = f"gave its rank back because its device cannot be used ({given_back.reason})"
        if given_back.is_broken and given_back.device:
            self._broken.add(given_back.device)
            self._respawns.are_lost(node)
            self._report(f"device {given_back.device} of {node} is left out from here on: {given_back.reason}")
        else:
            self._respawns.begins(node)
        return how

    def _interrupted(self) -> None:
        if self.state in (State.RUNNING, State.PROPOSED):
            if self.state is State.PROPOSED:
                self._store.set(START.format(self.roster.generation), "superseded")
            else:
                self._interrupted_at = self._clock()
                self._leave_by.clear()
            self.state, self._short_since, self._form_at = State.FORMING, None, None
            self.waits_for_respawn = False

    def _leaving(self) -> bool:
        """Whether any survivor has left; what they wrote is kept."""
        for left in self._entered.leaving():
            self._attempts.committed(left["committed"])
            if left["had_recovered"]:
                self.losses.recovered()
        if self._entered.left and self.state is State.RUNNING:
            self._interrupt(
                self.roster.generation, self.roster.rank_of(min(self._entered.left)) or 0
            )  # it has said so, and may not be heard
        return bool(self._entered.left)

    def _all_finished(self) -> bool:
        entered = self._entered
        return entered.generation >= 0 and entered.generation == self.roster.generation and entered.all_finished()

    # Forming the job

    def _form(self) -> None:
        survivors = {rank: member for rank, member in self.roster.ranks.items() if member not in self.membership.dead}
        if not self._have_left(survivors):
            return
        if self._is_winding_down and self._entered.generation >= 0 and not survivors:
            self.stop(
                "it was asked to end, and no rank that trained is left; start it again to go on from what is saved"
            )
            return
        if self._replace_suspect():
            return
        if self._form_at is None:
            self._form_at = self._clock() + self._decide_to_go_on()
        if self.state is State.STOPPED or self._clock() < self._form_at:
            return
        if self.roster.generation < 0 and self._waits_for_the_first():
            return
        if self._entered.generation >= 0 and (grid := self._elastic()) is not None:
            self._resize(grid, survivors)
            return
        missing = [rank for rank in range(self._ranks) if rank not in survivors]
        spares = sorted(self.waiting()) if self.roster.generation < 0 else self.waiting()
        if len(spares) < len(missing):
            self._wait_for_spares(len(missing) - len(spares))
            return
        if self.roster.generation < 0:
            ranks = dict(zip(missing, spares, strict=False))
        else:
            ranks = {**survivors, **self._take_over(missing, survivors, spares)}
            self._wait_for_respawn(missing, ranks)
        if not self.waits_for_respawn:
            self._propose(ranks, len(spares) - len(missing))

    # Ranks that communicate in every layer stay on one node

    def _learn_blocks(self, nodes: Mapping[int, str]) -> None:
        """Keep those groups together that are on one node when the job begins: the largest, where groups are nested."""
        if self.roster.generation < 0 and (text := self._store.read(BLOCKS)) is not None:
            sizes = sorted(map(int, text.split(b",")))
            fitting = [size for size in sizes if len(split_blocks(nodes, size)) * size < len(nodes)]
            self._block = max(fitting, default=sizes[0])

    def _take_over(self, missing: Sequence[int], survivors: Mapping[int, int], spares: Sequence[int]) -> dict[int, int]:
        kept = {rank: self.members[member].node for rank, member in survivors.items()}
        waiting = [self.members[member] for member in spares]
        avoided = self._suspect_nodes | self.membership.silent_nodes()
        return take_over(missing, kept, self.roster.nodes, waiting, self._block, avoided)

    def _wait_for_respawn(self, missing: Sequence[int], ranks: Mapping[int, int]) -> None:
        """Wait for processes that are being started where ranks were, if blocks would span nodes without them."""
        block, before = self._block, self.roster.nodes
        nodes = {rank: self.members[member].node for rank, member in ranks.items()}
        new = split_blocks(nodes, block) - split_blocks(before, block)
        expected = {before[rank] for rank in missing if rank // block in new}
        expected = {node for node in expected - self._suspect_nodes if self._respawns.is_expected(node)}
        if expected and not self.waits_for_respawn:
            where = ", ".join(sorted(expected))
            self._report(f"a process starts on {where}: it is waited for, so that groups of ranks stay on one node")
        self.waits_for_respawn = bool(expected)

    def _blocks_split(self, nodes: Mapping[int, str]) -> tuple[tuple[int, int], ...]:
        """Return first and last rank of the blocks that span nodes and were not reported yet."""
        block, new = self._block, sorted(split_blocks(nodes, self._block) - self._split)
        return tuple((number * block, min((number + 1) * block, len(nodes)) - 1) for number in new)

    def _report_split(self) -> None:
        for first, last in self.roster.split[:MOST_REPORTED]:
            nodes = ", ".join(self.roster.nodes_of(first, last))
            self._report(f"ranks {first} to {last} communicate in every layer, and are on several nodes now: {nodes}")
        if more := self.roster.split[MOST_REPORTED:]:
            self._report(f"{len(more)} more groups of ranks are on several nodes now")
        self._split = split_blocks(self.roster.nodes, self._block)

    # Elastic jobs

    def _elastic(self) -> Grid | None:
        if self._grid is None and (text := self._store.read(ELASTIC)) is not None:
            self._grid = Grid.decode(text)
        return self._grid

    def _is_to_grow(self) -> bool:
        """Whether those who wait make the job larger, and nobody has come for a while: all ranks are interrupted."""
        grid = self._elastic()
        if grid is None or self._clock() - max(self.membership.joined_at, self._proposed_at) < grid.join_wait_s:
            return False
        world = len(self.roster.ranks)
        larger = grid.world(grid.replicas(min(world + len(self.waiting()), self._ranks)))
        if larger <= world:
            return False
        self._report(f"{_processes(larger - world)} joined; the job goes on with {larger} ranks instead of {world}")
        self._interrupt(self.roster.generation, 0)
        return True

    def _resize(self, grid: Grid, survivors: Mapping[int, int]) -> None:
        """Propose the largest job that those who are there make."""
        waiting = self.waiting()
        replicas = grid.replicas(min(len(survivors) + len(waiting), self._ranks))
        if not replicas:
            self._wait_for_spares(grid.world(grid.sizes[0]) - len(survivors) - len(waiting))
            return
        world = grid.world(replicas)
        ranks = grid.roster(survivors, len(self.roster.ranks), waiting, replicas)
        entered = len(self._entered.members)
        if world < entered:
            self._report(f"no spare is left; the job goes on with {world} ranks instead of {entered}")
        self._propose(ranks, len(survivors) + len(waiting) - world)

    def _waits_for_the_first(self) -> bool:
        """The first ones are the ranks, in their order; others are where some of them do not come."""
        gone = [
            member for member in range(self._ranks) if member not in self.members and member not in self.membership.dead
        ]
        if not gone:
            return False
        if not self.members or self._clock() - self.membership.joined_at < self._spare_timeout_s:
            return True
        missing = ", ".join(map(str, gone[:5])) + (f" and {len(gone) - 5} more" if len(gone) > 5 else "")
        since = f"members {missing} have not come within {self._spare_timeout_s:g} s of the last one"
        if len(self.members) < self._ranks:
            self.stop(f"{since}: {len(self.members)} are there, and the job has {self._ranks} ranks")
            return True
        if not self._is_reported:
            self._report(f"{since}; the job begins without them")
            self._is_reported = True
        return False

    def _have_left(self, survivors: Mapping[int, int]) -> bool:
        """Whether everyone who had entered training has stopped; who does not in time is given up.

        A member that reports another phase of leaving has the same time again.
        """
        if self._entered.generation < 0:
            return True
        self._leaving()
        inside, now, leave_s = self._entered, self._clock(), self.membership.leave_s
        entered = [member for member in survivors.values() if member in inside.members and member not in inside.left]
        for member in entered:
            if now <= self._leave_by.setdefault(member, self._interrupted_at + leave_s):
                continue
            if inside.has_come_further(member):
                self._leave_by[member] = now + leave_s
            else:
                self._lose(member, f"did not stop within {leave_s:g} s of an interruption", NoticedBy.TIMEOUT)
        return not entered

    def _replace_suspect(self) -> bool:
        """Give up a process that computes results that are not finite, or the job; return whether any of it was done.

        Every process of the ranks concerned is replaced once, one after the other, before the batch is blamed.
        """
        entered = self._entered
        if self._judged == entered.generation or not entered.suspects:
            return False
        self._judged = entered.generation
        reason = "; ".join(entered.reasons)
        rank = self._attempts.suspected(entered.suspects)
        if rank is None:
            iteration = max(left["committed"] for left in entered.left.values()) + 1
            self.stop(
                f"{reason}; other processes computed it, too, so the batch of iteration {iteration} or the model is "
                f"the cause: leave the batch out with --iterations-to-skip {iteration}, or lower the learning rate"
            )
            return True
        member = self.roster.ranks[rank]
        if member not in self.members:
            return False  # lost meanwhile
        info = self.members[member]
        self._suspect_nodes.add(info.node)
        self.died(member, info.pid, f"computed results that are not finite ({reason})", NoticedBy.RESULT)
        return True

    def _decide_to_go_on(self) -> float:
        """How long to wait before the job is formed again; stops it if there is no point in that."""
        entered = self._entered
        if entered.generation < 0:
            return 0.0
        if reason := self._attempts.failed(entered.generation, self.losses.uncounted(), entered.reasons):
            self.stop(reason)
            return 0.0
        if back_off_s := self._attempts.back_off_s:
            self._report(f"no new iteration since the last failures; waiting {back_off_s:g} s before the next attempt")
        return back_off_s

    def _propose(self, ranks: Mapping[int, int], spares: int) -> None:
        self._attempts.formed()
        members = {rank: self.members[member] for rank, member in ranks.items()}
        had = {self.roster.ranks[rank]: device for rank, device in self.roster.devices.items()}
        kept = {rank: had[member] for rank, member in ranks.items() if member in had}  # by whatever rank it is now
        nodes = {rank: info.node for rank, info in members.items()}
        devices = assign_devices(members, kept, self._broken)
        self._learn_blocks(nodes)
        now = time.time()
        self.roster = Roster(
            self.roster.generation + 1,
            dict(sorted(ranks.items())),
            tuple(self.losses.new),
            tuple(self.losses.unrecovered),
            tuple(self._entered.reasons),
            formed_at=now,
            first_formed_at=self.roster.first_formed_at or now,
            ranks_before=len(self._entered.members) if len(self._entered.members) not in (0, len(ranks)) else None,
            left_at=max((left["at"] for left in self._entered.left.values()), default=now),
            spares=spares,
            starting=sum(self._respawns.starting().values()),
            nodes=nodes,
            split=self._blocks_split(nodes),
            devices=devices,
            identities={rank: identity(info, devices[rank]) for rank, info in members.items()},
        )
        generation = self.roster.generation
        self._store.forget(f"generation/{generation - 2}/")  # who joins now begins with the newest
        self._store.set(ROSTER.format(generation), self.roster.encode())
        self._store.set(NEWEST, str(generation))
        self._proposed_at = self._clock()
        self.state = State.PROPOSED

    def _start_if_acknowledged(self) -> None:
        generation = self.roster.generation
        members = set(self.roster.ranks.values())
        acknowledged = self._entered.written_by(ACKNOWLEDGED, generation, members)
        if acknowledged is not None and members <= acknowledged.keys():
            self._entered.begin(generation, members)
            self.losses.entered()
            self._report_split()
            self._store.set(START.format(generation), "go")
            self.state = State.RUNNING
        elif self._clock() - self._proposed_at > self._acknowledge_s:
            key = ACKNOWLEDGED.format(generation)
            for member in [one for one in members if not self._store.check([f"{key}/{one}"])]:
                self._lose(member, "did not acknowledge the roster that it was in", NoticedBy.TIMEOUT)

    @property
    def _acknowledge_s(self) -> float:
        """How long a process may take to acknowledge the rank that it has in a proposal; devices are checked first."""
        has_devices = any(self.members[member].devices for member in self.roster.ranks.values())
        return LEASES_TO_LEAVE * self.lease_s + (CHECK_S if has_devices else 0.0)

    def _wait_for_spares(self, missing: int) -> None:
        if self.roster.generation < 0:
            return  # the first ones are still starting; who started them knows whether they come
        if self._short_since is None:
            self._short_since = self._clock()
            idle = len(self._without_rank()) - len(self.waiting())
            why = f"no device that works is left for {_processes(idle)}" if idle else "no spare is left"
            self._report(f"{why}; waiting up to {self._spare_timeout_s:g} s for {missing} to start")
        elif self._clock() - self._short_since > self._spare_timeout_s:
            self.stop(f"no spare came within {self._spare_timeout_s:g} s for {missing} of {self._ranks} ranks")


def _processes(count: int) -> str:
    return "a process has" if count == 1 else f"{count} processes have"
