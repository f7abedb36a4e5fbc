"""Test the cluster that other tests use: its names, links, failures and Slurm. It must leave nothing behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.cluster.cluster import Cluster
from tests.cluster.machine import wait_until
from tests.cluster.slurm import Job
from tests.limits import HANGS_S

PORT = 5000
# Server that sends every byte back.
_ECHO = f"""
import socket, threading
def answer(connection):
    while data := connection.recv(1 << 16):
        connection.sendall(data)
server = socket.create_server(("", {PORT}))
while True:
    threading.Thread(target=answer, args=(server.accept()[0],), daemon=True).start()
"""


@contextmanager
def connection(cluster: Cluster, name: str, to: str) -> Iterator[socket.socket]:
    """Yield a connection from a node to the echo server of another node.

    The socket belongs to the node's network, but the caller, which is outside of it, can use the socket.
    """
    opened: list[socket.socket | OSError] = []

    def connect() -> None:
        namespace = os.open(cluster.machines[name].network, os.O_RDONLY)
        try:
            os.setns(namespace, os.CLONE_NEWNET)  # for this thread only
            opened.append(socket.create_connection((cluster.addresses[to], PORT), timeout=2))
        except OSError as error:
            opened.append(error)
        finally:
            os.close(namespace)

    thread = threading.Thread(target=connect)
    thread.start()
    thread.join()
    if isinstance(opened[0], OSError):
        raise opened[0]
    with opened[0] as stream:
        yield stream


def start_echo(cluster: Cluster, name: str) -> None:
    machine = cluster.machines[name]
    machine.start(sys.executable, "-c", _ECHO, log=machine.own / "echo.log")

    def answers() -> bool:
        try:
            with connection(cluster, "head", name):
                return True
        except ConnectionRefusedError:
            return False

    wait_until(answers, "the echo listens", (machine.own / "echo.log").read_text)


def echo(stream: socket.socket, data: bytes = b"x") -> None:
    stream.sendall(data)
    got = b""
    while len(got) < len(data):
        more = stream.recv(1 << 16)
        assert more, "the connection was closed"
        got += more
    assert got == data


def batch(cluster: Cluster, folder: Path, body: str, *flags: str, nodes: int = 3, tasks_per_node: int = 1) -> Job:
    script = folder / "job.sh"
    script.write_text(f"#!/usr/bin/env bash\n{body}\n")
    return cluster.submit(
        script, (), {"ASKED": "yes"}, *flags, nodes=nodes, tasks_per_node=tasks_per_node, output=folder / "job.out",
        folder=folder,
    )  # fmt: skip


def test_nodes_have_names_and_disks_of_their_own_and_reach_each_other(cluster: Cluster) -> None:
    for name in cluster.names:
        assert cluster.machines[name].run("hostname").strip() == name
        cluster.machines[name].run("bash", "-c", f"echo {name} > {cluster.local}/mine")
    for name in cluster.names:
        assert cluster.machines[name].run("cat", cluster.local / "mine").strip() == name
    assert cluster.machines["n1"].run("getent", "hosts", "n2").split() == ["10.77.0.2", "n2"]
    start_echo(cluster, "n2")
    with connection(cluster, "n1", "n2") as stream:
        echo(stream)


def test_a_cut_link_is_silence(cluster: Cluster) -> None:
    start_echo(cluster, "n2")
    with connection(cluster, "n1", "n2") as stream:
        echo(stream)
        cluster.cut_link("n2")
        stream.settimeout(1.5)
        with pytest.raises(TimeoutError):
            echo(stream)
        with pytest.raises(TimeoutError), connection(cluster, "n1", "n2"):
            pass
        cluster.mend_link("n2")
        stream.settimeout(10)
        assert stream.recv(1) == b"x"  # data that was sent meanwhile arrives


def test_a_killed_node_resets_its_connections(cluster: Cluster) -> None:
    start_echo(cluster, "n2")
    with connection(cluster, "n1", "n2") as stream:
        echo(stream)
        cluster.kill_node("n2")
        stream.settimeout(1)
        assert stream.recv(1) == b""
        stream.sendall(b"x")  # the node answers this with a reset
        time.sleep(0.2)
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            stream.sendall(b"x")
    with pytest.raises(ConnectionRefusedError), connection(cluster, "n1", "n2"):
        pass
    cluster.restart_node("n2")
    start_echo(cluster, "n2")


def test_a_node_without_power_is_silent_and_keeps_its_disk(cluster: Cluster) -> None:
    start_echo(cluster, "n2")
    cluster.machines["n2"].run("touch", cluster.local / "kept")
    with connection(cluster, "n1", "n2") as stream:
        echo(stream)
        cluster.lose_power("n2")
        stream.settimeout(1.5)
        with pytest.raises(TimeoutError):
            echo(stream)
        assert not cluster.machines["n2"].processes()
        cluster.restart_node("n2")
        stream.settimeout(10)
        with pytest.raises(ConnectionResetError):  # after its reboot the node does not know the connection
            stream.recv(1)
    cluster.machines["n2"].run("test", "-e", cluster.local / "kept")


def test_a_frozen_node_accepts_and_does_not_answer(cluster: Cluster) -> None:
    start_echo(cluster, "n2")
    with connection(cluster, "n1", "n2") as stream:
        echo(stream)
        cluster.freeze_node("n2")
        stream.settimeout(1)
        with pytest.raises(TimeoutError):
            echo(stream)
        with connection(cluster, "n1", "n2"):
            pass
        cluster.thaw_node("n2")
        assert stream.recv(1) == b"x"


def test_a_slow_link_has_about_its_rate(cluster: Cluster) -> None:
    start_echo(cluster, "n2")
    seconds = dict[float | None, float]()
    for rate in (None, 16.0, None):
        cluster.slow_link("n2", rate)
        with connection(cluster, "n1", "n2") as stream:
            stream.settimeout(10)
            began = time.monotonic()
            for _ in range(16):
                echo(stream, bytes(1 << 17))
            seconds[rate] = time.monotonic() - began
    assert 1 < seconds[16.0] < 5, seconds  # 2 MiB there and back, at once or one after the other: 1.05 to 2.1 s
    assert seconds[None] < seconds[16.0] / 2, seconds


def test_a_job_runs_on_all_nodes(cluster: Cluster, tmp_path: Path) -> None:
    job = batch(cluster, tmp_path, 'echo "$ASKED"; srun --label hostname')
    assert job.wait() == "COMPLETED"
    assert job.text().splitlines()[0] == "yes"
    assert sorted(job.text().splitlines()[1:]) == ["0: n1", "1: n2", "2: n3"]
    failing = batch(cluster, tmp_path, "exit 3")
    assert failing.wait() == "FAILED"
    assert failing.exit_code() == 3


def test_a_task_is_killed_with_or_without_what_it_started(cluster: Cluster, tmp_path: Path) -> None:
    job = batch(
        cluster, tmp_path, "srun --no-kill --kill-on-bad-exit=0 bash -c 'sleep 8; true'", nodes=1, tasks_per_node=3
    )
    started = [task_on(cluster, "n1", index, "bash") for index in range(3)]
    sleeps = [task.children()[0] for task in started]
    cluster.kill_task("n1", 2)
    assert sleeps[2].wait(HANGS_S) is None
    cluster.kill_task("n1", 1, alone=True)
    assert started[1].wait(HANGS_S) is None
    assert sleeps[1].is_running()
    assert started[0].is_running()
    job.cancel()
    assert job.wait() == "CANCELLED"


def task_on(cluster: Cluster, name: str, index: int, program: str) -> psutil.Process:
    """Return a task as soon as it runs its program."""

    def runs() -> bool:
        try:
            task = cluster.task(name, index)
            return task.name() == program and (program != "bash" or bool(task.children()))
        except (ProcessLookupError, psutil.Error):
            return False

    wait_until(runs, f"{name} has task {index}")
    return cluster.task(name, index)


def test_what_slurm_does_when_a_job_loses_a_node(cluster: Cluster, tmp_path: Path) -> None:
    """Check that with ``--no-kill`` a job outlives every node, even the first.

    The batch script is lost with the first node, so a task on another node has to ask Slurm to queue the job again.
    """
    job = batch(
        cluster, tmp_path, "echo restarts: ${SLURM_RESTART_COUNT:-0}\n"
        "srun --no-kill --kill-on-bad-exit=0 sleep 60 &\n"
        "until [ -e stop ]; do sleep 0.2; done; kill %1", "--no-kill", "--requeue", "--open-mode=append",
    )  # fmt: skip
    task_on(cluster, "n1", 0, "sleep")
    cluster.kill_node("n2")
    cluster.take_down("n2")
    assert job.fields()["NodeList"] == "n[1,3]"
    assert job.state() == "RUNNING"
    cluster.restart_node("n2")
    cluster.kill_node("n1")
    cluster.take_down("n1")
    cluster.restart_node("n1")
    time.sleep(1)
    assert job.fields()["NodeList"] == "n3"
    assert job.state() == "RUNNING"
    configuration = {**os.environ, "SLURM_CONF": str(cluster.folder / "slurm.conf")}
    cluster.machines["n3"].run("scontrol", "requeue", str(job.number), environment=configuration)
    job.wait(["PENDING"])
    job.wait(["RUNNING"])
    (tmp_path / "stop").touch()
    job.wait()
    assert [line for line in job.text().splitlines() if "restarts" in line] == ["restarts: 0", "restarts: 1"]


def test_nothing_is_left_of_two_clusters_at_once(cluster: Cluster, tmp_path: Path) -> None:
    with Cluster(nodes=1) as other:
        assert other.states() == {"n1": "idle"}
        assert cluster.states()["n1"] == "idle"
        folder, pids = other.folder, processes_with(other.folder)
        batch(other, tmp_path, "srun sleep 60", nodes=1).wait(["RUNNING"])
        assert pids
    assert not folder.exists()
    assert not processes_with(folder)
    assert [pid for pid in pids if psutil.pid_exists(pid)] == []


def test_nothing_runs_on_when_pytest_is_killed(cluster: Cluster) -> None:
    program = (
        "import time; from tests.cluster.cluster import Cluster\n"
        "with Cluster(nodes=1) as c: print(c.folder, flush=True); time.sleep(60)"
    )
    owner = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    with owner:
        folder = Path(owner.stdout.readline().strip())
        assert processes_with(folder)
        owner.send_signal(signal.SIGKILL)
        owner.wait()
    wait_until(lambda: not processes_with(folder), "its processes end")
    assert folder.exists()
    with Cluster(nodes=1):
        assert not folder.exists(), "the next cluster removes what a killed one left"


def processes_with(folder: Path) -> list[int]:
    """Return the ids of processes that have a folder's name in their command line or environment."""
    pids = []
    for process in psutil.process_iter():
        try:
            if str(folder) in " ".join([*process.cmdline(), *process.environ().values()]):
                pids.append(process.pid)
        except psutil.Error:
            continue
    return pids
