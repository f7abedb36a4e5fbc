"""A task of a job over several hosts: runs one rank or spare, or several, and others in their places when they end.

Slurm does not start a task again. So a task is not the rank itself but supervises it.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.moevement import config_file, launch
from megatron.moevement.children import Child, nothing_left_behind
from megatron.moevement.restart.environment import MEMBER_ENV, STORE_ENV
from megatron.moevement.signals import Signals, Stopped
from megatron.moevement.supervisor import Supervisor, is_mistake
from moevement_core.cli.exit_codes import USAGE_ERROR
from moevement_core.errors import ConfigError
from moevement_core.rendezvous.lease import ADDRESS, LeaseClient
from moevement_core.rendezvous.status_page import boot_time_s

POLL_S = 0.05
GRACE_S = 5.0
"""How long processes have to end by themselves when the job has ended."""
LEASES_WITHOUT = 6
"""For how many lease times a task goes on looking for a coordinator that it cannot reach."""


@dataclass(frozen=True)
class Task:
    """Which of the tasks that were started together this is."""

    number: int
    tasks: int
    processes: int = 1
    """That each task runs."""

    @property
    def first(self) -> list[int]:
        """The members that it starts with."""
        return list(range(self.number * self.processes, (self.number + 1) * self.processes))

    def later(self) -> Iterator[int]:
        """Numbers for the processes that it starts later, which no other task has."""
        member = self.tasks * self.processes + self.number
        while True:
            yield member
            member += self.tasks


def supervise(
    argv: list[str], task: Task, spares: int, environment: dict[str, str], *, fresh_interpreters: bool = False
) -> int:
    """Run the processes of a task until the job has ended; returns the exit code.

    It is 0 also where the job was stopped by something else: the coordinator says what, and has the job's exit code.

    Args:
        argv: the script and its arguments.
        task: this one.
        spares: of all processes of all tasks, how many are beyond the job's ranks.
        environment: torch's variables.
        fresh_interpreters: whether each process is a new Python, also where none would have to be.

    Raises:
        ConfigError: there is no coordinator.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    processes = task.tasks * task.processes
    if not 0 <= spares < processes:
        raise ConfigError(f"--spares {spares} of {processes} processes: needs 0 to {processes - 1}")
    lease_s = launch.lease_of(argv)
    common = {
        **environment,
        "WORLD_SIZE": str(processes - spares),
        "LOCAL_WORLD_SIZE": environment.get("LOCAL_WORLD_SIZE", str(task.processes)),
        "OMP_NUM_THREADS": launch.threads(task.processes),
        **launch.gpu_environment(),
        **config_file.environment_of(argv[1:]),
    }
    with tempfile.TemporaryDirectory(prefix="moevement-") as scratch, nothing_left_behind(), Signals() as signals:
        with launch.temporary_files_in(scratch):
            program = launch.program_of(argv, fresh_interpreters=fresh_interpreters)
        client = LeaseClient(f"task {task.number}", _lease_address(), lease_s)
        pages = Path(scratch) / "status"
        pages.mkdir()
        first_local = int(environment.get("LOCAL_RANK", "0")) * task.processes

        def start(member: int, variables: dict[str, str]) -> Child:
            local = first_local + (member % task.processes if member in task.first else 0)
            own = {**common, **variables, "RANK": str(member), MEMBER_ENV: str(member), "LOCAL_RANK": str(local)}
            return Child(f"member_{member}", program, own, None)

        running = _Task(task, client, start, pages)
        try:
            return running.run(signals)
        except Stopped as stopped:
            return 128 + stopped.number
        finally:
            running.end()


class _Task:
    def __init__(self, task: Task, client: LeaseClient, start: Any, pages: Path) -> None:
        self._client, self._task = client, task
        later = task.later()
        self._supervisor = Supervisor(
            task.first, start, lambda: next(later), client, pages, self._on_end, self._on_replaced
        )

    def run(self, signals: Signals) -> int:
        client = self._client
        signals.may_wind_down = True
        while True:
            self._supervisor.step()
            if client.stop is not None:
                self._supervisor.end(GRACE_S)
                return 0
            if client.is_winding_down:
                self._supervisor.wind_down()
            if signals.asked_by is not None:
                client.request("wind_down", f"signal {signals.asked_by} to task {self._task.number}")
                signals.asked_by = None
            if boot_time_s() > client.held_until + LEASES_WITHOUT * client.lease_s:
                print(f"moevement: task {self._task.number}: the coordinator is gone", file=sys.stderr, flush=True)
                return 1
            time.sleep(POLL_S)

    def end(self) -> None:
        """End what still runs, and say goodbye."""
        self._supervisor.end(0.0)
        self._client.close()

    def _on_end(self, member: int, child: Child) -> bool:
        client = self._client
        if client.stop is not None:
            return False
        if is_mistake(child, has_begun=client.generation >= 0):
            why = "found a mistake in the flags" if child.code == USAGE_ERROR else child.how
            client.request("stop", f"member {member} {why}; its output says more", child.code or 1)
            return False
        if child.code == 0:
            return False  # it has come to the end of the job, and the coordinator has, or will
        client.died(member, child.pid, child.how)
        return True

    def _on_replaced(self, member: int, old: Child, new: Child) -> None:
        text = f"member {member} (pid {old.pid}) {old.how}; started pid {new.pid} in its place"
        print(f"moevement: {text}", file=sys.stderr, flush=True)


def _lease_address() -> tuple[str, int]:
    """Where the coordinator's lease server is; waits for the coordinator to be there."""
    from megatron.moevement.restart.store import connect, store_address

    if (address := store_address()) is None:
        raise ConfigError(
            f"--spares under srun needs {STORE_ENV}=HOST:PORT of a moevement coordinate (examples/pretrain_moe/slurm)"
        )
    host, port = connect(address).get(ADDRESS).decode().rsplit(":", 1)
    return host, int(port)
