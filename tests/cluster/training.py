"""Training under Slurm with the batch script as shipped: four ranks on n1 and n2, two spares on n3."""

from __future__ import annotations

import json
import os
import signal
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

from moevement_core.comms.token import Token
from moevement_core.run.run_record import RunRecord
from moevement_core.run.verify import compare
from tests.cluster.cluster import SYSTEM_PATH, Cluster
from tests.cluster.machine import wait_until
from tests.cluster.slurm import Job
from tests.failure_free import failure_free_until
from tests.launching import logs
from tests.limits import HANGS_S
from tests.training import ROOT, flags

SBATCH = ROOT / "examples" / "pretrain_moe" / "slurm" / "pretrain.sbatch"
RANKS, PROCESSES_PER_NODE, SPARES = 4, 2, 2
PACED = Path(__file__).with_name("paced.py")

PP2_EP2: dict[str, Any] = {
    "pipeline_model_parallel_size": 2, "expert_model_parallel_size": 2, "use_distributed_optimizer": True, "bf16": True,
}  # fmt: skip
"""n1 has the first stage, n2 the second."""
PP4: dict[str, Any] = {
    "pipeline_model_parallel_size": 4, "expert_model_parallel_size": 1, "use_distributed_optimizer": False,
    "bf16": False,
}  # fmt: skip
"""Each node has two neighbouring stages, or, with a process for each node, one."""
SPARSE: dict[str, Any] = {
    "moevement_sparse_ckpt": True, "moevement_window": 3, "moevement_replicas": 1, "train_iters": 20,
}  # fmt: skip

# Whoever compares two runs gives both the same number of threads.
_THREADS = {"OMP_NUM_THREADS": "1"}


class Training:
    """A job that trains, and its run directory."""

    def __init__(
        self,
        cluster: Cluster,
        job: Job,
        run_dir: Path,
        arguments: list[str],
        environment: dict[str, str],
        tasks_per_node: int,
        spares: int | str,
    ) -> None:
        self.cluster, self.job, self.record = cluster, job, RunRecord(run_dir)
        self._tasks_per_node, self._spares = tasks_per_node, spares
        self._arguments, self._environment = arguments, environment
        self._joined = 0

    @property
    def run_dir(self) -> Path:
        return self.record.folder

    def iteration(self) -> int:
        """The newest that was committed; 0 before the first."""
        newest = self.record.newest_metric()
        return int(newest["iteration"]) if newest else 0

    def wait_for_iteration(self, iteration: int, timeout_s: float = HANGS_S) -> None:
        """Wait until it is committed.

        Raises:
            TimeoutError: it was not within the time, or the job has ended; the message has all logs.
        """
        self._wait_until(lambda: self.iteration() >= iteration, f"iteration {iteration} is committed", timeout_s)

    def wait_for_event(self, kind: str, count: int = 1, timeout_s: float = HANGS_S) -> list[dict[str, Any]]:
        """Wait until there are ``count`` events of a kind and return them."""
        self._wait_until(lambda: len(self.events(kind)) >= count, f"there is event {kind} {count} times", timeout_s)
        return self.events(kind)

    def wait(self, timeout_s: float = HANGS_S) -> None:
        """Wait for the end; it has to be a good one.

        Raises:
            TimeoutError: there was none within the time.
        """
        self._wait_until(lambda: not self.job.is_there(), "the job ends", timeout_s)
        assert self.job.state() == "COMPLETED", f"job {self.job.state()}\n{self.everything()}"

    def end(self, timeout_s: float = HANGS_S) -> int:
        """Ask the batch script to end the job in order, as Slurm does before it takes nodes away; returns where."""
        self.job.cancel("--signal=USR1", "--batch")
        self.wait(timeout_s)
        return int(self.record.summary()["iterations"])

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Of ``events.jsonl``, in the order written."""
        return [event for event in self.record.events() if event["event"] == kind]

    def processes(self) -> list[dict[str, Any]]:
        """``ranks.json``: ``rank``, ``pid`` on its node, ``host``, ``node`` and ``role`` of each process."""
        path = self.record.ranks_path
        return list(json.loads(path.read_text())) if path.exists() else []

    def node_of(self, rank: int) -> str:
        """The node that has a rank now."""
        return str(self._process(rank)["host"])

    def ranks_on(self, node: str) -> list[int]:
        """The ranks that a node has now; spares are none."""
        return [one["rank"] for one in self.processes() if one["host"] == node and one["role"] == "active"]

    def nodes_of(self, *ranks: int) -> list[str]:
        """The nodes that have these ranks now."""
        return [self.node_of(rank) for rank in ranks]

    def kill_rank(self, rank: int, number: signal.Signals = signal.SIGKILL) -> float:
        """Send a signal to the process that has a rank now; returns when."""
        process = self._process(rank)
        return self.cluster.kill_process(process["host"], process["pid"], number)

    def add_node(self, node: str) -> None:
        """Start tasks on a node that was repaired, by the command that the first ones were started with."""
        for number in range(self._tasks_per_node):
            self._joined += 1
            port = 20000 + self.job.number % 20000
            environment = {
                **self._environment, "MOEVEMENT_STORE": f"n1:{port}", "HOME": str(Path.home()),
                "SLURM_PROCID": str(number), "SLURM_NTASKS": str(self._tasks_per_node), "SLURM_LOCALID": str(number),
            }  # fmt: skip
            log = self.run_dir.parent / f"added_{self._joined}.log"
            moevement = Path(sys.executable).with_name("moevement")
            self.cluster.machines[node].start(
                moevement, "launch", "--nproc", environment["NPROC"], "--spares", str(self._spares),
                environment["SCRIPT"], *self._arguments, "--run-dir", self.run_dir, log=log, environment=environment,
            )  # fmt: skip

    def wait_for_spares(self, count: int, timeout_s: float = HANGS_S) -> None:
        """Wait until so many processes wait to take over a rank."""
        self._wait_until(
            lambda: sum(one["role"] == "spare" for one in self.processes()) >= count, f"there are {count} spares",
            timeout_s,
        )  # fmt: skip

    def resumes_after(self, at: float, timeout_s: float = HANGS_S) -> float:
        """Wait for the first iteration that is committed by training after a failure; returns the seconds since it.

        Args:
            at: when it happened, in seconds since the epoch.
        """

        def times() -> list[float]:
            # What was committed already, and only not written down, is marked.
            return [line["time"] for line in self.record.metrics() if line["time"] > at and not line.get("recovered")]

        self._wait_until(lambda: _later(self, at), "a recovery", timeout_s)
        resumed_at = self.events("failure")[-1]["resumed_at"]
        self._wait_until(lambda: any(time > resumed_at for time in times()), "training goes on", timeout_s)
        return min(time for time in times() if time > resumed_at) - at

    def outage(self, since: float) -> float:
        """The longest that nothing was committed after a moment, in seconds.

        Not until the next commit: that may be of an iteration whose gradients were already reduced at that moment.
        """
        times = [since, *(line["time"] for line in self.record.metrics() if line["time"] > since)]
        return float(max(later - earlier for earlier, later in pairwise(times)))

    def everything(self) -> str:
        """What the job printed and the ends of all logs, for whoever reads why a test failed."""
        return f"== {self.job.output.name}\n{self.job.text()[-8000:]}\n{logs(self.run_dir)}"

    def _process(self, rank: int) -> dict[str, Any]:
        return next(one for one in self.processes() if one["rank"] == rank)

    def _wait_until(self, holds: Any, what: str, timeout_s: float) -> None:
        # The state of the job is asked for rarely: each time is a process more on cores that are busy.
        looks = 0

        def look() -> bool:
            nonlocal looks
            looks += 1
            if holds():
                return True
            if looks % 40 == 0 and not self.job.is_there() and not holds():
                raise TimeoutError(f"the job is {self.job.state()} before {what}\n{self.everything()}")
            return False

        wait_until(look, what, self.everything, timeout_s=timeout_s)


def train(
    cluster: Cluster,
    folder: Path,
    *sbatch_flags: str,
    environment: dict[str, str] | None = None,
    nodes: int = 3,
    processes_per_node: int = PROCESSES_PER_NODE,
    tasks_per_node: int = 1,
    spares: int | str = SPARES,
    words: tuple[str, ...] = (),
    **overrides: Any,
) -> Training:
    """Submit a training; its run directory is ``folder/run``.

    Args:
        sbatch_flags: like ``--requeue``.
        environment: of the shell that submits, beyond what every training here has.
        nodes: how many the job has.
        processes_per_node: ranks and spares on each.
        tasks_per_node: tasks that start them; one that starts several imports everything once and forks them.
        spares: how many of the processes; ``none`` for a job that ends with its first failure.
        words: further flags of the training.
        overrides: of :data:`tests.training.TINY`, :data:`SPARSE` and :data:`PP2_EP2`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    arguments = [*flags(**(SPARSE | PP2_EP2 | overrides)), *words]
    shell = {
        "PATH": f"{Path(sys.executable).parent}:{SYSTEM_PATH}", "RUN_DIR": str(folder / "run"), "SPARES": str(spares),
        "NPROC": str(processes_per_node // tasks_per_node), "SCRIPT": str(PACED), **Token.new().environment,
        "GLOO_SOCKET_IFNAME": "eth0", "TMPDIR": str(cluster.local), **_THREADS, **(environment or {}),
        **{name: os.environ[name] for name in ("MOEVEMENT_CACHE", "MOEVEMENT_PLATFORM")},
    }  # fmt: skip
    job = cluster.submit(
        SBATCH, arguments, shell, *sbatch_flags, nodes=nodes, tasks_per_node=tasks_per_node, output=folder / "job.out",
        folder=ROOT,
    )  # fmt: skip
    return Training(cluster, job, folder / "run", arguments, shell, tasks_per_node, spares)


def _later(training: Training, at: float) -> bool:
    return any(failure["time"] > at for failure in training.events("failure"))


def failure_free(last: int, *, ranks: int = RANKS, **overrides: Any) -> RunRecord:
    """Return the record of a failure-free run of the same layout on this host that ends after iteration ``last``."""
    return failure_free_until(last, ranks, **(SPARSE | PP2_EP2 | overrides))


def assert_undisturbed(training: Training, **overrides: Any) -> None:
    """Assert that a job that has ended has the bits of one to which nothing happened, and each iteration once.

    Args:
        overrides: as for :func:`train`; those that change what is computed matter.
    """
    verdict = compare(failure_free(int(training.record.summary()["iterations"]), **overrides), training.record)
    assert verdict.equal, f"{verdict.first_difference}\n{training.everything()}"
    iterations = [line["iteration"] for line in training.record.metrics()]
    assert iterations == sorted(set(iterations))
