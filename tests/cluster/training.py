"""Job that trains under Slurm with the batch script as shipped: four ranks on n1 and n2, two spares on n3."""

from __future__ import annotations

import json
import os
import signal
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

from moevement_core.comms.token import Token
from moevement_core.run.job_entry import JobEntry
from moevement_core.run.run_record import RunRecord
from moevement_core.run.verify import compare
from tests.cluster.cluster import SYSTEM_PATH, Cluster
from tests.cluster.machine import send, wait_until
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
"""Flags of a layout in which n1 has the first stage and n2 the second."""
PP4: dict[str, Any] = {
    "pipeline_model_parallel_size": 4, "expert_model_parallel_size": 1, "use_distributed_optimizer": False,
    "bf16": False,
}  # fmt: skip
"""Flags of a layout in which a node has two neighbouring stages, or one stage if it has one process."""
SPARSE: dict[str, Any] = {
    "moevement_sparse_ckpt": True, "moevement_window": 3, "moevement_replicas": 1, "train_iters": 20,
}  # fmt: skip

# Two runs that are compared need the same number of threads.
_THREADS = {"OMP_NUM_THREADS": "1"}


class Training:
    """Job that trains, with its cluster and its run directory."""

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
        """Return the newest iteration that was committed; 0 before the first."""
        newest = self.record.newest_metric()
        return int(newest["iteration"]) if newest else 0

    def wait_for_iteration(self, iteration: int, timeout_s: float = HANGS_S) -> None:
        """Wait until ``iteration`` is committed.

        Raises:
            TimeoutError: the time is over, or the job has ended; the message has all logs.
        """
        self._wait_until(lambda: self.iteration() >= iteration, f"iteration {iteration} is committed", timeout_s)

    def wait_for_event(self, kind: str, count: int = 1, timeout_s: float = HANGS_S) -> list[dict[str, Any]]:
        """Wait until there are ``count`` events of a kind; return all of them."""
        self._wait_until(lambda: len(self.events(kind)) >= count, f"there is event {kind} {count} times", timeout_s)
        return self.events(kind)

    def wait(self, timeout_s: float = HANGS_S) -> None:
        """Wait until the job ends, and check that it has completed.

        Raises:
            TimeoutError: the job has not ended within the time.
        """
        self._wait_until(lambda: not self.job.is_there(), "the job ends", timeout_s)
        assert self.job.state() == "COMPLETED", f"job {self.job.state()}\n{self.everything()}"

    def end(self, timeout_s: float = HANGS_S) -> int:
        """Ask the batch script to end the job, as Slurm does before it takes nodes away; return the last iteration."""
        self.job.cancel("--signal=USR1", "--batch")
        self.wait(timeout_s)
        return int(self.record.summary()["iterations"])

    def wind_down(self) -> None:
        """Ask a task on any node that is left to let the job save and end; unlike :meth:`end`, do not wait for it."""
        pids = (pid for name in self.cluster.names for pid in self.cluster.machines[name].tasks())
        send(next(pids), signal.SIGUSR2)

    def entry(self) -> JobEntry:
        """Return the content of ``job.json``."""
        entry = self.record.job()
        assert entry is not None
        return entry

    def wait_for_standby(self) -> JobEntry:
        """Wait until a standby may take over from the coordinator; return the content of ``job.json``."""
        self._wait_until(lambda: self.record.job_path.exists() and self.entry().standby, "there is a standby", HANGS_S)
        return self.entry()

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Return the events of a kind from ``events.jsonl``, in the order written."""
        return [event for event in self.record.events() if event["event"] == kind]

    def processes(self) -> list[dict[str, Any]]:
        """Return ``ranks.json``: ``rank``, ``pid`` on its node, ``host``, ``node`` and ``role`` of each process."""
        path = self.record.ranks_path
        return list(json.loads(path.read_text())) if path.exists() else []

    def node_of(self, rank: int) -> str:
        """Return the node that has a rank now."""
        return str(self._process(rank)["host"])

    def ranks_on(self, node: str) -> list[int]:
        """Return the ranks that a node has now, without spares."""
        return [
            process["rank"] for process in self.processes() if process["host"] == node and process["role"] == "active"
        ]

    def nodes_of(self, *ranks: int) -> list[str]:
        """Return the nodes that have these ranks now."""
        return [self.node_of(rank) for rank in ranks]

    def kill_rank(self, rank: int, number: signal.Signals = signal.SIGKILL) -> float:
        """Send a signal to the process that has a rank now; return when it was sent."""
        process = self._process(rank)
        return self.cluster.kill_process(process["host"], process["pid"], number)

    def add_node(self, node: str) -> None:
        """Start tasks on a repaired node, by the command that started the first tasks."""
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
        """Wait until ``count`` processes wait to take over a rank."""
        self._wait_until(
            lambda: sum(process["role"] == "spare" for process in self.processes()) >= count,
            f"there are {count} spares", timeout_s,
        )  # fmt: skip

    def resumes_after(self, at: float, timeout_s: float = HANGS_S) -> float:
        """Wait for the first iteration that is trained and committed after a failure; return the seconds until then.

        Args:
            at: time of the failure, in seconds since the epoch.
        """

        def times() -> list[float]:
            # Lines with ``recovered`` are of iterations that were committed before the failure; they were only written
            # later.
            return [line["time"] for line in self.record.metrics() if line["time"] > at and not line.get("recovered")]

        self._wait_until(lambda: _later(self, at), "a recovery", timeout_s)
        resumed_at = self.events("failure")[-1]["resumed_at"]
        self._wait_until(lambda: any(time > resumed_at for time in times()), "training goes on", timeout_s)
        return min(time for time in times() if time > resumed_at) - at

    def outage(self, since: float) -> float:
        """Return the longest time after ``since`` in which nothing was committed, in seconds.

        The time to the next commit would not do: it may commit an iteration whose gradients were already reduced.
        """
        times = [since, *(line["time"] for line in self.record.metrics() if line["time"] > since)]
        return float(max(later - earlier for earlier, later in pairwise(times)))

    def everything(self) -> str:
        """Return the output of the job and the ends of all logs, to explain why a test failed."""
        return f"== {self.job.output.name}\n{self.job.text()[-8000:]}\n{logs(self.run_dir)}"

    def _process(self, rank: int) -> dict[str, Any]:
        return next(process for process in self.processes() if process["rank"] == rank)

    def _wait_until(self, holds: Any, goal: str, timeout_s: float) -> None:
        # Ask for the state of the job rarely, because each time starts a process on busy cores.
        looks = 0

        def look() -> bool:
            nonlocal looks
            looks += 1
            if holds():
                return True
            if looks % 40 == 0 and not self.job.is_there() and not holds():
                raise TimeoutError(f"the job is {self.job.state()} before {goal}\n{self.everything()}")
            return False

        wait_until(look, goal, self.everything, timeout_s=timeout_s)


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
    """Submit a job that trains; its run directory is ``folder/run``.

    Args:
        sbatch_flags: flags of ``sbatch``, like ``--requeue``.
        environment: variables of the shell that submits, beyond those that every job here has.
        nodes: number of nodes of the job.
        processes_per_node: number of ranks and spares on each node.
        tasks_per_node: number of tasks that start them; a task that starts several imports all modules once and forks.
        spares: number of spares among the processes; ``none`` for a job that ends with its first failure.
        words: further flags of the training.
        overrides: changes of :data:`tests.training.TINY`, :data:`SPARSE` and :data:`PP2_EP2`.
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
    """Assert that an ended job has the bits of an undisturbed job, and that its record has each iteration once.

    Args:
        overrides: as for :func:`train`; only those that change what is computed matter.
    """
    verdict = compare(failure_free(int(training.record.summary()["iterations"]), **overrides), training.record)
    assert verdict.equal, f"{verdict.first_difference}\n{training.everything()}"
    iterations = [line["iteration"] for line in training.record.metrics()]
    assert iterations == sorted(set(iterations))
