"""The manifest for Kubernetes is valid, and its commands run a job that survives the loss of a node's pod."""

from __future__ import annotations

import copy
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from kubeflow_trainer_api.models import JobsetV1alpha2JobSet

from moevement_core.comms.token import Token
from moevement_core.run.run_record import RunRecord
from tests.failure_free import digest_of, failure_free_digest
from tests.functional.jobs import SPARSE
from tests.training import ROOT, SCRIPT, TINY

MANIFEST = ROOT / "examples" / "kubernetes" / "jobset.yaml"
JOB = SPARSE | {"pipeline_model_parallel_size": 2, "train_iters": 24}
WITHOUT = {"run_dir", "moevement_sparse_ckpt"}
"""Flags that the manifest gives itself."""
LIMIT_S = 200.0
_NAMED = ("unshare", "--uts", "--map-root-user", "sh", "-c", 'hostname "$0" && exec "$@"')
"""Command that runs another command on a host of another name, as each pod has its own."""


def manifest() -> dict[str, Any]:
    loaded = yaml.safe_load(MANIFEST.read_text())
    assert isinstance(loaded, dict)
    return loaded


def not_understood(content: Any, understood: Any, path: str = "") -> Iterator[str]:
    """Yield the paths of fields that Kubernetes' types do not have, or read as something else."""
    if isinstance(content, dict):
        for name, value in content.items():
            if not isinstance(understood, dict) or name not in understood:
                yield f"{path}/{name}"
            else:
                yield from not_understood(value, understood[name], f"{path}/{name}")
    elif isinstance(content, list):
        if not isinstance(understood, list) or len(understood) != len(content):
            yield path
        else:
            for number, (value, other) in enumerate(zip(content, understood, strict=True)):
                yield from not_understood(value, other, f"{path}/{number}")
    elif content != understood:
        yield path


def wrong_fields(content: dict[str, Any]) -> list[str]:
    read = JobsetV1alpha2JobSet.from_dict(copy.deepcopy(content))
    return list(not_understood(content, read.to_dict() if read is not None else None))


def pods(name: str, content: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the specification of the Job of a replicated job."""
    jobs = (content or manifest())["spec"]["replicatedJobs"]
    (job,) = [job["template"]["spec"] for job in jobs if job["name"] == name]
    assert isinstance(job, dict)
    return job


def container(name: str) -> dict[str, Any]:
    (only,) = pods(name)["template"]["spec"]["containers"]
    assert isinstance(only, dict)
    return only


def test_every_field_is_one_of_kubernetes() -> None:
    assert wrong_fields(manifest()) == []


@pytest.mark.parametrize(
    ("change", "path"),
    [
        (lambda job: job.update(backofLimit=1), r"/backofLimit$"),
        (lambda job: job["template"]["spec"].update(restartPolcy="Never"), r"/restartPolcy$"),
        (lambda job: job["template"]["spec"]["containers"][0].update(commands=["a"]), r"/containers/0/commands$"),
    ],
)
def test_a_field_that_kubernetes_does_not_have_is_noticed(change: Any, path: str) -> None:
    content = copy.deepcopy(manifest())
    change(pods("nodes", content))
    wrong = wrong_fields(content)
    assert wrong
    assert all(re.search(path, each) for each in wrong)


def test_numbers_and_names_agree() -> None:
    content = manifest()
    assert (content["apiVersion"], content["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    values = {name: variables(name, {}, index=0) for name in ("coordinator", "nodes", "spares")}
    nodes, spares = pods("nodes")["completions"], pods("spares")["completions"]
    assert [pods(name)["parallelism"] for name in ("nodes", "spares")] == [nodes, spares]
    nproc = int(values["nodes"]["NPROC"])
    assert int(values["coordinator"]["RANKS"]) == nodes * nproc
    assert {int(values[name]["SPARES"]) for name in ("nodes", "spares")} == {spares * nproc}
    assert {values[name]["MOEVEMENT_TASKS"] for name in ("nodes", "spares")} == {str(nodes + spares)}
    assert [values[name]["MOEVEMENT_FIRST_TASK"] for name in ("nodes", "spares")] == ["0", str(nodes)]
    name = content["metadata"]["name"]
    assert values["nodes"]["MOEVEMENT_STORE"] == f"{name}-coordinator-0-0.{name}:{values['coordinator']['PORT']}"
    devices = container("nodes")["resources"]["limits"]["nvidia.com/gpu"]
    assert devices == nproc
    assert container("spares")["args"] == container("nodes")["args"]


def test_the_job_recovers_by_itself_before_kubernetes_starts_it_again() -> None:
    content = manifest()["spec"]
    assert content["successPolicy"]["targetReplicatedJobs"] == ["coordinator"]
    assert content["failurePolicy"]["maxRestarts"] > 0
    assert pods("coordinator")["backoffLimit"] == 0
    for name in ("nodes", "spares"):
        assert pods(name)["backoffLimit"] > 1000
        assert pods(name)["template"]["spec"]["restartPolicy"] == "OnFailure"


def variables(name: str, replaced: Mapping[str, str], index: int) -> dict[str, str]:
    """Return the variables of a container as Kubernetes computes them, with some values replaced."""
    values: dict[str, str] = {}
    for entry in container(name)["env"]:
        text = entry.get("value")
        if text is None:
            source = entry["valueFrom"]
            by_path = {"status.podIP": "127.0.0.1"}
            text = by_path.get(source.get("fieldRef", {}).get("fieldPath"), str(index))
        values[entry["name"]] = expanded(replaced.get(entry["name"], text), values)
    return values


def expanded(text: str, values: Mapping[str, str]) -> str:
    """Replace ``$(NAME)`` by the variable of this name, as Kubernetes does in commands, arguments and values."""
    return re.sub(r"\$\((\w+)\)", lambda match: values.get(match[1], match[0]), text)


class Cluster:
    """Containers of the manifest as processes of this machine: two nodes of one rank, and one node with a spare."""

    def __init__(self, folder: Path, iterations: int) -> None:
        self.folder, self.record = folder, RunRecord(folder / "run")
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = str(free.getsockname()[1])
        config = folder / "job.yaml"
        flags = TINY | {key.replace("_", "-"): value for key, value in JOB.items() if key not in WITHOUT}
        flags["train-iters"] = iterations
        config.write_text(yaml.safe_dump({key: value for key, value in flags.items() if value is not None}))
        self._replaced = {
            "RANKS": "2", "NPROC": "1", "SPARES": "1", "PORT": port, "RUN_DIR": str(self.record.folder),
            "SCRIPT": str(SCRIPT), "CONFIG": str(config), "WINDOWS": f"file://{folder}/windows", "HEALTH_CHECK": "true",
            "MOEVEMENT_STORE": f"127.0.0.1:{port}", "MOEVEMENT_TASKS": "3", "SLURM_NTASKS": "3",
            "GLOO_SOCKET_IFNAME": "lo", **Token.new().environment,
        }  # fmt: skip
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self, name: str, index: int = 0) -> subprocess.Popen[bytes]:
        """Run the command of a container."""
        first = {"MOEVEMENT_FIRST_TASK": "2"} if name == "spares" else {}
        values = variables(name, self._replaced | first, index)
        words = [expanded(word, values) for word in (*container(name)["command"], *container(name)["args"])]
        environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", **values}
        with (self.folder / f"{name}_{index}.log").open("ab") as log:
            process = subprocess.Popen(
                [*_NAMED, f"{name}-0-{index}", str(ROOT / words[0]), *words[1:]], cwd=ROOT, env=environment, stdout=log,
                stderr=log, start_new_session=True,
            )  # fmt: skip
        self._processes.append(process)
        return process

    def start_all(self) -> tuple[subprocess.Popen[bytes], list[subprocess.Popen[bytes]]]:
        coordinator = self.start("coordinator")
        return coordinator, [self.start("nodes", 0), self.start("nodes", 1), self.start("spares")]

    def wait_for(self, iteration: int) -> None:
        """Wait until the job has committed an iteration."""
        deadline = time.monotonic() + LIMIT_S
        while (self.record.newest_metric() or {"iteration": 0})["iteration"] < iteration:
            assert time.monotonic() < deadline, self.text()
            time.sleep(0.02)

    def text(self) -> str:
        return "\n".join(f"-- {path.name}\n{path.read_text()[-3000:]}" for path in sorted(self.folder.glob("*.log")))

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.record.events() if event["event"] == kind]

    def end(self) -> None:
        for process in self._processes:
            kill(process)


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a container's process and all its descendants, as the loss of a pod does."""
    if process.poll() is None:
        parent = psutil.Process(process.pid)
        for each in (parent, *parent.children(recursive=True)):
            if each.is_running():
                each.kill()
    process.wait(20)


@contextmanager
def cluster_of(folder: Path, iterations: int) -> Iterator[Cluster]:
    cluster = Cluster(folder, iterations)
    try:
        yield cluster
    finally:
        cluster.end()


@pytest.mark.slow("processes of four containers start")
def test_the_pod_of_a_node_is_lost_and_the_job_goes_on(tmp_path: Path) -> None:
    wanted = failure_free_digest(2, **JOB)
    with cluster_of(tmp_path, JOB["train_iters"]) as cluster:
        coordinator, (node, *others) = cluster.start_all()
        cluster.wait_for(8)
        kill(node)
        cluster.start("nodes", 0)  # as restartPolicy OnFailure does; on a slow machine the job ends before it joins
        assert coordinator.wait(LIMIT_S) == 0, cluster.text()
        assert [process.wait(60) for process in others] == [0, 0], cluster.text()
        assert digest_of(cluster.record) == wanted
        assert len(cluster.events("failure")) == 1
        assert len(cluster.events("start")) == 1, "the job started over"


@pytest.mark.slow("processes of four containers start")
def test_sigterm_to_a_pod_drains_its_node_and_to_the_coordinator_asks_for_a_restart(tmp_path: Path) -> None:
    with cluster_of(tmp_path, 2000) as cluster:
        coordinator, (node, *_) = cluster.start_all()
        cluster.wait_for(5)
        node.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + LIMIT_S
        while not cluster.events("failure"):
            assert time.monotonic() < deadline, cluster.text()
            time.sleep(0.05)
        (moved,) = cluster.events("failure")
        assert moved["recovery"]["replayed"] == 0
        coordinator.send_signal(signal.SIGTERM)
        assert coordinator.wait(LIMIT_S) == 128 + signal.SIGTERM, cluster.text()
        assert cluster.record.summary()["iterations"] < 2000
