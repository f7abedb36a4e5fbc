"""Coordinator and members in one process, while processes join, die and leave."""

from __future__ import annotations

import re
import threading
import time

import pytest
import torch.distributed as dist

from moevement_core.errors import JobStopped
from moevement_core.rendezvous import attempts
from moevement_core.rendezvous.coordinator import State
from moevement_core.rendezvous.devices import CHECK_S
from moevement_core.rendezvous.generation_keys import MOST_DELETED
from moevement_core.rendezvous.member import Member
from moevement_core.rendezvous.membership import LEASES_TO_LEAVE, LEASES_TO_LEAVE_DEVICES, RESET_GRACE_S
from moevement_core.rendezvous.respawns import WAIT_S
from moevement_core.rendezvous.roster import (
    BLOCKS,
    GENERATION,
    GROUPS,
    INTERRUPTED,
    LEAVING,
    MEMBERS_IN_SHARD,
    START,
    STOP,
    Death,
    MemberInfo,
    NoticedBy,
    Roster,
    UnusableDevice,
)
from moevement_core.rendezvous.values import Values, number_of
from tests.unit.rendezvous.job import Job

KILLED = "was killed by signal 9"


@pytest.fixture
def values() -> Values:
    return Values()


def test_a_roster_knows_when_the_job_first_committed(values: Values) -> None:
    job = Job(values, 2, 4)
    assert job.coordinator.roster.first_committed_at is None
    before = time.time()
    job.passes(1.0, job.coordinator.roster.ranks.values(), committed=1)
    for rank in (0, 1):
        lost = job.coordinator.roster.ranks[rank]
        job.coordinator.died(lost, 1000 + lost, KILLED)
        job.leave(*(number for number in job.coordinator.roster.ranks.values() if number != lost))
        first = job.coordinator.roster.first_committed_at
        assert first is not None
        assert before <= first <= time.time()
        before = first
        job.passes(1.0, job.coordinator.roster.ranks.values(), committed=2 + rank)
    assert job.coordinator.roster.first_committed_at == before


def test_what_a_generation_leaves_is_deleted_two_generations_later(values: Values) -> None:
    job = Job(values, 3, 8)
    late = Member(job.client, MemberInfo(7, 1007, "host", "node3"))
    late._generation = -1
    foreign = ["other/generation/0/groups/key", "generation/x/groups/key", "generation/later"]
    for key in foreign:
        job.groups.set(key, "")

    def keys(generation: int) -> set[str]:
        prefix = GROUPS.format(generation) + "/"
        return {key for key in job.groups.list_keys() if key.startswith(prefix)}

    def kept(generation: int) -> list[str]:
        known = [*values._values, *values._reports, *values._new, *values._watchers]
        return [key for key in known if key.startswith(GENERATION.format(generation))]

    for generation in range(4):
        assert job.coordinator.roster.generation == generation
        groups = dist.PrefixStore(GROUPS.format(generation), job.groups)
        for rank in range(MOST_DELETED):
            for name in ("rank/{}", "default_pg/0//cpu//0/{}"):
                groups.set(name.format(rank), "address")
        for _ in range(4):
            job.coordinator.step()
        expected = [number >= generation - 1 for number in range(generation + 1)]
        assert [bool(keys(number)) for number in range(generation + 1)] == expected
        assert [bool(kept(number)) for number in range(generation + 1)] == expected
        job.passes(0.2, job.coordinator.roster.ranks.values(), committed=generation + 1)
        lost = job.coordinator.roster.ranks[0]
        job.coordinator.died(lost, 1000 + lost, KILLED)
        assert number_of(values.read(INTERRUPTED)) == generation
        job.leave(*(number for number in job.coordinator.roster.ranks.values() if number != lost))
    assert all(job.groups.check([key]) for key in foreign)
    assert late._next_roster().generation >= 2, "a spare that reads late skips the generations that are over"


def test_a_member_reads_the_entries_of_its_shard(values: Values) -> None:
    last = 2 * MEMBERS_IN_SHARD + 1
    job = Job(values, 3, 3)
    job.join(last)
    job.join(MEMBERS_IN_SHARD)
    job.passes(0.2, [0, 1, 2], committed=1)
    job.coordinator.died(2, 1002, KILLED)
    job.leave(0, 1)
    job.settle()
    own = Member(job.client, MemberInfo(last, 1000, "host", "node"))
    everything = Member(job.client, MemberInfo(0, 1000, "host", "node"), reads_all=True)
    without = Member(job.client, MemberInfo(MEMBERS_IN_SHARD, 1000, "host", "node"))
    for member in (own, everything, without):
        member._generation = 0
    rosters = [member._next_roster() for member in (own, everything, without)]
    assert [(roster.world, roster.ranks) for roster in rosters] == [(3, {2: last}), (3, {0: 0, 1: 1, 2: last}), (3, {})]
    assert [roster.rank_of(last) for roster in rosters] == [2, 2, None]
    assert {roster.placement for roster in rosters} == {job.coordinator.roster.placement}


def test_the_first_to_join_are_the_ranks_and_the_others_wait(values: Values) -> None:
    job = Job(values, 3, 2)
    job.join(3)
    assert job.coordinator.state is State.FORMING, "member 2 is to be rank 2"
    job.join(2)
    assert (job.waiting, job.coordinator.roster.nodes) == ([3], {0: "node0", 1: "node0", 2: "node1"})
    assert [job.rank_of(number) for number in (0, 1, 2)] == [0, 1, 2]


def test_members_that_do_not_come_are_replaced_by_those_that_did(values: Values) -> None:
    job = Job(values, 2, 1, spare_timeout_s=60.0)
    job.join(2)
    job.passes(59.0)
    assert job.coordinator.state is State.FORMING, "member 1 is to be rank 1"
    job.passes(2.0)
    assert job.coordinator.roster.ranks == {0: 0, 1: 2}
    (text,) = job.reported
    assert re.search(r"\bmembers? 1\b.*\b60 s\b", text)


def test_a_job_whose_members_do_not_come_is_stopped(values: Values) -> None:
    job = Job(values, 2, 0, spare_timeout_s=60.0)
    job.passes(600.0)
    assert job.coordinator.state is State.FORMING, "nobody has come yet: they may be started later"
    job.join(0)
    job.passes(61.0)
    assert job.coordinator.state is State.STOPPED
    assert re.search(r"\bmembers? 1\b.*\b60 s\b.*\b1\b.*\b2 ranks\b", (values.read(STOP) or ""))


def test_a_member_that_dies_before_it_joins_is_not_waited_for(values: Values) -> None:
    job = Job(values, 2, 1)
    job.join(2)
    job.coordinator.died(1, 1001, KILLED)
    job.coordinator.step()
    assert job.coordinator.roster.ranks == {0: 0, 1: 2}


def test_survivors_keep_their_ranks_and_a_spare_takes_the_one_that_is_free(values: Values) -> None:
    job = Job(values, 3, 4)
    for number in range(3):
        job.rank_of(number)
    job.coordinator.died(1, 1001, KILLED)
    assert job.coordinator.losses.all[-1].rank == 1
    job.leave(0)
    assert job.coordinator.state is State.FORMING, "rank 2 has not stopped yet"
    job.leave(2)
    roster = job.coordinator.roster
    assert (roster.generation, roster.ranks, roster.spares) == (1, {0: 0, 1: 3, 2: 2}, 0)
    assert [(death.rank, death.how) for death in roster.deaths] == [(1, KILLED)]
    assert [job.rank_of(number) for number in (0, 3, 2)] == [0, 1, 2]
    assert Roster.decode(roster.encode()) == roster


def test_a_spare_that_dies_interrupts_nobody_and_is_not_chosen(values: Values) -> None:
    job = Job(values, 2, 4)
    job.coordinator.died(2, 1002, KILLED)
    assert job.coordinator.losses.all[-1].rank is None
    assert job.coordinator.state is State.RUNNING
    job.coordinator.died(0, 1000, "ended with 1")
    job.leave(1)
    assert job.coordinator.roster.ranks == {0: 3, 1: 1}


def test_ranks_that_die_while_the_job_is_formed_again_are_replaced_too(values: Values) -> None:
    job = Job(values, 3, 5)
    job.coordinator.died(0, 1000, KILLED)
    job.leave(1)
    job.coordinator.died(2, 1002, KILLED)
    job.coordinator.step()
    assert job.coordinator.roster.ranks == {0: 4, 1: 1, 2: 3}, "member 3 is on the node of member 2"
    assert len(job.coordinator.roster.deaths) == 2
    # A replacement dies before it has begun. The only spare left is the member that joins next.
    job.coordinator.died(3, 1003, KILLED)
    job.leave(1, 4)
    assert job.coordinator.state is State.FORMING
    assert re.search(r"\bspare\b.*\b60 s\b.*\b1\b", job.reported[-1])
    job.join(5)
    assert job.coordinator.roster.ranks == {0: 4, 1: 1, 2: 5}


def test_a_roster_knows_of_failures_whose_recovery_was_interrupted(values: Values) -> None:
    job = Job(values, 2, 6)
    for rank, had_recovered, earlier in ((0, True, []), (1, False, [0])):
        member = job.coordinator.roster.ranks[rank]
        job.coordinator.died(member, 1000, KILLED)
        survivor = job.coordinator.roster.ranks[1 - rank]
        job.members[survivor].leave("", 7, had_recovered=had_recovered)
        job.settle()
        roster = job.coordinator.roster
        assert [death.rank for death in roster.deaths] == [rank]
        assert [death.rank for death in roster.earlier] == earlier
        assert Roster.decode(roster.encode()) == roster
    job.passes(40.0, alive=job.members, committed=9)  # progress, so that the next attempt need not wait
    job.coordinator.died(job.coordinator.roster.ranks[0], 1000, KILLED)
    job.members[job.coordinator.roster.ranks[1]].leave("", 9, had_recovered=True)
    job.settle()
    assert job.coordinator.roster.earlier == ()


def test_without_a_spare_in_time_the_job_stops_and_everyone_learns_why(values: Values) -> None:
    job = Job(values, 2, 2, spare_timeout_s=5.0)
    job.coordinator.died(1, 1001, KILLED)
    job.passes(6.0)
    job.leave(0)
    assert job.coordinator.state is State.FORMING, "it counts from when only a spare is missing"
    assert any(re.search(r"\bspare\b.*\b5 s\b.*\b1\b", text) for text in job.reported)
    job.passes(6.0)
    assert job.coordinator.state is State.STOPPED
    with pytest.raises(JobStopped, match=r"\bspare\b.*\b5 s\b.*\b1\b.*\b2 ranks\b"):
        job.members[0].wait_for_rank()


def test_each_death_is_given_the_whole_time(values: Values) -> None:
    """Check that each death starts the spare timeout again, so that every replacement has the full time to join."""
    job = Job(values, 3, 3, spare_timeout_s=4.0)
    job.coordinator.died(1, 1001, KILLED)
    job.leave(0, 2)
    job.passes(3.0)
    job.coordinator.died(2, 1002, KILLED)
    job.passes(3.0)
    job.join(3)
    job.join(4)
    assert job.coordinator.state is State.RUNNING
    assert job.coordinator.roster.ranks == {0: 0, 1: 4, 2: 3}, "member 3 is on the node of member 2"


def test_a_rank_that_fails_again_and_again_in_the_same_place_ends_the_job(values: Values) -> None:
    job = Job(values, 2, 2)
    for _ in range(attempts.FAILURES - 1):
        job.leave(0, reason="rank 0: ValueError: no", committed=7)
        job.leave(1, committed=7)
        job.passes(60)
        job.settle()
        assert job.coordinator.state is State.RUNNING
    job.leave(0, 1, reason="rank 0: ValueError: no", committed=9)
    assert job.coordinator.state is State.RUNNING, "it has come further meanwhile"
    for _ in range(attempts.FAILURES):
        job.leave(0, 1, reason="rank 0: ValueError: no", committed=9)
        job.passes(60)
        job.settle()
    assert job.coordinator.state is State.STOPPED


def _kill_rank_1(job: Job, committed: int) -> None:
    job.join(max(job.members) + 1)
    job.coordinator.died(job.coordinator.roster.ranks[1], 0, KILLED)
    job.leave(0, committed=committed)
    job.passes(60)
    job.settle()


def test_kills_never_end_a_job_that_comes_further_between_them(values: Values) -> None:
    job = Job(values, 2, 2)
    for kill in range(3 * attempts.DEATHS):
        _kill_rank_1(job, committed=kill)
        assert job.coordinator.state is State.RUNNING


def test_a_batch_that_always_kills_its_rank_ends_the_job_with_the_iteration_named(values: Values) -> None:
    job = Job(values, 2, 2)
    for _ in range(attempts.DEATHS - 1):
        _kill_rank_1(job, committed=6)
        assert job.coordinator.state is State.RUNNING
    assert [re.findall(r"\b(\d+) s\b", text) for text in job.reported] == [["1"], ["2"]], "later attempts wait"
    _kill_rank_1(job, committed=6)
    assert job.coordinator.state is State.STOPPED
    pattern = rf"\brank 1\b.*\b{attempts.DEATHS} times\b.*\biteration 7\b.*--iterations-to-skip 7\b"
    with pytest.raises(JobStopped, match=pattern):
        job.members[0].wait_for_rank()


def test_what_supervisors_hear_of_progress_counts_too(values: Values) -> None:
    """Kill all ranks repeatedly. Between kills they make progress, which reaches the coordinator only in leases."""
    job = Job(values, 1, 1)
    for kill in range(2 * attempts.DEATHS):
        job.join(kill + 1)
        job.passes(1.0, [kill], committed=kill)
        job.coordinator.died(kill, 0, KILLED)
        job.settle()
        assert job.coordinator.state is State.RUNNING


# Leases


def test_a_rank_whose_lease_ends_is_replaced_and_its_supervisor_learns_of_it(values: Values) -> None:
    job = Job(values, 2, 3, lease_s=10.0)
    job.passes(5.0, [0, 1, 2])
    job.passes(9.8, [0, 2])
    assert (job.coordinator.state, job.interrupted) == (State.RUNNING, None)
    job.passes(0.4, [0, 2])
    assert job.interrupted == (0, 1)
    assert job.coordinator.given_up == {1}
    job.leave(0)
    death = job.coordinator.roster.deaths[0]
    assert (death.rank, death.noticed_by) == (1, NoticedBy.LEASE)
    assert re.search(r"\b10 s\b", death.how)
    assert 9.9 < death.at - death.last_seen < 10.5
    assert job.coordinator.roster.ranks == {0: 0, 1: 2}
    job.coordinator.died(1, 1001, KILLED)
    assert job.coordinator.losses.all == [death], "its supervisor has ended it"
    with pytest.raises(JobStopped, match=re.escape(death.how)):
        job.members[1].wait_for_rank()


def test_a_broken_connection_is_a_death_within_a_second_unless_the_supervisor_is_back(values: Values) -> None:
    job = Job(values, 3, 5, lease_s=10.0)
    everyone = range(5)
    job.passes(1.0, everyone)
    job.coordinator.membership.disconnected([0, 1])
    job.passes(RESET_GRACE_S - 0.1, [1, 2, 3, 4])
    job.passes(1.0 - RESET_GRACE_S, [1, 2, 3, 4])
    assert job.interrupted == (0, 0)
    assert [death.noticed_by for death in job.coordinator.losses.all] == [NoticedBy.RESET]


def test_a_spare_whose_node_is_lost_is_forgotten(values: Values) -> None:
    job = Job(values, 1, 3, lease_s=10.0)
    job.passes(11.0, [0, 2])
    assert (job.interrupted, job.waiting) == (None, [2])


def test_a_spare_that_is_silent_is_not_chosen_before_one_that_is_heard(values: Values) -> None:
    job = Job(values, 1, 3, lease_s=10.0)
    job.passes(5.0, [0, 2])
    job.coordinator.died(0, 1000, KILLED)
    job.settle()
    assert job.coordinator.roster.ranks == {0: 2}


def test_a_spare_that_is_lost_before_it_acknowledges_is_replaced_and_nobody_has_entered(
    values: Values,
) -> None:
    job = Job(values, 2, 4, lease_s=10.0)
    job.silent.add(2)
    job.passes(1.0, range(4))
    job.coordinator.died(1, 1001, KILLED)
    job.leave(0)
    assert (job.coordinator.state, job.coordinator.roster.ranks) == (State.PROPOSED, {0: 0, 1: 2})
    job.passes(10.5, [0, 3])
    assert values.read(START) == "1 superseded"
    job.settle()
    assert (job.coordinator.state, job.coordinator.roster.ranks) == (State.RUNNING, {0: 0, 1: 3})
    assert {death.rank for death in job.coordinator.roster.deaths} == {1}, "both were to be rank 1"
    assert len(job.coordinator.roster.deaths) == 2


def test_a_member_that_lives_and_never_acknowledges_is_given_up(values: Values) -> None:
    job = Job(values, 1, 2, lease_s=10.0)
    job.silent.add(1)
    job.coordinator.died(0, 1000, KILLED)
    job.settle()
    job.join(2)
    job.passes(10.0 * LEASES_TO_LEAVE + 1, [1, 2])
    job.settle()
    assert job.coordinator.roster.ranks == {0: 2}


def test_a_rank_that_does_not_stop_after_an_interruption_is_given_up(values: Values) -> None:
    job = Job(values, 2, 4, lease_s=10.0)
    job.coordinator.died(1, 1001, KILLED)
    job.passes(10.0 * LEASES_TO_LEAVE - 1, range(4))
    assert job.coordinator.given_up == set()
    job.passes(2.0, range(4))
    job.settle()
    assert job.coordinator.given_up == {0}
    assert job.coordinator.roster.ranks == {0: 2, 1: 3}
    before = len(job.coordinator.losses.all)
    job.coordinator.died(0, 1000, "ended with 1")
    assert len(job.coordinator.losses.all) == before
    assert job.coordinator.state is State.RUNNING


def test_a_rank_that_comes_further_while_it_leaves_has_the_same_time_again(values: Values) -> None:
    job = Job(values, 3, 6, lease_s=10.0)
    leave_s = 10.0 * LEASES_TO_LEAVE
    job.coordinator.died(1, 1001, KILLED)
    job.passes(leave_s - 1, range(6))
    values.report(LEAVING.format(0), 0, "abort")
    job.passes(2.0, range(6))
    job.settle()
    assert job.coordinator.given_up == {2}, "it has reported nothing"
    job.passes(leave_s - 1, range(6))
    assert job.coordinator.given_up == {2}
    values.report(LEAVING.format(0), 0, "unwind")
    job.passes(leave_s, range(6))
    assert job.coordinator.given_up == {2}
    job.passes(2.0, range(6))
    assert job.coordinator.given_up == {0, 2}, "a phase that does not end"


def test_ranks_with_devices_have_longer_to_leave(values: Values) -> None:
    job = Job(values, 2, 0, lease_s=10.0)
    for number in range(4):
        job.members[number] = Member(
            job.client, MemberInfo(number, 1000 + number, "host", "node", number % 2, ("a", "b"))
        )
        job.members[number].join()
        job.settle()
    job.coordinator.died(1, 1001, KILLED)
    job.passes(10.0 * LEASES_TO_LEAVE_DEVICES - 1, range(4))
    assert job.coordinator.given_up == set()
    job.passes(2.0, range(4))
    assert job.coordinator.given_up == {0}


def test_a_coordinator_that_did_not_run_for_a_while_takes_nobody_for_dead(values: Values) -> None:
    job = Job(values, 2, 3, lease_s=10.0)
    job.passes(1.0, range(3))
    job.now += 60.0
    job.coordinator.step()
    assert (job.coordinator.losses.all, job.coordinator.state) == ([], State.RUNNING)
    job.passes(10.5)
    assert len(job.coordinator.losses.all) == 3


# The end


def test_the_job_has_ended_when_every_rank_has(values: Values) -> None:
    job = Job(values, 2, 3)
    job.members[0].finished()
    job.settle()
    assert job.coordinator.state is State.RUNNING
    job.members[1].finished()
    job.settle()
    assert job.coordinator.state is State.DONE
    job.members[0].wait_for_end()
    job.coordinator.died(1, 1001, KILLED)
    job.settle()
    assert job.coordinator.state is State.DONE, "who dies on the way out takes nothing with it"
    with pytest.raises(JobStopped, match=r"^$"):
        job.members[2].wait_for_rank()


def test_a_rank_that_dies_at_the_end_before_others_are_there_is_recovered(values: Values) -> None:
    job = Job(values, 2, 3)
    job.members[0].finished()
    job.coordinator.died(1, 1001, KILLED)
    job.leave(0)
    assert job.coordinator.state is State.RUNNING
    assert job.coordinator.roster.ranks == {0: 0, 1: 2}
    for number in (0, 2):
        job.members[number].finished()
    job.settle()
    assert job.coordinator.state is State.DONE


def test_a_member_that_joins_while_a_roster_is_made_misses_none(values: Values) -> None:
    """Let members join while the coordinator forms the job. Each gets the rank once the members before it have died."""
    job = Job(values, 1, 1)
    got: list[int] = []

    def take_part(number: int) -> None:
        member = Member(job.client, MemberInfo(number, number, "h", "n"))
        member.join()
        member.wait_for_rank()
        got.append(number)

    threads = [threading.Thread(target=take_part, args=(number,), daemon=True) for number in range(1, 9)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 20
    while len(got) < 8 and time.monotonic() < deadline:
        job.settle(but=tuple(range(1, 9)))
        current = job.coordinator.roster.ranks[0]
        if current == 0 or current in got:
            job.coordinator.renew({current: len(got) + 1})  # each member makes progress
            job.coordinator.died(current, 0, KILLED)
    assert sorted(got) == list(range(1, 9))


def test_a_roster_names_who_died() -> None:
    death = Death(3, 1, 1003, "ended with 1", 5.0)
    assert Roster.decode(Roster(2, {0: 4}, (death,), nodes={0: "n"}).encode()).deaths == (death,)


# Devices


def test_a_spare_takes_no_device_of_a_rank_that_lives(values: Values) -> None:
    """Use tasks with one device each: the first spare has the device of rank 0, and both call it device 0."""
    job = Job(values, 2, 0)
    for number, device in enumerate(["GPU-a", "GPU-b", "GPU-a", "GPU-c"]):
        job.join(number, "node", (device,))
    job.coordinator.died(1, 1001, KILLED)
    job.leave(0)
    assert job.waiting == []
    assert (job.coordinator.roster.ranks, job.coordinator.roster.devices) == ({0: 0, 1: 3}, {0: 0, 1: 0})
    assert [process["pid"] for process in job.process_entries] == [1000, 1003, 1002, None]
    assert [process["role"] for process in job.process_entries] == [
        "active",
        "active",
        "spare",
        "starting",
    ]
    assert (job.coordinator.roster.spares, job.coordinator.roster.starting) == (0, 1)
    job.join(4, "node", ("GPU-d",))
    assert [process["role"] for process in job.process_entries][2:] == ["spare", "spare"]


def two_nodes(values: Values, members: int = 5, devices: int = 2) -> Job:
    """Return a job of three ranks with two processes on each node, which see all devices of their node."""
    job = Job(values, 3, 0, lease_s=10.0)
    for number in range(members):
        node = f"node{number // 2}"
        job.join(number, node, tuple(f"{node}-{device}" for device in range(devices)))
    return job


@pytest.mark.parametrize("is_seen_first", [True, False])
def test_a_process_that_gives_its_rank_back_is_dead_even_if_it_cannot_end(values: Values, is_seen_first: bool) -> None:
    """Let the supervisor see the process end, or never see it because the driver holds the process."""
    job = two_nodes(values)
    job.members[1].report_unusable_device(UnusableDevice("illegal access", "node0-1"))
    if is_seen_first:
        job.coordinator.died(1, 1001, "ended with 74")
    job.settle()
    job.leave(0, 2)
    assert job.coordinator.roster.ranks == {0: 0, 1: 3, 2: 2}
    (death,) = job.coordinator.losses.all
    assert (death.member, death.rank, death.noticed_by) == (1, 1, NoticedBy.DEVICE)
    assert "illegal access" in death.how
    assert job.coordinator.given_up == {1}, "its supervisor ends it"


@pytest.mark.parametrize("is_broken", [True, False])
def test_a_broken_device_is_given_to_nobody_and_one_that_only_failed_is(values: Values, is_broken: bool) -> None:
    job = two_nodes(values, members=3)
    job.members[1].report_unusable_device(UnusableDevice("ECC", "node0-1", is_broken))
    job.settle()
    job.join(5, "node0", ("node0-0", "node0-1"))
    assert job.waiting == ([] if is_broken else [5])
    assert any("node0-1" in text for text in job.reported) == is_broken
    job.leave(0, 2)
    assert (job.coordinator.state is State.RUNNING) == (not is_broken)


def test_a_device_that_fails_its_check_gives_the_rank_to_another_before_anybody_enters(values: Values) -> None:
    job = two_nodes(values)
    job.silent.add(3)  # it is still checking its device
    job.coordinator.died(1, 1001, KILLED)
    job.leave(0, 2)
    assert job.coordinator.roster.ranks == {0: 0, 1: 3, 2: 2}
    job.members[3].report_unusable_device(UnusableDevice("no answer", "node1-1", is_broken=True))
    job.settle()
    assert job.coordinator.roster.ranks == {0: 0, 1: 4, 2: 2}
    assert job.coordinator.state is State.RUNNING


def test_devices_are_checked_before_a_rank_is_acknowledged_and_that_may_take_longer(values: Values) -> None:
    job = two_nodes(values)
    job.silent.add(3)
    job.coordinator.died(1, 1001, KILLED)
    job.leave(0, 2)
    job.passes(10.0 * LEASES_TO_LEAVE + 1, range(5))
    assert job.coordinator.state is State.PROPOSED
    job.passes(CHECK_S, range(5))
    job.settle()
    assert job.coordinator.roster.ranks == {0: 0, 1: 4, 2: 2}


def test_ranks_that_are_given_back_are_no_failures_in_the_same_place(values: Values) -> None:
    job = Job(values, 2, 2)
    for number in range(1, attempts.FAILURES + 1):
        job.join(number + 1)
        job.members[number].report_unusable_device(UnusableDevice("illegal access"))
        job.coordinator.step()
        job.leave(0, committed=7)
        job.passes(60)
        job.settle()
        assert (job.coordinator.state, job.coordinator.roster.ranks) == (State.RUNNING, {0: 0, 1: number + 1})


# Processes that compute results that are not finite


def test_a_process_that_computes_no_numbers_is_replaced_by_one_of_another_node(values: Values) -> None:
    job = Job(values, 2, 6)  # two on each node
    job.coordinator.renew({0: 41, 1: 41})
    job.leave(0, 1, reason="rank 1: NaN", committed=41, suspects=(1,))
    assert job.coordinator.roster.ranks == {0: 0, 1: 2}
    (death,) = job.coordinator.losses.all
    assert (death.member, death.noticed_by) == (1, NoticedBy.RESULT)
    assert job.coordinator.given_up == {1}, "its supervisor ends it"
    with pytest.raises(JobStopped):
        job.members[1].wait_for_rank()


def test_a_spare_beside_a_process_that_computed_no_numbers_comes_last(values: Values) -> None:
    job = Job(values, 3, 6)
    job.coordinator.renew({0: 41, 1: 41, 2: 41})
    job.leave(0, 1, 2, reason="rank 2: NaN", committed=41, suspects=(2,))
    assert job.coordinator.roster.ranks == {0: 0, 1: 1, 2: 4}, "member 3 came first, and is on the node of member 2"
    assert job.waiting == [5, 3]


def test_ranks_that_are_suspected_together_are_replaced_one_after_the_other(values: Values) -> None:
    """Replace suspects singly, because two could hold all copies. If the fault remains, blame the batch and stop."""
    job = Job(values, 2, 6)
    job.coordinator.renew({0: 41, 1: 41})
    for lost, others in ((0, (0, 1)), (1, (1, 2))):
        job.leave(*others, reason=f"rank {lost}: NaN", committed=41, suspects=(0, 1))
        assert job.coordinator.state is State.RUNNING
    assert {death.member for death in job.coordinator.losses.all} == {0, 1}
    job.leave(*job.coordinator.roster.ranks.values(), reason="rank 0: NaN", committed=41, suspects=(0, 1))
    assert job.coordinator.state is State.STOPPED
    assert "--iterations-to-skip 42" in (values.read(STOP) or "")


def test_progress_makes_every_process_one_that_may_be_replaced_again(values: Values) -> None:
    job = Job(values, 2, 6)
    for committed in (41, 42, 43):
        job.coordinator.renew(dict.fromkeys(job.coordinator.roster.ranks.values(), committed))
        job.leave(*job.coordinator.roster.ranks.values(), reason="rank 1: NaN", committed=committed, suspects=(1,))
        assert job.coordinator.state is State.RUNNING
    assert len(job.coordinator.losses.all) == 3


def test_a_suspect_that_dies_meanwhile_is_replaced_once(values: Values) -> None:
    job = Job(values, 2, 4)
    job.members[0].leave("rank 1: NaN", 41, suspects=(1,))
    job.coordinator.died(1, 1001, KILLED)
    job.settle()
    assert job.coordinator.roster.ranks == {0: 0, 1: 2}
    assert len(job.coordinator.losses.all) == 1


# Ranks that communicate in every layer


def blocks(values: Values, nodes: str, *, sizes: str = "2", lease_s: float = 10.0) -> Job:
    """Return a job of four ranks in groups of ``sizes``; ``nodes`` has one letter for the node of each member."""
    values.set(BLOCKS, sizes)
    job = Job(values, 4, 0, lease_s=lease_s)
    for number, node in enumerate(nodes):
        job.join(number, node)
    return job


def test_a_process_of_the_same_node_is_waited_for_while_spares_of_another_wait(values: Values) -> None:
    job = blocks(values, "aabbcc")
    job.coordinator.died(1, 1001, KILLED)
    job.leave(0, 2, 3)
    job.passes(5.0, (0, 2, 3, 4, 5))
    assert (job.coordinator.state, job.coordinator.blocks.waits) == (State.FORMING, True)
    assert len(job.reported) == 1
    job.join(6, "a")
    assert (job.coordinator.roster.ranks, job.coordinator.blocks.waits) == ({0: 0, 1: 6, 2: 2, 3: 3}, False)
    assert (job.coordinator.roster.split, len(job.reported)) == ((), 1)


def test_it_is_waited_for_only_as_long_as_a_start_takes_and_a_split_group_is_reported_once(
    values: Values,
) -> None:
    job = blocks(values, "aabbcc")
    everyone = {0, 2, 3, 4, 5}
    job.coordinator.died(1, 1001, KILLED)
    job.leave(0, 2, 3)
    job.passes(WAIT_S + 1.0, everyone)
    job.settle()
    assert job.coordinator.roster.ranks == {0: 0, 1: 4, 2: 2, 3: 3}
    assert job.coordinator.roster.split == ((0, 1),)
    assert len(job.reported) == 2
    job.coordinator.died(3, 1003, KILLED)
    job.join(6, "b")
    job.leave(0, 4, 2, committed=3)
    assert job.coordinator.roster.ranks == {0: 0, 1: 4, 2: 2, 3: 6}
    assert (job.coordinator.roster.split, len(job.reported)) == ((), 2)


@pytest.mark.parametrize("noticed_by", [NoticedBy.RESET, NoticedBy.LEASE])
def test_ranks_of_a_node_that_is_gone_move_together_and_at_once(values: Values, noticed_by: NoticedBy) -> None:
    job = blocks(values, "aabbcdd")
    for member in (2, 3):
        job.coordinator.died(member, 0, "was lost", noticed_by)
    job.leave(0, 1)
    assert job.coordinator.roster.ranks == {0: 0, 1: 1, 2: 5, 3: 6}
    assert (job.coordinator.roster.split, job.reported) == ((), [])


def test_a_process_that_waits_on_the_same_node_takes_over_at_once(values: Values) -> None:
    """Use one host for all ranks and spares."""
    job = blocks(values, "aaaaaa")
    job.coordinator.died(1, 1001, KILLED)
    job.leave(0, 2, 3)
    assert job.coordinator.roster.ranks == {0: 0, 1: 4, 2: 2, 3: 3}


def test_ranks_that_communicate_no_more_than_others_wait_for_nobody(values: Values) -> None:
    job = Job(values, 4, 6)
    job.coordinator.died(1, 1001, KILLED)
    job.leave(0, 2, 3)
    assert job.coordinator.roster.ranks == {0: 0, 1: 4, 2: 2, 3: 3}


def test_nobody_is_waited_for_on_a_node_whose_device_is_broken(values: Values) -> None:
    values.set(BLOCKS, "2")
    job = Job(values, 4, 0, lease_s=10.0)
    for number, node in enumerate("aabbcc"):
        job.join(number, node, (f"{node}-0", f"{node}-1"))
    job.members[1].report_unusable_device(UnusableDevice("ECC", "a-1", is_broken=True))
    job.settle()
    job.leave(0, 2, 3)
    assert job.coordinator.roster.ranks == {0: 0, 1: 4, 2: 2, 3: 3}


def test_a_rank_that_computed_no_numbers_leaves_its_node_also_where_its_group_is(values: Values) -> None:
    job = blocks(values, "aabbac", lease_s=1e9)
    job.coordinator.renew(dict.fromkeys(range(4), 41))
    job.leave(0, 1, 2, 3, reason="rank 1: NaN", committed=41, suspects=(1,))
    assert job.coordinator.roster.ranks == {0: 0, 1: 5, 2: 2, 3: 3}
    assert job.coordinator.roster.split == ((0, 1),)


def test_a_node_that_falls_silent_while_a_process_of_it_is_waited_for_is_waited_for_no_longer(values: Values) -> None:
    job = blocks(values, "aabbcc")
    job.coordinator.died(1, 1001, KILLED)
    job.leave(0, 2, 3)
    job.passes(2.0, range(6))
    assert job.coordinator.blocks.waits
    job.coordinator.membership.disconnected([0])
    job.passes(RESET_GRACE_S + 0.5, (2, 3, 4, 5))
    job.settle()
    assert job.coordinator.roster.ranks == {0: 4, 1: 5, 2: 2, 3: 3}


def test_a_process_that_was_stopped_is_replaced_on_its_node(values: Values) -> None:
    """Let the lease of a stopped process run out while its supervisor, still connected, starts a replacement."""
    job = blocks(values, "aabbcc")
    job.passes(1.0, range(6))
    job.passes(10.5, {0, 2, 3, 4, 5})
    assert [death.noticed_by for death in job.coordinator.losses.all] == [NoticedBy.LEASE]
    job.leave(0, 2, 3)
    assert job.coordinator.blocks.waits
    job.join(6, "a")
    assert job.coordinator.roster.ranks == {0: 0, 1: 6, 2: 2, 3: 3}


def test_the_largest_groups_that_fit_into_a_node_are_kept_on_one(values: Values) -> None:
    """Use groups of two ranks, which fit into a node and stay on one, and groups of four, which span two nodes."""
    job = blocks(values, "aabbcc", sizes="2,4")
    assert (job.coordinator.roster.split, job.reported) == ((), [])
    job.coordinator.died(1, 1001, KILLED)
    job.leave(0, 2, 3)
    assert job.coordinator.blocks.waits
    job.join(6, "a")
    assert job.coordinator.roster.ranks == {0: 0, 1: 6, 2: 2, 3: 3}


def test_groups_that_fit_into_no_node_are_reported_when_the_job_begins(values: Values) -> None:
    job = blocks(values, "abab")
    assert (job.coordinator.roster.split, len(job.reported)) == (((0, 1), (2, 3)), 2)
