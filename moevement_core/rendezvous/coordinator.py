"""Coordinator of a job: assigns ranks to processes ("forms the job") at the start and after every failure.

The coordinator runs in the process that holds the job's values. It decides alone, so processes need no agreement while
some of them fail. Every member, rank or spare, has a lease that its supervisor renews. A member whose lease runs out
counts as dead, even if no supervisor saw its process end.

Survivors keep their ranks, and a spare takes over each failed rank. An elastic job goes on with fewer ranks if no spare
is left, and grows again when processes join. A roster is a proposal until all its members have acknowledged it. Only
then do the members enter training.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from typing import Any

from moevement_core.rendezvous.attempts import Attempts
from moevement_core.rendezvous.blocks import Blocks
from moevement_core.rendezvous.devices import CHECK_S, assign_devices, identity
from moevement_core.rendezvous.drains import Departure, Drains
from moevement_core.rendezvous.entered import Entered
from moevement_core.rendezvous.generation_keys import GenerationKeys
from moevement_core.rendezvous.lease_client import BEATS
from moevement_core.rendezvous.losses import Losses
from moevement_core.rendezvous.membership import LEASES_TO_LEAVE, Membership
from moevement_core.rendezvous.publication import publish, published
from moevement_core.rendezvous.resizing import Grid
from moevement_core.rendezvous.respawns import WAIT_S, Respawns
from moevement_core.rendezvous.roster import (
    ACKNOWLEDGED,
    DEPARTING,
    ELASTIC,
    EXIT_CODE,
    GIVEN_UP,
    INTERRUPTED,
    JOB_NAME,
    START,
    STOP,
    UNUSABLE_DEVICE,
    NoticedBy,
    Roster,
    UnusableDevice,
    digest_of,
)
from moevement_core.rendezvous.spares import SparePool
from moevement_core.rendezvous.standing import STANDING, Standing
from moevement_core.rendezvous.takeover import take_over
from moevement_core.rendezvous.values import Values, number_of

LEASE_S = 10.0
"""Default of ``--moevement-lease-seconds``, in seconds; every other timeout derives from the lease time."""

MOST_REASONS = 16
"""Largest number of errors of survivors in a roster, which every member receives."""


class State(Enum):
    """State of the job, as the coordinator sees it."""

    FORMING = "forming"
    """State in which the coordinator waits for members, or for survivors to leave their generation."""
    PROPOSED = "proposed"
    """State in which a roster waits for the acknowledgements of its members."""
    RUNNING = "running"
    """State in which the ranks of the newest roster train."""
    STOPPED = "stopped"
    """State of a job that has ended early; the reason is the value of :data:`STOP`."""
    DONE = "done"
    """State in which every rank has reached the end of the job."""


class Coordinator:
    """Coordinator of one job. One thread calls all methods, and calls :meth:`step` often.

    Args:
        values: values of the job.
        ranks: number of ranks of the job.
        spare_timeout_s: seconds that the job waits for a spare when none is left.
        report: called with a line of text for the user.
        groups: store of torch's process groups, from which the coordinator deletes the keys of past generations.
        lease_s: lease time in seconds; a member that is silent for so long counts as dead.
        clock: returns monotonic seconds.
        respawn_wait_s: seconds to wait for a process that a supervisor starts in place of an ended one. The coordinator
            waits only if ranks that communicate in every layer would otherwise span nodes. After the first such start,
            it derives the wait from the measured duration of starts. 0: supervisors start no such processes.
    """

    def __init__(
        self,
        values: Values,
        ranks: int,
        spare_timeout_s: float,
        report: Callable[[str], None],
        *,
        groups: Any,
        lease_s: float = LEASE_S,
        clock: Callable[[], float] = time.monotonic,
        respawn_wait_s: float = WAIT_S,
    ) -> None:
        self.state = State.FORMING
        self.roster = Roster(-1, {})
        """Newest roster; a proposal while the state is PROPOSED."""
        self.membership = Membership(values, lease_s, clock)
        self.losses = Losses()
        self.given_up: set[int] = set()
        """Members that count as dead although no supervisor saw them end; their supervisors kill them."""
        self.respawns = Respawns(clock, respawn_wait_s)
        self.blocks = Blocks(values, report)
        self.drains = Drains(report)
        self.spares = SparePool(self.membership, self.drains, report)
        self._values, self._ranks, self._spare_timeout_s, self._report = values, ranks, spare_timeout_s, report
        self._clock = clock
        self._entered = Entered(values)
        self._acknowledged: set[int] = set()
        """Members that have acknowledged the proposed roster."""
        self._attempts = Attempts()
        self._is_reported = False
        self._proposed_at = 0.0
        self._first_committed_at: float | None = None
        """Time at which this process heard of the job's first commit, in seconds since the epoch; None before that."""
        self._form_at: float | None = None
        """Value of the clock in seconds at which the job may be formed again; None until the backoff is decided."""
        self._short_since: float | None = None
        """Value of the clock in seconds when the job began to wait for missing spares; None while it does not wait."""
        self._grid: Grid | None = None
        """Sizes that an elastic job may have, once a rank has published them; None for a job of fixed size."""
        self.is_winding_down = False
        """True if the user or the batch system asked the job to save and end after the current iteration."""
        self._judged = -1
        """Newest generation for which the coordinator has acted on reports that ranks computed NaN or infinity."""
        self._generation_keys = GenerationKeys(values, groups)
        self._kept: tuple[Any, ...] = ()
        """Values that :meth:`keep` has compared last."""
        values.claim(JOB_NAME, uuid.uuid4().hex[:8])
        if (standing := values.read(STANDING)) is not None:
            self._continue(Standing.decode(standing))

    # A coordinator that takes over

    def _continue(self, before: Standing) -> None:
        """Continue the job of a coordinator that is lost, from its newest standing and the other values.

        Every member gets a whole lease time, in which its supervisor has to find this coordinator.
        """
        self.losses.new, self.losses.unrecovered = [*before.new_deaths], [*before.unrecovered]
        self.losses.uncounted = [*before.uncounted]
        self.membership.dead |= set(before.dead)
        self.given_up = set(before.given_up)
        self._attempts.counts = before.counts
        self._judged, self.blocks.size, self.blocks.reported = before.judged, before.block, set(before.split)
        self.spares.suspect_nodes, self.spares.broken = set(before.suspect_nodes), set(before.broken)
        self._first_committed_at = before.first_committed_at
        if before.is_winding_down:
            self.wind_down()
        self.membership.welcome()
        if (roster := published(self._values)) is None:
            return
        self.roster = roster
        self._entered.begin(before.entered, before.entered_members)
        self._proposed_at = self._clock()
        self._entered.interrupted(self._clock())
        self.state = self._state_of_values()
        if self.state is State.RUNNING and not self._attempts.has_progressed:
            # Its ranks may still be making process groups, through a store that was lost with the other coordinator.
            self._interrupt(0)
            self._interrupted()

    def _state_of_values(self) -> State:
        """Return the state of the job that the values of another coordinator mean."""
        if (reason := self._values.read(STOP)) is not None:
            return State.STOPPED if reason else State.DONE
        generation, _, decision = (self._values.read(START) or "-1 ").partition(" ")
        if int(generation) < self.roster.generation:
            return State.PROPOSED
        is_interrupted = number_of(self._values.read(INTERRUPTED)) >= self.roster.generation
        return State.FORMING if decision != "go" or is_interrupted else State.RUNNING

    def keep(self) -> None:
        """Set the value of :data:`STANDING` if the state has changed since the last call."""
        now = (
            self.state, self.roster.generation, self._entered.generation, len(self.membership.dead), len(self.given_up),
            self._attempts.has_progressed, self._judged, self.is_winding_down, len(self.losses.unrecovered),
            self._form_at is None,
        )  # fmt: skip
        if now == self._kept or self.roster.generation < 0:
            return
        self._kept = now
        standing = Standing(
            dead=tuple(sorted(self.membership.dead)), given_up=tuple(sorted(self.given_up)),
            new_deaths=tuple(self.losses.new), unrecovered=tuple(self.losses.unrecovered),
            uncounted=tuple(self.losses.uncounted), counts=self._attempts.counts, entered=self._entered.generation,
            entered_members=tuple(sorted(self._entered.members)), judged=self._judged,
            suspect_nodes=tuple(sorted(self.spares.suspect_nodes)), broken=tuple(sorted(self.spares.broken)),
            block=self.blocks.size, split=tuple(sorted(self.blocks.reported)),
            first_committed_at=self._first_committed_at, is_winding_down=self.is_winding_down,
        )  # fmt: skip
        self._values.set(STANDING, standing.encode())

    # Leases and deaths

    def renew(self, members: Mapping[int, int | None]) -> None:
        """Renew the leases of members that a supervisor has found alive.

        Args:
            members: the members, each with the newest iteration that it has committed; None before the first.
        """
        for member, committed in members.items():
            self.membership.renew(member)
            if committed is not None:
                self._first_committed_at = self._first_committed_at or time.time()
                self._attempts.committed(committed)
                self.drains.pace.committed(committed, self._clock())

    def died(self, member: int, pid: int, how: str, noticed_by: NoticedBy = NoticedBy.SUPERVISOR) -> None:
        """Record the death of a member, and interrupt its generation if it had a rank.

        Args:
            member: the member.
            pid: its process id.
            how: description of its end, for log lines.
            noticed_by: way in which the death was noticed.
        """
        if member in self.membership.dead:
            return  # The member was given up before its process ended.
        info = self.membership.alive.get(member)
        node = info.node if info is not None else ""
        is_stopped = noticed_by is NoticedBy.LEASE and self.membership.hears(node, but=member)
        if noticed_by in (NoticedBy.SUPERVISOR, NoticedBy.TIMEOUT) or is_stopped:
            self.respawns.begins(node)
        elif noticed_by in (NoticedBy.RESET, NoticedBy.LEASE):
            self.respawns.are_lost(node)
        reports = self._values.reports(DEPARTING.format(self.roster.generation))
        departure, _, text = reports.get(member, "").partition(";")
        if (notice := self._values.reports(UNUSABLE_DEVICE).get(member)) is not None:
            unusable = UnusableDevice.decode(notice)
            how, noticed_by = self.spares.returned(node, unusable), NoticedBy.DEVICE
            (self.respawns.are_lost if unusable.is_broken and unusable.device else self.respawns.begins)(node)
        elif info is not None and departure == Departure.GIVES_BACK:
            if noticed_by is not NoticedBy.SUPERVISOR:
                self.respawns.begins(node)
            reason = self.drains.reason_of(info)
            how, noticed_by = f"was drained{f' ({reason})' if reason else ''}; {text}", NoticedBy.DRAIN
            self.spares.drained(member, self.roster)
        self.drains.left(member)
        rank = self.roster.rank_of(member)
        self.losses.add(member, rank, pid, how, noticed_by, self.membership.remove(member))
        if noticed_by is not NoticedBy.SUPERVISOR:
            self.given_up.add(member)
            self._values.set(GIVEN_UP.format(member), how)
        if rank is not None and self.state not in (State.STOPPED, State.DONE):
            self._interrupt(rank)
            self._interrupted()
            self._form_at = self._short_since = None  # A replacement only starts now, so waiting begins anew.

    def has_trained(self, member: int | None = None) -> bool:
        """Return True if flags and script have proved correct, so that an error of ``member`` need not end the job.

        They have proved correct once the job has committed an iteration, or was formed without a rank for ``member``:
        then other processes have run the same script. If ``member`` is None, only a committed iteration counts.
        """
        is_outside = member is not None and self.roster.generation >= 0 and self.roster.rank_of(member) is None
        return self._attempts.has_committed or is_outside

    def wind_down(self) -> None:
        """Note that the user or the batch system asked the job to save and end at the next boundary between iterations.

        If all ranks fail before that boundary, the coordinator stops the job. If it formed the job again, the new ranks
        would only execute one iteration and then end.
        """
        self.is_winding_down = self.drains.is_over = True

    def node_health(self, supervisor: str, members: Iterable[int], reason: str, *, is_leaving: bool = False) -> None:
        """Note why the node of a supervisor is not healthy. It is drained until all its supervisors call it healthy.

        Args:
            supervisor: name of the supervisor.
            members: its members.
            reason: reason of the supervisor's health check, or notice of the scheduler; empty if there is none.
            is_leaving: True if the scheduler takes the node away.
        """
        node = next((info.node for member in members if (info := self.membership.alive.get(member))), None)
        self.drains.notices.take(supervisor, node, reason, self._clock() if is_leaving else None)

    def end_for_notices(self) -> str | None:
        """Return the reason to end the job at the next boundary because nodes leave; None to go on.

        The job ends if no spares can take over the ranks of nodes that the scheduler takes away.
        """
        if self.state not in (State.RUNNING, State.FORMING) or self.is_winding_down:
            return None
        ranks = self.drains.notices.ranks_leaving(self._clock(), self.roster.nodes)
        if not ranks or self._may_leave(ranks):
            return None
        return f"the scheduler takes away the nodes of {ranks} ranks, and there are too few spares on other nodes"

    def stop(self, reason: str, code: int = 1) -> None:
        """Stop the job, and publish the reason as the value of :data:`STOP`, which every waiting process watches.

        Args:
            reason: reason, for the user.
            code: exit code of the job.
        """
        self._values.set(EXIT_CODE, str(code))
        self._values.set(STOP, reason)
        self.state = State.STOPPED

    @property
    def end(self) -> tuple[str, int]:
        """Reason and exit code of the job's end; an empty reason and 0 if all ranks have reached the end."""
        return self._values.read(STOP) or "", max(0, number_of(self._values.read(EXIT_CODE)))

    def step(self) -> None:
        """Look at the reports and the leases, and change the state of the job if they require it; never block."""
        self._look_and_act()
        self.keep()

    def _look_and_act(self) -> None:
        self._values.has_news = False
        for info in self.membership.welcome():
            self.respawns.has_joined(info.node)
        for member, how, noticed_by in self.membership.lost():
            self._lose(member, how, noticed_by)
        # The device may keep a process from ending, so the coordinator does not wait for the end of the process.
        for member in self._values.new_reports(UNUSABLE_DEVICE):
            if member in self.membership.alive:
                self._lose(member, "gave its rank back", NoticedBy.DEVICE)
        self._see_departures()
        if self.state in (State.STOPPED, State.DONE):
            return
        if self.roster.generation >= 0:
            self.drains.update(self.roster, self.membership.alive)
        if self._entered.generation == self.roster.generation >= 0 and self._entered.all_finished():
            self.state = State.DONE
            self._values.set(STOP, "")
        elif self.state is State.RUNNING and (self._leaving() or self._is_to_grow()):
            self._interrupted()
        elif self.state is State.RUNNING:
            self._generation_keys.delete_some()
            self.drains.look(
                self.roster, self.membership.alive, self._attempts.counts.here, now=self._clock(),
                beat_s=self.membership.lease_s / BEATS, is_enough=self._may_leave,
            )  # fmt: skip
        elif self.state is State.PROPOSED:
            self._start_if_acknowledged()
        elif self.state is State.FORMING:
            self._form()

    def _may_leave(self, ranks: int) -> bool:
        """Return True if the job goes on if ``ranks`` ranks leave now."""
        free, world = len(self.spares.waiting(self.roster)), len(self.roster.ranks)
        if (grid := self._elastic()) is not None:
            return grid.units(min(world - ranks + free, self._ranks)) > 0
        return free >= ranks

    def _lose(self, member: int, how: str, noticed_by: NoticedBy) -> None:
        info = self.membership.alive.get(member)
        self.died(member, info.pid if info is not None else 0, how, noticed_by)

    def _interrupted(self) -> None:
        if self.state in (State.RUNNING, State.PROPOSED):
            if self.state is State.PROPOSED:
                self._values.set(START, f"{self.roster.generation} superseded")
            else:
                self._entered.interrupted(self._clock())
            self.state, self._short_since, self._form_at = State.FORMING, None, None
            self.blocks.waits = False

    def _interrupt(self, rank: int) -> None:
        """Interrupt the ranks of the newest generation; ``rank`` is the failed rank."""
        self._values.raise_to(INTERRUPTED, f"{self.roster.generation} {rank}:TERMINATED")

    def _leaving(self) -> bool:
        """Read the reports of the survivors that left the generation, and return True if any survivor has left.

        If a survivor has left and the state is still RUNNING, the coordinator interrupts the other ranks.
        """
        for left in self._entered.leaving():
            self._attempts.committed(left["committed"])
            if left["had_recovered"]:
                self.losses.recovered()
        if self._entered.left and self.state is State.RUNNING:
            self._interrupt(self.roster.rank_of(min(self._entered.left)) or 0)
        return bool(self._entered.left)

    def _see_departures(self) -> None:
        """Read the reports of members that were asked to leave, and lose those that have given their rank back."""
        now = self._clock()
        for member, text in self._values.new_reports(DEPARTING.format(self.roster.generation)).items():
            if member in self.membership.alive:
                self.drains.departs(member, Departure(text.partition(";")[0]), now)
        for member in self.drains.gone(now, self.membership.lease_s, waits=self.state is State.RUNNING):
            self._lose(member, "was drained", NoticedBy.DRAIN)

    # Forming the job

    def _form(self) -> None:
        survivors = {rank: member for rank, member in self.roster.ranks.items() if member not in self.membership.dead}
        if not self._have_left(survivors):
            return
        if self.is_winding_down and self._entered.generation >= 0 and not survivors:
            self.stop(
                "the job was asked to end, and no rank that trained is left; start the job again to continue from the "
                "saved state"
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
        spares = (
            sorted(self.spares.waiting(self.roster)) if self.roster.generation < 0 else self.spares.waiting(self.roster)
        )
        if len(spares) < len(missing):
            self._wait_for_spares(len(missing) - len(spares))
            return
        if self.roster.generation < 0:
            ranks = dict(zip(missing, spares, strict=False))
        else:
            ranks = {**survivors, **self._take_over(missing, survivors, spares)}
            nodes = {rank: self.membership.alive[member].node for rank, member in ranks.items()}
            avoided = self.spares.avoided_nodes | self.drains.nodes.keys()
            self.blocks.wait_for_starts(
                missing, nodes, self.roster.nodes,
                starts=lambda node: node not in avoided and self.respawns.is_expected(node),
            )  # fmt: skip
        if not self.blocks.waits:
            self._propose(ranks, len(spares) - len(missing))

    def _take_over(self, missing: Sequence[int], survivors: Mapping[int, int], spares: Sequence[int]) -> dict[int, int]:
        alive = self.membership.alive
        kept = {rank: alive[member].node for rank, member in survivors.items()}
        return take_over(
            missing, kept, before=self.roster.nodes, waiting=[alive[member] for member in spares],
            block=self.blocks.size, avoided=self.spares.avoided_nodes | self.membership.silent_nodes(),
        )  # fmt: skip

    # Elastic jobs

    def _elastic(self) -> Grid | None:
        if self._grid is None and (text := self._values.read(ELASTIC)) is not None:
            self._grid = Grid.decode(text)
        return self._grid

    def _is_to_grow(self) -> bool:
        """Interrupt all ranks and return True if waiting members suffice to enlarge an elastic job; else return False.

        The method returns False until :attr:`Grid.join_wait_s` seconds have passed since a member last joined and since
        the last roster was proposed. So members that join shortly after each other enlarge the job together.
        """
        grid = self._elastic()
        if grid is None or self._clock() - max(self.membership.joined_at, self._proposed_at) < grid.join_wait_s:
            return False
        world = len(self.roster.ranks)
        larger = grid.world(grid.units(min(world + len(self.spares.waiting(self.roster)), self._ranks)))
        if larger <= world:
            return False
        self._report(f"{_processes(larger - world)} joined; the job continues with {larger} ranks instead of {world}")
        self._interrupt(0)
        return True

    def _resize(self, grid: Grid, survivors: Mapping[int, int]) -> None:
        """Propose a roster for the largest allowed job for which survivors and waiting members suffice.

        If they do not suffice even for the smallest allowed job, wait for spares.
        """
        waiting = self.spares.waiting(self.roster)
        units = grid.units(min(len(survivors) + len(waiting), self._ranks))
        if not units:
            self._wait_for_spares(grid.world(grid.sizes[0]) - len(survivors) - len(waiting))
            return
        world = grid.world(units)
        ranks = grid.roster(survivors, len(self.roster.ranks), waiting, units)
        entered = len(self._entered.members)
        if world < entered:
            self._report(f"no spare is left; the job continues with {world} ranks instead of {entered}")
        self._propose(ranks, len(survivors) + len(waiting) - world)

    def _waits_for_the_first(self) -> bool:
        """Return True while the job waits for its first members. If all of them join, member N becomes rank N.

        If no further member has joined for ``spare_timeout_s`` seconds, the job begins without the absent members, and
        spares take their ranks. If there are not enough spares for this, the method stops the job.
        """
        absent = [
            member
            for member in range(self._ranks)
            if member not in self.membership.alive and member not in self.membership.dead
        ]
        if not absent:
            return False
        if not self.membership.alive or self._clock() - self.membership.joined_at < self._spare_timeout_s:
            return True
        missing = ", ".join(map(str, absent[:5])) + (f" and {len(absent) - 5} more" if len(absent) > 5 else "")
        since = f"members {missing} did not join within {self._spare_timeout_s:g} s after the newest member"
        if len(self.membership.alive) < self._ranks:
            self.stop(
                f"{since}; the number of members is {len(self.membership.alive)}, but the job has {self._ranks} ranks"
            )
            return True
        if not self._is_reported:
            self._report(f"{since}; the job begins, and spares take the ranks of the absent members")
            self._is_reported = True
        return False

    def _have_left(self, survivors: Mapping[int, int]) -> bool:
        """Return True if every survivor that had entered training has left its generation.

        If the timeout of a survivor runs out, the survivor counts as dead.
        """
        self._leaving()
        inside, leave_s = self._entered.inside(survivors.values()), self.membership.leave_s
        for member in self._entered.late(inside, self._clock(), leave_s):
            self._lose(member, f"did not stop within {leave_s:g} s of an interruption", NoticedBy.TIMEOUT)
        return not inside

    def _replace_suspect(self) -> bool:
        """Replace a process that computed NaN or infinity, or stop the job.

        Only one process is replaced at each failure. If the processes of all ranks that computed NaN or infinity were
        replaced before, the method stops the job; the message names the batch and the model as possible causes.

        Returns:
            True if the method has replaced a process or stopped the job.
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
                f"{reason}; replacement processes computed such results as well, so the batch of iteration {iteration} "
                f"or the model is the cause; leave the batch out with --iterations-to-skip {iteration}, or lower the "
                "learning rate"
            )
            return True
        member = self.roster.ranks[rank]
        if member not in self.membership.alive:
            return False  # The member has died in the meantime.
        info = self.membership.alive[member]
        self.spares.suspect_nodes.add(info.node)
        self.died(member, info.pid, f"computed results that are not finite ({reason})", NoticedBy.RESULT)
        return True

    def _decide_to_go_on(self) -> float:
        """Count the last failure, and return the seconds to wait before the job is formed again.

        If the job has failed too often without a newly committed iteration, stop it.
        """
        entered = self._entered
        if entered.generation < 0:
            return 0.0
        reason = self._attempts.failed(entered.generation, self.losses.uncounted, entered.reasons)
        self.losses.uncounted = []
        if reason:
            self.stop(reason)
            return 0.0
        if back_off_s := self._attempts.back_off_s:
            self._report(
                f"no new iteration was committed since the last failures; waiting {back_off_s:g} s before the next "
                "attempt"
            )
        return back_off_s

    def _propose(self, ranks: Mapping[int, int], spares: int) -> None:
        self._attempts.formed()
        self.drains.formed()
        self.spares.formed()
        members = {rank: self.membership.alive[member] for rank, member in ranks.items()}
        # A survivor keeps its device even if its rank has changed.
        device_of = {self.roster.ranks[rank]: device for rank, device in self.roster.devices.items()}
        kept = {rank: device_of[member] for rank, member in ranks.items() if member in device_of}
        nodes = {rank: info.node for rank, info in members.items()}
        devices = assign_devices(members, kept, self.spares.broken)
        if self.roster.generation < 0:
            self.blocks.learn(nodes)
        now, split = time.time(), self.blocks.newly_split(nodes)
        identities = {rank: identity(info, devices[rank]) for rank, info in members.items()}
        self.roster = Roster(
            generation=self.roster.generation + 1,
            ranks=dict(sorted(ranks.items())),
            world=len(ranks),
            placement=digest_of(nodes, identities),
            deaths=tuple(self.losses.new),
            earlier=tuple(self.losses.unrecovered),
            reasons=tuple(self._entered.reasons[:MOST_REASONS]),
            formed_at=now,
            first_committed_at=self._first_committed_at,
            ranks_before=len(self._entered.members) if len(self._entered.members) not in (0, len(ranks)) else None,
            left_at=max((left["at"] for left in self._entered.left.values()), default=now),
            spares=spares,
            starting=sum(self.respawns.starting().values()),
            nodes=nodes,
            split=split,
            split_nodes=tuple(tuple(sorted({nodes[rank] for rank in range(a, b + 1)})) for a, b in split),
            devices=devices,
        )
        publish(self._values, self.roster, self.membership.alive)
        self._proposed_at, self._acknowledged = self._clock(), set()
        self.state = State.PROPOSED

    def _start_if_acknowledged(self) -> None:
        generation = self.roster.generation
        members = set(self.roster.ranks.values())
        self._acknowledged |= self._values.new_reports(ACKNOWLEDGED.format(generation)).keys()
        if members <= self._acknowledged:
            self._entered.begin(generation, members)
            self.losses.entered()
            self.blocks.report_split(self.roster)
            self._values.set(START, f"{generation} go")
            self.state = State.RUNNING
            self._generation_keys.trains(generation)
            return
        has_devices = any(self.membership.alive[member].devices for member in members)
        acknowledge_s = LEASES_TO_LEAVE * self.membership.lease_s + (CHECK_S if has_devices else 0.0)
        if self._clock() - self._proposed_at > acknowledge_s:
            for member in members - self._acknowledged:
                self._lose(member, "did not acknowledge the roster in time", NoticedBy.TIMEOUT)

    def _wait_for_spares(self, missing: int) -> None:
        if self.roster.generation < 0:
            return  # The first members are still starting, and supervisors notice if a start fails.
        if self._short_since is None:
            self._short_since = self._clock()
            without_rank = self.membership.waiting(set(self.roster.ranks.values()))
            idle = len(without_rank) - len(self.spares.waiting(self.roster))
            drained = sum(info.node in self.drains.nodes for info in without_rank)
            why = f"{_processes(idle)} no working device" if idle > drained else "no spare is left"
            why += f" outside of drained nodes ({', '.join(sorted(self.drains.nodes))})" if drained else ""
            self._report(
                f"{why}; waiting up to {self._spare_timeout_s:g} s for processes to start (number needed: {missing})"
            )
        elif self._clock() - self._short_since > self._spare_timeout_s:
            if self.drains.nodes and not self.drains.has_no_other:
                self.drains.has_no_other, self._short_since = True, None
                self._report("no spare came, so processes on drained nodes may take ranks")
                return
            self.stop(f"no spare came within {self._spare_timeout_s:g} s for {missing} of {self._ranks} ranks")


def _processes(count: int) -> str:
    return "a process has" if count == 1 else f"{count} processes have"
