"""The coordinator and members over a real store, as processes come and go."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from moevement_core.errors import JobStopped
from moevement_core.rendezvous import coordinator
from moevement_core.rendezvous.coordinator import NO_PROGRESS, Coordinator, State, Wrapper
from moevement_core.rendezvous.member import Member
from moevement_core.rendezvous.roster import Card, Death, Roster


@pytest.fixture
def store() -> Any:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))


class Job:
    """A coordinator and its members, without processes."""

    def __init__(
        self, store: Any, ranks: int, members: int, spare_timeout_s: float = 60.0, wrapper: Wrapper | None = None
    ) -> None:
        self.store, self.told = store, list[str]()
        self.coordinator = Coordinator(store, ranks, spare_timeout_s, self.told.append, wrapper)
        self.members: dict[int, Member] = {}
        for number in range(members):
            self.join(number)

    def join(self, number: int) -> None:
        self.members[number] = Member(self.store, Card(number, 1000 + number, "host", f"node{number // 2}"))
        self.members[number].join()
        self.coordinator.step()

    def rank_of(self, number: int) -> int:
        return self.members[number].wait_for_rank()[1]

    def leave(self, *numbers: int, reason: str = "", committed: int = 0) -> None:
        for number in numbers:
            if self.members[number]._generation < self.coordinator.roster.generation:
                self.rank_of(number)
            self.members[number].leave(reason, committed)
        self.coordinator.step()  # sees that they left, and forms the job anew
        self.coordinator.step()


def test_the_first_to_join_are_the_ranks_and_the_others_wait(store: Any) -> None:
    job = Job(store, 3, 2)
    job.join(3)
    assert job.coordinator.state is State.FORMING, "member 2 is to be rank 2"
    job.join(2)
    assert (job.coordinator.waiting(), job.coordinator.roster.nodes) == ([3], {0: "node0", 1: "node0", 2: "node1"})
    assert [job.rank_of(number) for number in (0, 1, 2)] == [0, 1, 2]


def test_a_member_that_dies_before_it_joins_is_not_waited_for(store: Any) -> None:
    job = Job(store, 2, 1)
    job.join(2)
    job.coordinator.died(1, 1001, "was killed by signal 9")
    job.coordinator.step()
    assert job.coordinator.roster.ranks == {0: 0, 1: 2}


def test_survivors_keep_their_ranks_and_a_spare_takes_the_one_that_is_free(store: Any) -> None:
    job = Job(store, 3, 4)
    for number in range(3):
        job.rank_of(number)
    assert job.coordinator.died(1, 1001, "was killed by signal 9") == 1
    job.leave(0)
    assert job.coordinator.state is State.FORMING, "rank 2 has not stopped yet"
    job.leave(2)
    roster = job.coordinator.roster
    assert (roster.generation, roster.ranks, roster.spares) == (1, {0: 0, 1: 3, 2: 2}, 0)
    assert [(death.rank, death.how) for death in roster.deaths] == [(1, "was killed by signal 9")]
    assert [job.rank_of(number) for number in (0, 3, 2)] == [0, 1, 2]
    assert Roster.decode(roster.encode()) == roster


def test_a_spare_that_dies_interrupts_nobody_and_is_not_chosen(store: Any) -> None:
    job = Job(store, 2, 4)
    assert job.coordinator.died(2, 1002, "was killed by signal 9") is None
    assert job.coordinator.state is State.RUNNING
    job.coordinator.died(0, 1000, "ended with 1")
    job.leave(1)
    assert job.coordinator.roster.ranks == {0: 3, 1: 1}


def test_ranks_that_die_while_the_job_is_formed_anew_are_replaced_too(store: Any) -> None:
    job = Job(store, 3, 5)
    job.coordinator.died(0, 1000, "was killed by signal 9")
    job.leave(1)
    job.coordinator.died(2, 1002, "was killed by signal 9")
    job.coordinator.step()
    assert job.coordinator.roster.ranks == {0: 3, 1: 1, 2: 4}
    assert len(job.coordinator.roster.deaths) == 2
    # One of the new ones dies before it has begun; there is nobody left but the one who joins next.
    job.coordinator.died(3, 1003, "was killed by signal 9")
    job.leave(1, 4)
    assert job.coordinator.state is State.FORMING
    assert "waiting up to 60 s for 1" in job.told[-1]
    job.join(5)
    assert job.coordinator.roster.ranks == {0: 5, 1: 1, 2: 4}


def test_without_a_spare_in_time_everyone_is_told_that_the_job_stops(store: Any) -> None:
    job = Job(store, 2, 2, spare_timeout_s=0.05)
    job.rank_of(0)
    job.coordinator.died(1, 1001, "was killed by signal 9")
    time.sleep(0.1)
    job.leave(0)
    assert job.coordinator.state is State.FORMING, "it counts from when only a spare is missing"
    assert "no spare is left; waiting up to 0.05 s for 1 to start" in job.told
    time.sleep(0.1)
    job.coordinator.step()
    assert job.coordinator.state is State.STOPPED
    with pytest.raises(JobStopped, match=r"no spare came within 0\.05 s for 1 of 2 ranks"):
        job.rank_of(0)


def test_each_death_is_given_the_whole_time(store: Any) -> None:
    """The process that was started for a rank that dies late has as long to come as that for the first."""
    job = Job(store, 3, 3, spare_timeout_s=0.4)
    job.coordinator.died(1, 1001, "was killed by signal 9")
    job.leave(0, 2)
    time.sleep(0.3)
    job.coordinator.died(2, 1002, "was killed by signal 9")
    job.coordinator.step()
    time.sleep(0.3)
    job.join(3)
    job.join(4)
    job.coordinator.step()
    assert job.coordinator.state is State.RUNNING
    assert job.coordinator.roster.ranks == {0: 0, 1: 3, 2: 4}


def test_a_rank_that_fails_again_and_again_in_the_same_place_ends_the_job(store: Any) -> None:
    job = Job(store, 2, 2)
    for _ in range(NO_PROGRESS - 1):
        job.leave(0, reason="rank 0: ValueError: no", committed=7)
        job.leave(1, committed=7)
        assert job.coordinator.state is State.RUNNING
    job.leave(0, 1, reason="rank 0: ValueError: no", committed=9)
    assert job.coordinator.state is State.RUNNING, "it has come further meanwhile"
    for _ in range(NO_PROGRESS):
        job.leave(0, 1, reason="rank 0: ValueError: no", committed=9)
    assert job.coordinator.state is State.STOPPED


def test_kills_never_end_a_job_that_has_spares(store: Any) -> None:
    job = Job(store, 2, 2)
    for number in range(2, 2 + 3 * NO_PROGRESS):
        job.join(number)
        gone = job.coordinator.roster.ranks[1]
        job.coordinator.died(gone, 0, "was killed by signal 9")
        job.leave(0, committed=0)
        assert job.coordinator.state is State.RUNNING


class FindsAllGone(Wrapper):
    """Ranks that leave are counted as ended."""

    def lost(self, generation: int) -> Iterable[int]:
        return (0, 1)

    def stand_in_for(self, generation: int, rank: int) -> None:
        pass


def test_who_answers_later_in_each_failure_is_not_given_up(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds in which somebody was missed do not add up over failures."""
    monkeypatch.setattr(coordinator, "LOST_S", 0.3)
    job = Job(store, 2, 2, wrapper=FindsAllGone())
    for number in range(2, 6):
        job.join(number)
        job.coordinator.died(job.coordinator.roster.ranks[1], 0, "was killed by signal 9")
        job.coordinator.step()
        time.sleep(0.12)
        job.coordinator.step()
        job.leave(0)
        assert job.coordinator.state is State.RUNNING
        assert job.coordinator.roster.ranks[0] == 0


def test_who_does_not_answer_is_given_up_and_told_so(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator, "LOST_S", 0.05)
    job = Job(store, 2, 4, wrapper=FindsAllGone())
    job.coordinator.died(1, 1001, "was killed by signal 9")
    job.coordinator.step()
    time.sleep(0.1)
    job.coordinator.step()
    job.coordinator.step()
    assert job.coordinator.roster.ranks == {0: 2, 1: 3}
    assert [death.how for death in job.coordinator.roster.deaths] == ["was killed by signal 9", "does not answer"]
    job.members[0]._generation = 0
    with pytest.raises(JobStopped, match="another is to take its rank"):
        job.rank_of(0)
    assert job.coordinator.died(0, 1000, "ended with 1") is None
    assert job.coordinator.state is State.RUNNING


def test_after_the_end_nobody_is_missed(store: Any) -> None:
    job = Job(store, 2, 3)
    for number in (0, 1):
        job.rank_of(number)
    job.members[0].done()
    job.coordinator.died(1, 1001, "was killed by signal 9")
    job.coordinator.step()
    assert job.coordinator.state is State.DONE
    with pytest.raises(JobStopped, match=r"^$"):
        job.rank_of(2)


def test_a_member_that_joins_while_a_roster_is_made_misses_none(store: Any) -> None:
    """Many join while the coordinator goes on forming the job; each is given a rank once all before it have died."""
    job = Job(store, 1, 1)
    got: list[int] = []

    def take_part(number: int) -> None:
        member = Member(dist.TCPStore("127.0.0.1", store.port, is_master=False), Card(number, number, "h", "n"))
        member.join()
        member.wait_for_rank()
        got.append(number)

    threads = [threading.Thread(target=take_part, args=(number,), daemon=True) for number in range(1, 9)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 20
    while len(got) < 8 and time.monotonic() < deadline:
        job.coordinator.step()
        current = job.coordinator.roster.ranks[0]
        if current == 0 or current in got:
            job.coordinator.died(current, 0, "was killed by signal 9")
    assert sorted(got) == list(range(1, 9))


def test_a_roster_names_who_died() -> None:
    death = Death(3, 1, 1003, "ended with 1", 5.0)
    assert Roster.decode(Roster(2, {0: 4}, (death,), nodes={0: "n"}).encode()).deaths == (death,)
