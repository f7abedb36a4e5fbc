"""Jobs that lose nodes resume within seconds, and end with the bits of a job that lost none.

A lost node resets its connections or falls silent. The coordinator and ranks 0 and 1 are on n1, ranks 2 and 3 on n2,
and spares on n3. A repaired node takes part again when the command that started the job's tasks starts tasks there. The
tests print the seconds of each recovery; benchmarks/cluster.md has those that were measured on idle cores. Every wait
fails after two minutes, so that a test fails if the job waits for a timeout of ten minutes.
"""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest

from moevement_core.storage.manifest import manifests
from tests.cluster.cluster import Cluster
from tests.cluster.machine import wait_until
from tests.cluster.training import PP4, Training, assert_undisturbed, train
from tests.training import SCRIPT

LEASE_S = 5.0
FLAGS: dict[str, Any] = {"train_iters": 5000, "moevement_lease_seconds": LEASE_S}


def _lose(training: Training, how: str, node: str) -> dict[str, object]:
    """Lose a node and wait for the next iteration; return the event of the failure."""
    cluster = training.cluster
    at = {
        "killed": cluster.kill_node, "power lost": cluster.lose_power, "cut off": cluster.cut_link,
        "frozen": cluster.freeze_node,
    }[how](node)  # fmt: skip
    seconds = training.resumes_after(at)
    failure = training.events("failure")[-1]
    print(f"{node} {how}: next iteration after {seconds:.1f} s; {failure['noticed_by']}; {failure['parts']}")
    return failure


def _assert_only_lost_ranks_replayed(failure: dict[str, object]) -> None:
    recovery = failure["recovery"]
    assert isinstance(recovery, dict)
    assert {stage for stage, count in recovery["replayed_by_stage"].items() if count} == {"1"}, failure["scope"]


@pytest.mark.full
def test_a_node_killed_and_another_that_loses_power(cluster: Cluster, tmp_path: Path) -> None:
    """Check both losses in a job with one task per rank. The test adds the first node again before the second loss."""
    training = train(cluster, tmp_path, tasks_per_node=2, **FLAGS)
    training.wait_for_iteration(12)
    loud = _lose(training, "killed", "n2")
    assert "reset" in str(loud["noticed_by"])
    _assert_only_lost_ranks_replayed(loud)
    assert training.ranks_on("n3") == [2, 3]
    cluster.restart_node("n2")
    training.add_node("n2")
    training.wait_for_spares(2)
    silent = _lose(training, "power lost", "n3")
    assert "lease" in str(silent["noticed_by"])
    _assert_only_lost_ranks_replayed(silent)
    assert training.ranks_on("n2") == [2, 3]
    cluster.take_down("n3")  # otherwise Slurm waits for n3 at the end of the job, until its own timeout
    training.end()
    assert_undisturbed(training, **FLAGS)
    assert len(training.events("failure")) == 2
    assert "Traceback" not in training.job.text()


def test_a_node_that_is_booted_again_before_slurm_has_missed_it(cluster: Cluster, tmp_path: Path) -> None:
    """Check that only the job step of the lost node breaks, and that the node starts spares without a command.

    Each node has one task.
    """
    training = train(cluster, tmp_path, **FLAGS)
    training.wait_for_iteration(6)
    silent = _lose(training, "power lost", "n2")
    assert "lease" in str(silent["noticed_by"])
    _assert_only_lost_ranks_replayed(silent)
    cluster.restart_node("n2")
    training.wait_for_spares(2)
    assert {process["host"] for process in training.processes() if process["role"] == "spare"} == {"n2"}
    loud = _lose(training, "killed", "n3")
    assert "reset" in str(loud["noticed_by"])
    _assert_only_lost_ranks_replayed(loud)
    assert training.ranks_on("n2") == [2, 3]
    cluster.take_down("n3")  # otherwise Slurm waits for n3 at the end of the job, until its own timeout
    training.end()
    assert_undisturbed(training, **FLAGS)
    assert len(training.events("failure")) == 2
    assert "Traceback" not in training.job.text()


def test_a_node_that_is_cut_off_and_back(cluster: Cluster, tmp_path: Path) -> None:
    """Check that a cut shorter than the lease changes nothing, and that a longer one replaces the node.

    The replaced node stops its processes. After the cut it starts new processes, which wait as spares.
    """
    training = train(
        cluster, tmp_path, moevement_persist_dir=str(tmp_path / "windows"), moevement_load=str(tmp_path / "windows"),
        **FLAGS,
    )  # fmt: skip
    training.wait_for_iteration(6)
    cluster.cut_link("n2")
    time.sleep(LEASE_S * 0.5)
    cluster.mend_link("n2")
    training.wait_for_iteration(training.iteration() + 10)
    assert training.events("failure") == [], "silent for less than the lease"

    failure = _lose(training, "cut off", "n2")
    assert "lease" in str(failure["noticed_by"])
    assert training.ranks_on("n3") == [2, 3]
    before = training.iteration()
    cluster.mend_link("n2")
    training.wait_for_spares(2)
    assert {process["host"] for process in training.processes() if process["role"] == "spare"} == {"n2"}
    training.wait_for_iteration(before + 10)
    assert len(training.events("failure")) == 1, "its return interrupts nobody"

    _lose(training, "frozen", "n3")
    assert training.ranks_on("n2") == [2, 3]
    cluster.thaw_node("n3")
    training.wait_for_spares(2)
    training.end()
    assert_undisturbed(training, **FLAGS)
    assert len(training.events("failure")) == 2
    jobs = {path.stem.rsplit("_", 1)[1] for path in (tmp_path / "windows").glob("window_*.json")}
    assert len(jobs) == 1, "one writer of windows, whoever was cut off"


def test_spares_that_are_lost_and_a_slow_link_stop_nobody(cluster: Cluster, tmp_path: Path) -> None:
    """Check that snapshots which the link cannot carry are left out and logged, and that later ones are sent."""
    overrides = FLAGS | {"moe_ffn_hidden_size": 384}  # much to snapshot, little to train with
    training = train(cluster, tmp_path, environment={"SCRIPT": str(SCRIPT)}, **overrides)
    training.wait_for_iteration(6)
    training.wait_for_spares(2)  # The job begins without them.
    cluster.kill_node("n3")
    cluster.slow_link("n2", 4.0)

    def newest(metric: str) -> int:
        return int((training.record.newest_metric() or {})[metric])

    wait_until(lambda: newest("windows_abandoned") > 0, "a window is abandoned", training.everything)
    assert newest("replication_lag") > 0
    assert re.search(r"\bWARNING rank \d+: iteration \d+\b.*\babandoned\b", training.job.text())
    cluster.slow_link("n2", None)

    def wait_for_a_fresh_window() -> None:
        """Wait until all ranks have persisted a window that begins after this call.

        An earlier window may still be abandoned. The lag in the metrics would not do: it is the lag of one rank.
        """
        begins_after = training.iteration()

        def is_fresh() -> bool:
            persisted_from = (training.record.newest_metric() or {})["persisted_from"]
            return persisted_from is not None and persisted_from > begins_after

        wait_until(is_fresh, "a window of the mended link is persisted", training.everything)

    # Snapshots from before the repair still leave beside the first such window, and may fill the memory once more.
    for _ in range(2):
        wait_for_a_fresh_window()
    abandoned = newest("windows_abandoned")
    training.wait_for_iteration(training.iteration() + 12)
    assert newest("windows_abandoned") == abandoned
    cluster.take_down("n3")
    training.end()
    assert training.events("failure") == []
    assert_undisturbed(training, **overrides)
    assert re.search(r"\bspare \(pid \d+\)", training.job.text())


def test_two_nodes_at_once_and_two_with_all_copies_of_a_rank(six_nodes: Cluster, tmp_path: Path) -> None:
    """Check the loss of two nodes at once, and later of two nodes that hold a rank and all copies of its snapshots.

    Each rank is a stage and has its own node. The copies of a rank's snapshots are on the node of the next rank.
    """
    windows = str(tmp_path / "windows")
    overrides = FLAGS | PP4
    training = train(
        six_nodes,
        tmp_path,
        **overrides,
        nodes=6,
        processes_per_node=1,
        moevement_persist_dir=windows,
        moevement_load=windows,
    )
    training.wait_for_iteration(12)
    first = _lose_both(training, 1, 3)
    assert re.findall(r"\d+", first["scope"]) == ["1", "3", "4"], "stages that lost their state, and of how many"
    assert first["recovery"]["ranks"] == [1, 3], "only they roll back"
    training.wait_for_spares(2)
    training.wait_for_iteration(training.iteration() + 10)
    second = _lose_both(training, 1, 2)
    (fallback,) = training.events("recovery_from_disk")
    assert re.search(rf"\b{fallback['until']}\b.*\b{fallback['window']}\b", fallback["text"])
    assert re.findall(r"\d+", second["scope"]) == ["1", "2", "4"]
    assert second["recovery"]["ranks"] == [0, 1, 2, 3], "all stages roll back"
    training.end()
    assert_undisturbed(training, **overrides)
    assert fallback["text"] in training.record.summary()["checkpointing"]["warnings"]
    assert len(training.events("failure")) == 2


@pytest.mark.full
def test_a_node_lost_and_then_that_of_its_replacement(six_nodes: Cluster, tmp_path: Path) -> None:
    """Check that the second spare takes over if the node of the first spare is lost during the recovery."""
    overrides = FLAGS | PP4
    training = train(six_nodes, tmp_path, **overrides, nodes=6, processes_per_node=1)
    training.wait_for_iteration(12)
    (first,) = training.nodes_of(3)
    six_nodes.kill_node(first)
    others = [f"n{number}" for number in range(1, 7) if f"n{number}" != first]

    def replacements() -> list[str]:
        return [node for node in others if training.ranks_on(node) == [3]]

    wait_until(lambda: bool(replacements()), "rank 3 has a replacement", training.everything)
    (second,) = replacements()
    seconds = training.resumes_after(six_nodes.kill_node(second))
    failure = training.events("failure")[-1]
    print(f"{first}, then {second} killed: next iteration after {seconds:.1f} s; {failure['parts']}")
    lost = [re.match(r"rank (\d+)\b", cause) for cause in (*failure["earlier"], *failure["failures"])]
    assert [match and match[1] for match in lost] == ["3", "3"]
    for node in (first, second):
        six_nodes.take_down(node)
    training.end()
    assert_undisturbed(training, **overrides)


def _lose_both(training: Training, *ranks: int) -> dict[str, Any]:
    """Lose the nodes of two ranks at once, one with resets and one in silence. Boot both when the job has resumed."""
    loud, silent = nodes = training.nodes_of(*ranks)
    cluster = training.cluster
    cluster.kill_node(loud)
    seconds = training.resumes_after(cluster.lose_power(silent))
    failure = training.events("failure")[-1]
    print(f"{nodes} lost: next iteration after {seconds:.1f} s; {failure['noticed_by']}; {failure['parts']}")
    for node in nodes:
        cluster.restart_node(node)
    return failure


def test_a_node_lost_while_a_window_is_written_and_another_in_a_dense_save(cluster: Cluster, tmp_path: Path) -> None:
    windows, saves = tmp_path / "windows", tmp_path / "dense"
    training = train(
        cluster, tmp_path, **FLAGS, moevement_persist_dir=str(windows), moevement_load=str(windows), save=str(saves),
        save_interval=30, ckpt_format="torch_dist",
    )  # fmt: skip
    training.wait_for_iteration(6)

    def unfinished() -> list[str]:
        folders = {path.name for path in windows.glob("window_*") if path.is_dir()}
        return sorted(folders - {manifest.name for manifest in manifests(windows)})

    wait_until(lambda: bool(unfinished()), "a window is written", poll_s=0.001)
    torn = unfinished()[-1]
    _lose(training, "killed", "n2")
    print(f"{torn} was being written")
    cluster.restart_node("n2")
    training.wait_for_spares(2)

    saved = [path.name for path in saves.glob("iter_*")]
    wait_until(
        lambda: len(list(saves.glob("iter_*"))) > len(saved), "a dense save", training.everything,
        poll_s=0.001,
    )  # fmt: skip
    (newest,) = {path.name for path in saves.glob("iter_*")} - set(saved)
    tracker = saves / "latest_checkpointed_iteration.txt"
    assert not tracker.exists() or int(tracker.read_text()) < int(newest.removeprefix("iter_"))
    _lose(training, "killed", "n3")
    training.wait_for_iteration(int(newest.removeprefix("iter_")) + 12)
    assert int(tracker.read_text()) >= int(newest.removeprefix("iter_"))
    cluster.take_down("n3")
    training.end()
    assert_undisturbed(training, **FLAGS)
    left = {path.name for path in windows.glob("window_*") if path.is_dir()}
    assert torn not in left, "what a lost node left of a window is deleted with the next ones"
    assert left == {manifest.name for manifest in manifests(windows)}


@pytest.mark.full
def test_copies_travel_over_the_interfaces_of_their_ranks(cluster: Cluster, tmp_path: Path) -> None:
    """Check that copies of local rank 0 use eth0, as training does, and those of local rank 1 use eth1 alone.

    Each rank sends with two streams.
    """
    cluster.add_interfaces()
    training = train(cluster, tmp_path, moevement_interfaces="eth0,eth1", moevement_streams=2, **FLAGS)
    training.wait_for_iteration(12)
    first = {node: cluster.sent_bytes(node, "eth1") for node in ("n1", "n2")}
    training.wait_for_iteration(training.iteration() + 9)
    for node, nbytes in first.items():
        assert cluster.sent_bytes(node, "eth1") - nbytes > 100_000, "three windows of a rank"
    _lose(training, "killed", "n2")
    cluster.take_down("n2")
    training.end()
    assert_undisturbed(training, **FLAGS)


@pytest.mark.full
def test_a_node_lost_during_the_recovery_from_another(cluster: Cluster, tmp_path: Path) -> None:
    training = train(
        cluster, tmp_path, **FLAGS, moevement_window=6, words=("--moevement-inject", "rank=2,phase=replay")
    )
    training.wait_for_iteration(12)
    _lose(training, "killed", "n2")
    cluster.take_down("n2")
    training.end()
    assert_undisturbed(training, **FLAGS)
