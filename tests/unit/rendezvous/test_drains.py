"""Requests to drain a node or a rank: who leaves, when, and where nobody goes until the request is taken back."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from moevement_core.rendezvous.coordinator import State
from moevement_core.rendezvous.drains import AHEAD
from moevement_core.rendezvous.roster import NoticedBy
from moevement_core.rendezvous.values import Values
from tests.unit.rendezvous.job import Job

COMMITTED = 7


def job_of(ranks: int, spares: Iterable[str] = ()) -> Job:
    """Return a job that trains, with a rank on each node, and spares on the named nodes."""
    job = Job(Values(), ranks, 0)
    for number in range(ranks):
        job.join(number, node=f"n{number}")
    for number, node in enumerate(spares, ranks):
        job.join(number, node=node)
    assert job.coordinator.state is State.RUNNING
    job.passes(0.2, job.members, COMMITTED)
    return job


def ask(job: Job, **targets: str) -> set[str]:
    done = job.coordinator.drain({target.removeprefix("_"): reason for target, reason in targets.items()})
    job.coordinator.step()
    return done


def leaves(job: Job, member: int) -> None:
    """Let a member give its rank back, and all others leave the interrupted generation."""
    job.members[member].report_drained("rank 0 keeps its state")
    job.coordinator.step()
    job.leave(
        *(other for other in job.coordinator.roster.ranks.values() if other != member), committed=COMMITTED + AHEAD
    )


def test_ranks_of_a_drained_node_leave_at_a_boundary_that_nobody_has_reached() -> None:
    job = job_of(2, spares=["n2"])
    assert job.coordinator.leaves == {}
    ask(job, n1="noisy")
    assert job.coordinator.leaves == {1: COMMITTED + AHEAD}
    leaves(job, 1)
    assert job.coordinator.state is State.RUNNING
    assert job.coordinator.roster.ranks == {0: 0, 1: 2}
    death = job.coordinator.deaths[-1]
    assert (death.rank, death.noticed_by) == (1, NoticedBy.DRAIN)
    assert "noisy" in death.how
    assert job.coordinator.leaves == {}


def test_nobody_gets_a_rank_on_a_drained_node_until_the_request_is_taken_back() -> None:
    job = job_of(2, spares=["n1", "n2"])
    ask(job, n1="")
    ask(job, n1="test")
    assert job.coordinator.waiting() == [3]
    leaves(job, 1)
    assert job.coordinator.roster.nodes[1] == "n2"
    job.coordinator.died(0, 1000, "was killed by signal 9")
    job.leave(3, committed=COMMITTED)
    assert job.coordinator.state is State.FORMING, "the only spare is on the drained node"
    ask(job)
    job.settle()
    assert job.coordinator.state is State.RUNNING
    assert job.coordinator.roster.nodes == {0: "n1", 1: "n2"}


def test_a_drained_rank_may_stay_on_its_node_and_the_request_is_over_when_it_has_left() -> None:
    job = job_of(2, spares=["n1"])
    assert ask(job, _1="slow") == set()
    leaves(job, 1)
    assert job.coordinator.roster.ranks == {0: 0, 1: 2}
    assert ask(job, _1="slow") == {"1"}
    assert job.coordinator.leaves == {}, "the process that has the rank now stays"


def test_without_a_spare_elsewhere_the_drain_waits_and_says_so_once() -> None:
    job = job_of(2, spares=["n1"])
    ask(job, n1="test")
    for _ in range(3):
        job.coordinator.step()
    assert job.coordinator.leaves == {}
    assert sum("spares outside" in line for line in job.reported) == 1
    job.join(9, node="n3")
    job.coordinator.step()
    assert job.coordinator.leaves == {1: COMMITTED + AHEAD}


def test_ranks_that_are_asked_later_leave_at_the_same_boundary() -> None:
    job = job_of(3, spares=["n3", "n4"])
    ask(job, n1="test")
    job.passes(0.2, job.members, COMMITTED + 1)
    ask(job, n1="test", n2="test")
    assert job.coordinator.leaves == {1: COMMITTED + AHEAD, 2: COMMITTED + 1 + AHEAD}


def test_a_drain_that_is_taken_back_moves_nobody() -> None:
    job = job_of(2, spares=["n2"])
    ask(job, n1="test")
    ask(job)
    assert job.coordinator.leaves == {}


@pytest.mark.parametrize("target", ["n9", "2", "-1", "n1 "])
def test_a_target_that_is_not_there_is_refused_and_forgotten(target: str) -> None:
    job = job_of(2, spares=["n2"])
    ask(job, **{f"_{target}": "test"})
    assert ask(job, **{f"_{target}": "test"}) == {target}
    assert job.coordinator.leaves == {}


def test_a_node_is_drained_while_one_of_its_supervisors_calls_it_unhealthy() -> None:
    job = job_of(2, spares=["n2"])
    job.coordinator.node_health("task 1", [1], "disk full")
    job.coordinator.node_health("task 7", [], "")
    job.coordinator.step()
    assert job.coordinator.leaves == {1: COMMITTED + AHEAD}
    leaves(job, 1)
    assert "disk full" in job.coordinator.deaths[-1].how
    job.coordinator.node_health("task 1", [], "disk still full")
    job.join(9, node="n1")
    assert job.coordinator.waiting() == []
    job.coordinator.node_health("task 1", [9], "")
    job.coordinator.step()
    assert job.coordinator.waiting() == [9]


def test_before_the_first_iteration_nobody_leaves() -> None:
    job = Job(Values(), 1, 0)
    job.join(0, node="n0")
    job.join(1, node="n1")
    ask(job, n0="test")
    assert job.coordinator.leaves == {}
    job.passes(0.2, job.members, 1)
    assert job.coordinator.leaves == {0: 1 + AHEAD}
