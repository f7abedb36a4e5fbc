"""Jobs outlive their coordinator: its process is killed or frozen, and its node is cut off or loses its power."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.by_hand import TrainingByHand, train_by_hand
from tests.cluster.cluster import Cluster
from tests.cluster.machine import wait_until
from tests.cluster.training import assert_undisturbed, train

LEASE_S = 2
LOSSES = 20


def test_the_coordinator_is_killed_then_frozen_and_then_lost_with_its_ranks(cluster: Cluster, tmp_path: Path) -> None:
    flags: dict[str, Any] = {"train_iters": 100_000, "moevement_lease_seconds": LEASE_S}
    training = train_by_hand(cluster, tmp_path, **flags)
    training.wait_for_iteration(4)  # If nothing was trained yet, a lost rank restarts the job, and is no failure.
    training.wait_for_standby()
    first = training.kill_coordinator()
    second = training.wait_for_coordinator(first)
    training.wait_for_standby()
    training.kill_coordinator(signal.SIGSTOP)
    third = training.wait_for_coordinator(second)
    cluster.kill_process(second.host, second.pid, signal.SIGCONT)
    training.wait_for_standby()
    while not training.ranks_on(third.host):
        third = training.wait_for_coordinator(training.kill_coordinator())
        training.wait_for_standby()
    assert training.events("failure") == [], "no rank was interrupted"
    training.resumes_after(cluster.lose_power(third.host))
    training.wind_down()
    training.wait()
    assert_undisturbed(training, **flags)
    assert training.job.printed("taken over") == 1, "of the frozen one"


def test_under_slurm_the_standby_takes_over_and_the_batch_script_waits_for_the_end(
    cluster: Cluster, tmp_path: Path
) -> None:
    flags: dict[str, Any] = {"train_iters": 60, "moevement_lease_seconds": LEASE_S}
    training = train(cluster, tmp_path, **flags)
    before = training.wait_for_standby()
    cluster.kill_process(before.host, before.pid)
    training.wait()
    assert_undisturbed(training, **flags)
    assert training.entry().host != before.host
    assert training.events("failure") == [], "no rank was interrupted"


def test_under_slurm_a_job_outlives_its_first_node_and_leaves_no_allocation(cluster: Cluster, tmp_path: Path) -> None:
    flags: dict[str, Any] = {"train_iters": 100_000, "moevement_lease_seconds": LEASE_S}
    training = train(cluster, tmp_path, "--no-kill", **flags)
    training.wait_for_iteration(4)
    before = training.wait_for_standby()
    assert before.host == "n1"
    assert training.ranks_on("n1")
    training.resumes_after(cluster.lose_power("n1"))
    training.wind_down()
    cluster.take_down("n1")
    wait_until(lambda: not training.job.is_there(), "the Slurm job ends", training.everything)
    assert training.entry().code == 0
    assert_undisturbed(training, **flags)


def test_all_tasks_learn_of_the_end_of_a_job_whose_coordinator_is_killed_then(cluster: Cluster, tmp_path: Path) -> None:
    flags: dict[str, Any] = {"train_iters": 40, "moevement_lease_seconds": LEASE_S}
    training = train_by_hand(cluster, tmp_path, **flags)
    training.wait_for_standby()
    training.wait_for_iteration(40)
    training.kill_coordinator()
    training.wait()
    assert_undisturbed(training, **flags)
    time.sleep(7 * LEASE_S)
    assert training.job.printed("be reached") == 0


@pytest.mark.full
@pytest.mark.parametrize("seed", [1, 2])
def test_the_coordinator_is_lost_many_times_in_a_row(cluster: Cluster, tmp_path: Path, seed: int) -> None:
    """Lose the coordinator in ways that a seed determines, also during a recovery from the death of a rank."""
    draw = random.Random(seed)
    flags: dict[str, Any] = {"train_iters": 100_000, "moevement_lease_seconds": LEASE_S}
    training = train_by_hand(cluster, tmp_path, **flags)
    training.wait_for_iteration(4)
    for number in range(LOSSES):
        training.wait_until_whole()
        before = training.wait_for_standby()
        how = draw.choice(HOW)
        time.sleep(draw.uniform(0.0, 1.0))
        began = time.time()
        _lose(training, how, draw)
        newest = training.iteration()
        training.wait_for_coordinator(before)
        taken_after_s = time.time() - began
        training.wait_for_iteration(newest + 3)
        seconds = training.outage(began)
        print(f"loss {number + 1}: {how}; taken over {taken_after_s:.1f} s later; no commit for {seconds:.1f} s")
        _mend(training, how, before.host, before.pid)
    training.wind_down()
    training.wait()
    assert_undisturbed(training, **flags)


HOW = ("killed", "frozen", "cut off", "power lost", "killed after a rank")


def _lose(training: TrainingByHand, how: str, draw: random.Random) -> None:
    """Lose the coordinator of a job, and perhaps a rank shortly before it."""
    host = training.entry().host
    if how == "cut off":
        training.cluster.cut_link(host)
    elif how == "power lost":
        training.cluster.lose_power(host)
    elif how == "frozen":
        training.kill_coordinator(signal.SIGSTOP)
    else:
        if how == "killed after a rank":
            training.kill_rank(draw.randrange(4))
            time.sleep(draw.uniform(0.0, 2.0))
        training.kill_coordinator()


def _mend(training: TrainingByHand, how: str, host: str, pid: int) -> None:
    """Undo what :func:`_lose` did to the coordinator's host, so that the job has all its nodes again."""
    if how == "cut off":
        training.cluster.mend_link(host)
    elif how == "power lost":
        training.cluster.restart_node(host)
        training.start_task(host)
    elif how == "frozen":
        training.cluster.kill_process(host, pid, signal.SIGCONT)
