"""Batch script as shipped, on three nodes: jobs end cleanly, fail with a reason, and go on after losses."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from tests.cluster.cluster import SYSTEM_PATH, Cluster
from tests.cluster.training import Training, assert_undisturbed, train
from tests.training import SCRIPT


def test_a_training_on_three_nodes_is_that_of_one_host(cluster: Cluster, tmp_path: Path) -> None:
    training = train(cluster, tmp_path, environment={"SCRIPT": str(SCRIPT)}, tasks_per_node=2)
    training.wait_for_iteration(1)
    assert [training.ranks_on(name) for name in ("n1", "n2", "n3")] == [[0, 1], [2, 3], []]
    training.wait()
    assert_undisturbed(training)


def _last_line(training: Training) -> str:
    return training.job.text().rstrip().splitlines()[-1]


def test_a_mistake_in_the_flags_ends_the_job_with_the_reason_in_its_last_line(cluster: Cluster, tmp_path: Path) -> None:
    training = train(cluster, tmp_path, words=("--num-expert", "4"))
    assert training.job.wait() == "FAILED"
    assert training.job.exit_code() == 2
    assert "--num-expert" in training.job.text()
    assert re.match(r"moevement: .*\bmember \d+\b.*\bflags\b", _last_line(training))


def test_where_moevement_is_not_found_the_job_fails_at_once_and_says_so(cluster: Cluster, tmp_path: Path) -> None:
    training = train(cluster, tmp_path, environment={"PATH": SYSTEM_PATH})
    assert training.job.wait() == "FAILED"
    assert re.match(r"moevement: .*\bPATH\b.*\bn1\b", _last_line(training))


def test_the_first_node_is_lost_and_the_job_goes_on_from_windows_on_disk_by_itself(
    cluster: Cluster, tmp_path: Path
) -> None:
    """Check that a task on another node asks Slurm to queue the job again if the standby is lost, too.

    The first node has the batch script and the coordinator, and the second one the standby.
    """
    windows = str(tmp_path / "windows")
    overrides: dict[str, Any] = {"train_iters": 5000, "moevement_lease_seconds": 2}
    training = train(cluster, tmp_path, moevement_persist_dir=windows, moevement_load=windows, **overrides)
    training.wait_for_iteration(12)
    address = training.wait_for_standby().standby
    assert address.startswith(cluster.addresses["n2"])
    cluster.kill_process("n2", _listener(cluster, "n2", address.rpartition(":")[2]))
    cluster.kill_node("n1")
    cluster.take_down("n1")
    training.job.wait(("PENDING",))
    cluster.restart_node("n1")
    training.wait_for_event("start", 2)
    assert training.events("start")[-1]["iteration"] > 0, "from a window, and not from fresh weights"
    training.wait_for_iteration(training.events("start")[-1]["iteration"] + 10)
    training.end()
    assert_undisturbed(training, **overrides)


def _listener(cluster: Cluster, node: str, port: str) -> int:
    """Return the id, on its node, of the process that listens at a port."""
    match = re.search(r"pid=(\d+)", cluster.machines[node].run("ss", "-ltnpH", "sport", "=", f":{port}"))
    assert match is not None
    return int(match[1])


def test_a_rank_that_dies_on_a_healthy_node_is_replaced_there(cluster: Cluster, tmp_path: Path) -> None:
    """Check that a new process on n2 takes the rank, and not one of the two spares on n3.

    Ranks 2 and 3 exchange tokens in every layer, so they should stay on one node.
    """
    training = train(cluster, tmp_path, tasks_per_node=2)
    training.wait_for_iteration(5)
    at = training.kill_rank(2)
    training.wait()
    print(f"training stood still for {training.outage(at):.1f} s")
    assert_undisturbed(training)
    (failure,) = training.events("failure")
    assert failure["failures"][0].startswith("rank 2 ")
    assert training.nodes_of(2, 3) == ["n2", "n2"]
    assert training.events("groups_split") == []


def test_a_signal_to_every_process_of_a_job_ends_it_in_order(cluster: Cluster, tmp_path: Path) -> None:
    """Check a signal by ``scancel``. Only supervisors act on it, but ranks and spares receive it at the same time."""
    overrides: dict[str, Any] = {"train_iters": 5000}
    training = train(cluster, tmp_path, **overrides)
    training.wait_for_iteration(6)
    least = training.iteration()
    training.job.cancel("--signal=TERM")
    training.wait()
    at = int(training.record.summary()["iterations"])
    assert at >= least
    assert training.events("failure") == []
    assert_undisturbed(training, **overrides)
