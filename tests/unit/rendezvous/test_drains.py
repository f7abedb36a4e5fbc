"""Requests to drain a node or a rank: who leaves, when, and where nobody goes until the request is taken back."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from moevement_core.rendezvous.coordinator import State
from moevement_core.rendezvous.drains import AHEAD, ARRIVE_S, HAND_OVER_LEASES, Departure
from moevement_core.rendezvous.notices import NOTICE_S
from moevement_core.rendezvous.roster import INTERRUPTED, NoticedBy
from moevement_core.rendezvous.values import Values, number_of
from moevement_core.run.drain_requests import DrainRequest
from tests.unit.rendezvous.job import Job

COMMITTED, LEASE_S = 7, 10.0


def job_of(ranks: int, spares: Iterable[str] = ()) -> Job:
    """Return a job that trains, with a rank on each node, and spares on the named nodes."""
    job = Job(Values(), ranks, 0, lease_s=LEASE_S)
    for number in range(ranks):
        job.join(number, node=f"n{number}")
    for number, node in enumerate(spares, ranks):
        job.join(number, node=node)
    assert job.coordinator.state is State.RUNNING
    train(job, COMMITTED)
    return job


def train(job: Job, committed: int) -> None:
    """Let the job commit the iteration before ``committed``, and this one 0.2 seconds later."""
    for iteration in (committed - 1, committed):
        job.passes(0.2, job.members, iteration)


def turns(job: Job, committed: int = COMMITTED) -> dict[int, int]:
    """Return the turn of each member that is to leave; all leave at one boundary that none has reached."""
    boundaries = {leave.after for leave in job.coordinator.drains.leaves.values()}
    assert len(boundaries) < 2
    assert all(boundary >= committed + AHEAD for boundary in boundaries)
    return {member: leave.turn for member, leave in job.coordinator.drains.leaves.items()}


def ask(job: Job, **targets: str) -> set[str]:
    asked = {target.removeprefix("_"): DrainRequest(reason) for target, reason in targets.items()}
    done = job.coordinator.drains.request(asked)
    job.coordinator.step()
    return done


def leaves(job: Job, member: int) -> None:
    """Let a member give its rank back, and all others leave the interrupted generation."""
    job.members[member].report_departure(Departure.GIVES_BACK, "rank 0 keeps its state")
    job.coordinator.step()
    job.leave(
        *(other for other in job.coordinator.roster.ranks.values() if other != member), committed=COMMITTED + AHEAD
    )


def test_ranks_of_a_drained_node_leave_at_a_boundary_that_nobody_has_reached() -> None:
    job = job_of(2, spares=["n2"])
    assert job.coordinator.drains.leaves == {}
    ask(job, n1="noisy")
    assert turns(job) == {1: 0}
    leaves(job, 1)
    assert job.coordinator.state is State.RUNNING
    assert job.coordinator.roster.ranks == {0: 0, 1: 2}
    death = job.coordinator.losses.all[-1]
    assert (death.rank, death.noticed_by) == (1, NoticedBy.DRAIN)
    assert "noisy" in death.how
    assert job.coordinator.drains.leaves == {}


def test_nobody_gets_a_rank_on_a_drained_node_until_the_request_is_taken_back() -> None:
    job = job_of(2, spares=["n1", "n2"])
    ask(job, n1="")
    ask(job, n1="test")
    assert job.waiting == [3]
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
    assert job.coordinator.drains.leaves == {}, "the process that has the rank now stays"


def test_without_a_spare_elsewhere_the_drain_waits_and_says_so_once() -> None:
    job = job_of(2, spares=["n1"])
    ask(job, n1="test")
    for _ in range(3):
        job.coordinator.step()
    assert job.coordinator.drains.leaves == {}
    assert sum("spares outside" in line for line in job.reported) == 1
    job.join(9, node="n3")
    job.coordinator.step()
    assert turns(job) == {1: 0}


def test_nodes_are_drained_one_after_the_other() -> None:
    """Two nodes that keep each other's copies must not leave together."""
    job = job_of(3, spares=["n3", "n4"])
    ask(job, n1="test", n2="test")
    assert turns(job) == {1: 0}
    leaves(job, 1)
    assert job.coordinator.drains.leaves == {}, "no iteration was committed since the job was formed"
    train(job, COMMITTED + 30)
    assert turns(job, COMMITTED + 30) == {2: 0}


def test_ranks_of_a_node_leave_together_each_with_its_turn() -> None:
    job = Job(Values(), 2, 0, lease_s=LEASE_S)
    for number, node in enumerate(["n0", "n0", "n1", "n1"]):
        job.join(number, node=node)
    train(job, COMMITTED)
    ask(job, n0="test")
    assert turns(job) == {0: 0, 1: 1}


def departing(turn: int = 0) -> Job:
    """Return a job that drains a node of three ranks, of which member ``turn`` has handed over its state."""
    job = Job(Values(), 4, 0, lease_s=LEASE_S)
    for number, node in enumerate(["n0", "n0", "n0", "n1", "n2", "n2", "n2"]):
        job.join(number, node=node)
    train(job, COMMITTED)
    ask(job, n0="test")
    assert turns(job) == {0: 0, 1: 1, 2: 2}
    job.members[turn].report_departure(Departure.HANDS_OVER)
    job.members[turn].report_departure(Departure.GIVES_BACK, "rank 3 keeps its state")
    job.coordinator.step()
    return job


def is_interrupted(job: Job) -> bool:
    job.coordinator.step()
    return number_of(job.values.read(INTERRUPTED)) >= job.coordinator.roster.generation


def test_the_job_forms_once_when_all_ranks_of_a_node_have_handed_over_their_state() -> None:
    job = departing()
    for member in (1, 2):
        job.members[member].report_departure(Departure.HANDS_OVER)
    for member in (1, 2):
        job.passes(5.0, job.members, COMMITTED)  # longer than a rank that has not arrived is waited for
        assert not is_interrupted(job)
        job.members[member].report_departure(Departure.GIVES_BACK, "rank 3 keeps its state")
    assert is_interrupted(job)
    job.leave(3, committed=COMMITTED + AHEAD)
    assert job.coordinator.roster.ranks == {0: 4, 1: 5, 2: 6, 3: 3}
    assert len(job.coordinator.roster.deaths) == 3


def test_a_rank_that_stays_for_its_turn_is_not_waited_for() -> None:
    job = departing()
    for member in (1, 2):
        assert not is_interrupted(job)
        job.members[member].report_departure(Departure.STAYS)
    assert is_interrupted(job)
    assert job.coordinator.membership.alive.keys() == {1, 2, 3, 4, 5, 6}


def test_a_rank_that_does_not_arrive_is_waited_for_two_seconds_only() -> None:
    job = departing()
    job.passes(ARRIVE_S - 0.1, job.members, COMMITTED)
    assert not is_interrupted(job)
    job.passes(0.2, job.members, COMMITTED)
    assert is_interrupted(job)


def test_a_rank_that_cannot_send_its_state_is_waited_for_three_leases() -> None:
    job = departing()
    for member in (1, 2):
        job.members[member].report_departure(Departure.HANDS_OVER)
    job.coordinator.step()
    job.passes(HAND_OVER_LEASES * LEASE_S - 0.5, job.members, COMMITTED)
    assert not is_interrupted(job)
    job.passes(1.0, job.members, COMMITTED)
    assert is_interrupted(job)


@pytest.mark.parametrize("member", [1, 3])
def test_another_failure_ends_the_wait(member: int) -> None:
    """Kill a rank of the same node that has not handed over its state, or one of another node."""
    job = departing()
    job.coordinator.died(member, 1000 + member, "was killed by signal 9")
    assert is_interrupted(job)
    assert 0 not in job.coordinator.membership.alive, "the rank that has handed over its state is lost at the same time"
    assert 2 in job.coordinator.membership.alive


def test_a_request_that_is_taken_back_waits_for_ranks_that_hand_over_already() -> None:
    job = departing()
    job.members[1].report_departure(Departure.HANDS_OVER)
    ask(job)
    assert not is_interrupted(job)
    job.members[1].report_departure(Departure.GIVES_BACK, "rank 3 keeps its state")
    assert is_interrupted(job)
    assert job.coordinator.membership.alive.keys() == {2, 3, 4, 5, 6}


def test_a_decision_is_taken_back_when_the_spares_are_gone() -> None:
    job = job_of(2, spares=["n2"])
    ask(job, n1="test")
    assert job.coordinator.drains.leaves
    job.coordinator.died(2, 1002, "was killed by signal 9")
    job.coordinator.step()
    assert job.coordinator.drains.leaves == {}


def test_a_job_that_is_winding_down_moves_nobody() -> None:
    job = job_of(2, spares=["n2"])
    ask(job, n1="test")
    job.coordinator.wind_down()
    job.coordinator.step()
    assert job.coordinator.drains.leaves == {}


def test_a_rank_that_another_process_has_by_now_is_not_drained() -> None:
    job = job_of(2, spares=["n2"])
    stale = {"rank:1": DrainRequest("test", pid=4711)}
    job.coordinator.drains.request(stale)
    job.coordinator.step()
    assert (job.coordinator.drains.request(stale), job.coordinator.drains.leaves) == ({"rank:1"}, {})
    job.coordinator.drains.request({"rank:1": DrainRequest("test", pid=1001)})
    job.coordinator.step()
    assert turns(job) == {1: 0}


def test_processes_of_a_drained_node_take_ranks_before_the_job_would_stop() -> None:
    job = job_of(2, spares=["n2"])
    ask(job, n2="test")
    job.coordinator.died(1, 1001, "was killed by signal 9")
    job.leave(0, committed=COMMITTED)
    job.passes(62.0, [0, 2], COMMITTED)
    job.settle()
    assert job.coordinator.state is State.RUNNING
    assert job.coordinator.roster.nodes[1] == "n2"


def test_a_drain_that_is_taken_back_moves_nobody() -> None:
    job = job_of(2, spares=["n2"])
    ask(job, n1="test")
    ask(job)
    assert job.coordinator.drains.leaves == {}


@pytest.mark.parametrize("target", ["2", "rank:2", "99999999999999999999"])
def test_a_rank_that_is_not_there_is_refused_and_forgotten(target: str) -> None:
    job = job_of(2, spares=["n2"])
    ask(job, **{f"_{target}": "test"})
    assert ask(job, **{f"_{target}": "test"}) == {target}
    assert job.coordinator.drains.leaves == {}


def test_a_node_is_drained_while_one_of_its_supervisors_calls_it_unhealthy() -> None:
    job = job_of(2, spares=["n2"])
    job.coordinator.node_health("task 1", [1], "disk full")
    job.coordinator.node_health("task 7", [], "")
    job.coordinator.step()
    assert turns(job) == {1: 0}
    leaves(job, 1)
    assert "disk full" in job.coordinator.losses.all[-1].how
    job.coordinator.node_health("task 1", [], "disk still full")
    job.join(9, node="n1")
    assert job.waiting == []
    job.coordinator.node_health("task 1", [9], "")
    job.coordinator.step()
    assert job.waiting == [9]


def test_before_the_first_iteration_nobody_leaves() -> None:
    job = Job(Values(), 1, 0, lease_s=LEASE_S)
    job.join(0, node="n0")
    job.join(1, node="n1")
    ask(job, n0="test")
    assert job.coordinator.drains.leaves == {}
    job.passes(0.2, job.members, 1)
    assert job.coordinator.drains.leaves == {}, "the pace is not known"
    job.passes(0.2, job.members, 2)
    assert turns(job, 2) == {0: 0}


def test_the_boundary_is_so_far_ahead_that_all_ranks_learn_of_it_before() -> None:
    """Let the job commit 100 iterations per second: within three renewals of a lease it commits 300."""
    job = job_of(2, spares=["n2"])
    for number in range(1, 51):
        job.passes(0.2, job.members, COMMITTED + 20 * number)
    ask(job, n1="test")
    now = COMMITTED + 1000
    assert now + 200 < job.coordinator.drains.leaves[1].after < now + 400


def notice(job: Job, *nodes: int) -> None:
    """Let the supervisors of members on these nodes report that the scheduler takes the nodes away."""
    for number in nodes:
        job.coordinator.node_health(f"task {number}", [number], "SIGUSR1", is_leaving=True)
    job.coordinator.step()


def test_a_node_that_the_scheduler_takes_away_is_drained() -> None:
    job = job_of(2, spares=["n2"])
    notice(job, 1)
    assert turns(job) == {1: 0}
    leaves(job, 1)
    assert "SIGUSR1" in job.coordinator.losses.all[-1].how
    job.passes(2 * NOTICE_S, job.members, COMMITTED + 20)
    assert job.coordinator.end_for_notices() is None, "the ranks have moved"


@pytest.mark.parametrize(("nodes", "spares"), [((0, 1), ["n2"]), ((1,), []), ((1,), ["n1"])])
def test_a_job_whose_ranks_have_nowhere_to_go_ends_once_all_notices_may_have_come(
    nodes: tuple[int, ...], spares: list[str]
) -> None:
    job = job_of(2, spares=spares)
    notice(job, *nodes)
    assert job.coordinator.end_for_notices() is None, "the spares may be on nodes whose notice is still to come"
    job.passes(NOTICE_S, job.members, COMMITTED)
    assert "scheduler" in (job.coordinator.end_for_notices() or "")
    job.coordinator.wind_down()
    assert job.coordinator.end_for_notices() is None


def test_a_rank_that_dies_before_a_job_without_a_place_to_go_ends_is_replaced_on_its_node() -> None:
    job = job_of(2, spares=["n0", "n1"])
    notice(job, 0, 1)
    job.coordinator.died(0, 1000, "was killed by signal 9")
    job.leave(1, committed=COMMITTED)
    assert job.coordinator.state is State.FORMING, "all nodes are drained"
    job.passes(NOTICE_S + 0.2, job.members, COMMITTED)
    assert "scheduler" in (job.coordinator.end_for_notices() or "")
    job.coordinator.wind_down()
    job.settle()
    assert job.coordinator.state is State.RUNNING
    assert job.coordinator.roster.nodes == {0: "n0", 1: "n1"}


def test_a_rank_may_stay_for_its_turn_more_than_once() -> None:
    job = departing()
    for member in (1, 2):
        job.members[member].report_departure(Departure.STAYS)
    assert is_interrupted(job)
    job.leave(1, 2, 3, committed=COMMITTED + AHEAD)
    train(job, COMMITTED + 30)
    assert turns(job, COMMITTED + 30) == {1: 0, 2: 1}
    job.members[1].report_departure(Departure.HANDS_OVER)
    job.members[1].report_departure(Departure.GIVES_BACK, "rank 3 keeps its state")
    job.members[2].report_departure(Departure.STAYS)
    assert is_interrupted(job)


def test_a_scheduler_may_take_away_a_node_that_has_spares_only() -> None:
    job = job_of(2, spares=["n2"])
    notice(job, 2)
    job.passes(2 * NOTICE_S, job.members, COMMITTED)
    assert job.coordinator.end_for_notices() is None
    assert job.waiting == []
