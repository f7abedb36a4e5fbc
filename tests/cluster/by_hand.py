"""Jobs on a cluster whose coordinator and tasks a test starts itself, without Slurm."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from moevement_core.comms.token import Token
from moevement_core.run.job_entry import JobEntry
from moevement_core.run.run_record import RunRecord
from tests.cluster.cluster import SYSTEM_PATH, Cluster
from tests.cluster.machine import wait_until
from tests.cluster.training import PACED, PP2_EP2, RANKS, SPARSE, Training
from tests.training import flags

PORT = 21000
MOEVEMENT = Path(sys.executable).with_name("moevement")


class StartedByHand:
    """Coordinator and tasks of a job, in place of a job of Slurm.

    Args:
        folder: folder of the logs; the run directory is ``folder/run``.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.record = folder, RunRecord(folder / "run")
        self.output, self.number = folder / "coordinator.log", 0

    def entry(self) -> JobEntry | None:
        """Return the content of ``job.json``; None if it does not exist yet."""
        return self.record.job() if self.record.job_path.exists() else None

    def is_there(self) -> bool:
        """Return True until a coordinator has recorded the end of the job."""
        entry = self.entry()
        return entry is None or entry.ended_at is None

    def state(self) -> str:
        """Return ``COMPLETED`` if the job has ended without an error, as Slurm does."""
        entry = self.entry()
        return "COMPLETED" if entry is not None and entry.code == 0 else f"not completed: {entry}"

    def printed(self, text: str) -> int:
        """Return how often the coordinators and the tasks have printed a text."""
        return sum(log.read_text().count(text) for log in self.folder.glob("*.log"))

    def text(self) -> str:
        """Return what the coordinators and the tasks have printed."""
        return "\n".join(f"-- {log.name}\n{log.read_text()[-6000:]}" for log in sorted(self.folder.glob("*.log")))


class TrainingByHand(Training):
    """Job that trains, with its coordinator; the job's tasks are started without Slurm."""

    job: StartedByHand  # type: ignore[assignment]

    @property
    def _lease_s(self) -> float:
        return float(self._arguments[self._arguments.index("--moevement-lease-seconds") + 1])

    def wait_until_whole(self) -> None:
        """Wait until the job has all its processes on all nodes, as a coordinator knows that has had time to look."""
        time.sleep(2 * self._lease_s)
        whole = {name: int(self._environment["NPROC"]) for name in self.cluster.names}

        def is_whole() -> bool:
            hosts = [process["host"] for process in self.processes() if process["pid"] is not None]
            return {name: hosts.count(name) for name in self.cluster.names} == whole

        self._wait_until(is_whole, "all nodes have their processes", 120.0)

    def wait_for_coordinator(self, before: JobEntry) -> JobEntry:
        """Wait until another coordinator than that of ``before`` has taken over; return the entry of the job."""
        self._wait_until(lambda: self.entry().address != before.address, "a standby takes over", 60.0)
        return self.entry()

    def kill_coordinator(self, number: signal.Signals = signal.SIGKILL) -> JobEntry:
        """Send a signal to the coordinator's process; return the entry of the job at that time."""
        entry = self.entry()
        self.cluster.kill_process(entry.host, entry.pid, number)
        return entry

    def start_task(self, node: str) -> None:
        """Start the task of a node, by the same command as at the beginning of the job."""
        names = self.cluster.names
        self.cluster.machines[node].start(
            MOEVEMENT, "launch", "--nproc", self._environment["NPROC"], "--spares", str(self._spares), PACED,
            *self._arguments, "--run-dir", self.run_dir, log=self.job.folder / f"task_{node}.log",
            environment={
                **self._environment, "SLURM_PROCID": str(names.index(node)), "SLURM_NTASKS": str(len(names)),
                "SLURM_LOCALID": "0",
            },
        )  # fmt: skip


def train_by_hand(cluster: Cluster, folder: Path, processes_per_node: int = 2, **overrides: Any) -> TrainingByHand:
    """Start a job with one task on each node of a cluster, and its coordinator on n1.

    Args:
        processes_per_node: number of ranks and spares on each node.
        overrides: as for :func:`tests.cluster.training.train`.
    """
    arguments = flags(**(SPARSE | PP2_EP2 | overrides))
    spares = processes_per_node * len(cluster.names) - RANKS
    environment = {
        "PATH": f"{Path(sys.executable).parent}:{SYSTEM_PATH}", "HOME": str(Path.home()), "OMP_NUM_THREADS": "1",
        "NPROC": str(processes_per_node), "GLOO_SOCKET_IFNAME": "eth0", "TMPDIR": str(cluster.local),
        "MOEVEMENT_STORE": f"n1:{PORT}", **Token.new().environment,
        **{name: os.environ[name] for name in ("MOEVEMENT_CACHE", "MOEVEMENT_PLATFORM")},
    }  # fmt: skip
    job: Any = StartedByHand(folder)
    training = TrainingByHand(cluster, job, folder / "run", arguments, environment, 1, spares)
    cluster.machines["n1"].start(
        MOEVEMENT, "coordinate", "--ranks", str(RANKS), "--host", "n1", "--port", str(PORT), "--run-dir",
        training.run_dir, log=job.output, environment=environment,
    )  # fmt: skip
    wait_until(lambda: job.output.exists() and "MOEVEMENT_STORE=" in job.text(), "the coordinator listens", job.text)
    for node in cluster.names:
        training.start_task(node)
    return training
