"""Coordinators that continue the job of a lost one, from its values after any of its steps."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist

from moevement_core.rendezvous.coordinator import Coordinator, State
from moevement_core.rendezvous.member import Member
from moevement_core.rendezvous.roster import ACKNOWLEDGED, FINISHED, INTERRUPTED, MemberInfo, NoticedBy
from moevement_core.rendezvous.values import Operation, Values, number_of
from tests.values import LocalValues

LEASE_S, RANKS, MEMBERS = 10.0, 3, 6
KILLED = "was killed by signal 9"


class Job:
    """Coordinator and members in one process, with the values of the job after each step of a coordinator."""

    def __init__(self, operations: tuple[Operation, ...] = (), alive: set[int] | None = None, now: float = 0.0) -> None:
        self.values, self.now = Values(), now
        for operation in operations:
            self.values.execute(operation)
        self._operations = [*operations]
        self.values.on_operation = self._operations.append
        self.steps: list[tuple[tuple[Operation, ...], set[int]]] = []
        """Operations until the end of each step, and the members that lived then."""
        self.alive = set(range(MEMBERS)) if alive is None else set(alive)
        self.client = LocalValues(self.values)
        self.coordinator = Coordinator(
            self.values, RANKS, 60.0, lambda text: None, groups=dist.HashStore(), lease_s=LEASE_S,
            clock=lambda: self.now,
        )  # fmt: skip

    def member(self, number: int) -> Member:
        member = Member(self.client, MemberInfo(number, 1000 + number, "host", f"node{number}"))
        member._generation = self.coordinator.roster.generation
        return member

    def step(self, committed: int | None = None) -> None:
        self.now += 0.1
        self.coordinator.renew(dict.fromkeys(self.alive, committed))
        self.coordinator.step()
        self.steps.append((tuple(self._operations), set(self.alive)))

    def behave(self) -> None:
        """Let each member that lives do what a rank does after the newest values."""
        coordinator = self.coordinator
        if coordinator.state is State.PROPOSED:
            for number in set(coordinator.roster.ranks.values()) & self.alive:
                self.member(number)._report(ACKNOWLEDGED, "")
        entered = coordinator._entered
        if coordinator.state is State.FORMING and number_of(self.values.read(INTERRUPTED)) >= entered.generation >= 0:
            for number in (set(entered.members) & self.alive) - entered.left.keys():
                member = self.member(number)
                member._generation = entered.generation
                member.leave("", 7)

    def until_running(self, generation: int = -1) -> None:
        for _ in range(400):
            self.step()
            self.behave()
            roster = self.coordinator.roster
            is_whole = {*roster.ranks.values()} <= self.alive
            if self.coordinator.state is State.RUNNING and roster.generation > generation and is_whole:
                return
        raise AssertionError(f"{self.coordinator.state} after {self.now:.1f} s")


def started() -> Job:
    job = Job()
    for number in range(MEMBERS):
        job.member(number).join()
    job.until_running()
    for iteration in range(3):
        job.step(committed=iteration)
    return job


def each_continued(lose: Callable[[Job], None]) -> list[Job]:
    """Return one continued job for each step of a coordinator that recovers from ``lose``."""
    job = started()
    begun, generation = len(job.steps), job.coordinator.roster.generation
    lose(job)
    job.until_running(generation)
    job.step(committed=7)
    continued = []
    for operations, alive in job.steps[begun - 1 :]:
        other = Job(operations, alive & job.alive, job.now)
        other.until_running()
        continued.append(other)
    return continued


def test_a_recovery_goes_on_after_each_of_its_steps() -> None:
    def lose(job: Job) -> None:
        job.alive.discard(1)
        job.coordinator.died(1, 1001, KILLED)

    jobs = each_continued(lose)
    assert len(jobs) > 4
    for job in jobs:
        ranks = job.coordinator.roster.ranks
        assert sorted(ranks) == [0, 1, 2]
        assert (ranks[0], ranks[2]) == (0, 2), "survivors keep their ranks"
        assert ranks[1] in {3, 4, 5}
        assert 1 not in job.coordinator.membership.alive


def test_a_second_death_that_the_lost_coordinator_never_saw_is_noticed() -> None:
    def lose(job: Job) -> None:
        job.alive.discard(1)
        job.coordinator.died(1, 1001, KILLED)

    job = started()
    lose(job)
    job.step()
    job.behave()
    other = Job(job.steps[-1][0], job.alive - {2}, job.now)
    other.until_running(job.coordinator.roster.generation)
    assert {*other.coordinator.roster.ranks.values()} <= other.alive
    assert [death.noticed_by for death in other.coordinator.losses.all] == [NoticedBy.LEASE]
    assert {death.member for death in other.coordinator.roster.deaths} == {1, 2}


def test_a_job_that_trains_goes_on_without_an_interruption() -> None:
    job = started()
    job.step(committed=9)
    other = Job(job.steps[-1][0], job.alive, job.now)
    assert other.coordinator.state is State.RUNNING
    assert other.coordinator.roster == job.coordinator.roster
    assert other.coordinator.has_trained()
    for _ in range(int(3 * LEASE_S / 0.1)):
        other.step(committed=10)
    assert other.coordinator.state is State.RUNNING
    assert other.values.read(INTERRUPTED) is None
    for number in other.coordinator.roster.ranks.values():
        other.member(number)._report(FINISHED, "")
    other.step()
    assert other.coordinator.state is State.DONE


def test_ranks_that_may_still_make_their_groups_are_interrupted() -> None:
    """Check that no rank waits for a store of process groups that is lost with its coordinator."""
    job = started()
    job.alive.discard(1)
    job.coordinator.died(1, 1001, KILLED)
    job.until_running(0)
    other = Job(job.steps[-1][0], job.alive, job.now)
    assert number_of(other.values.read(INTERRUPTED)) == job.coordinator.roster.generation
    other.until_running(job.coordinator.roster.generation)
    assert other.coordinator.roster.ranks == job.coordinator.roster.ranks
    assert [death.member for death in other.coordinator.roster.earlier] == [1], "the recovery from it is repeated"


def test_a_job_that_was_stopped_stays_stopped_with_its_exit_code() -> None:
    job = started()
    job.coordinator.stop("a reason", 7)
    job.step()
    after = Job(job.steps[-1][0], job.alive, job.now).coordinator
    assert (after.state, after.end) == (State.STOPPED, ("a reason", 7))


def test_members_that_died_before_do_not_come_back() -> None:
    job = started()
    job.alive.discard(5)
    job.coordinator.died(5, 1005, KILLED)
    job.step()
    other = Job(job.steps[-1][0], job.alive, job.now)
    other.step()
    assert 5 not in other.coordinator.membership.alive
    assert other.coordinator.losses.all == []
