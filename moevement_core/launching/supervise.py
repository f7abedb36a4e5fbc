"""Task of a job over several hosts: a process that ``srun`` starts on a node, to supervise one or more members there.

A task replaces members that end. Slurm does not restart a task that has ended. So ranks and spares are processes that a
task starts and can replace, and the task itself is not a rank.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any

from moevement_core.comms.address import store_address
from moevement_core.comms.token import HOW, own_token
from moevement_core.errors import ConfigError
from moevement_core.launching import launch
from moevement_core.launching.children import Child, Program, end_all, no_orphans_left
from moevement_core.launching.health_check import HealthCheck
from moevement_core.launching.job_file import coordinator_of, has_ended
from moevement_core.launching.limits import allow_open_files
from moevement_core.launching.signals import Signals, Stopped
from moevement_core.launching.stand_by import stand_by
from moevement_core.launching.supervisor import Supervisor, is_mistake
from moevement_core.launching.worker import TrainerKind
from moevement_core.monitoring.endpoint import SERVED, served_by
from moevement_core.rendezvous.config import HEALTH_CHECK, HEALTH_S, HEALTH_SECONDS, health_seconds
from moevement_core.rendezvous.job_code import KeptScript
from moevement_core.rendezvous.lease_client import LEASES_WITHOUT, LeaseClient
from moevement_core.rendezvous.relay import Relay
from moevement_core.rendezvous.roster import LATE_TASK, RANKS, STORE, TASK
from moevement_core.rendezvous.status_page import boot_time_s
from moevement_core.rendezvous.values import RequestKind
from moevement_core.run.run_record import RunRecord
from moevement_core.util.environment import (
    FIRST_TASK_ENV,
    MEMBER_ENV,
    NODE_ENV,
    REQUEUE_ENV,
    START_ENV,
    STORE_ENV,
    SUPERVISOR_ENV,
    TASKS_ENV,
)
from moevement_core.util.exit_codes import REPLACES_ENV, USAGE_ERROR
from moevement_core.util.file_modes import FLAG, use_file_mode

POLL_S = 0.05
ANSWER_S = 0.01
"""Seconds between two checks for an answer of the coordinator while a task starts."""
GRACE_S = 30.0
"""Longest time in seconds for which a task waits for its processes to end by themselves when the job has ended."""
STANDBY_GRACE_S = 90.0
"""Longest time in seconds for which a task whose job has ended waits for its standby.

The standby may be the coordinator, which still tells other tasks that the job has ended.
"""
TOKEN_PATIENCE_S = 5.0
"""Seconds for which the coordinator refuses a task's connections until the task takes its job token for a wrong one."""
NODE_LEAVES = signal.SIGUSR1
"""Signal to a task by which a scheduler says that it takes the node away. Signals that end a job are others."""
LOOK_S = 5.0
"""Seconds without an answer after which a task looks for a coordinator that has taken over, and looks again."""
REACH_S = 600.0
"""Seconds for which a task tries to reach the coordinator at its start."""
LATE = 1 << 32
"""First member number of the first task that joins later, and the count of numbers that each such task may use."""


@dataclass(frozen=True)
class Task:
    """Identity of a task: its number among the tasks that began with the job, or among those that joined later."""

    number: int
    tasks: int
    """Number of tasks that were started with the job, on all nodes."""
    processes: int = 1
    """Number of processes that each task runs."""
    late: int | None = None
    """Number of this task among the tasks that joined later; None for a task that was started with the job.

    All processes of a task that joined later are spares.
    """

    @property
    def name(self) -> str:
        """Name of the task's supervisor, which no other supervisor of the job has."""
        return f"task {self.number}" if self.late is None else f"late task {self.late}"

    @property
    def first(self) -> list[int]:
        """Member numbers of the processes that the task starts first."""
        begin = self.number * self.processes if self.late is None else LATE * (1 + self.late)
        return list(range(begin, begin + self.processes))

    def later(self) -> Iterator[int]:
        """Return the member numbers for processes that the task starts later; no other task uses these numbers."""
        if self.late is not None:
            return count(self.first[-1] + 1)
        return count(self.tasks * self.processes + self.number, self.tasks)


def task_of(environment: Mapping[str, str], processes: int) -> Task:
    """Return the identity of this task, read from the environment.

    Args:
        environment: torch's variables as derived from Slurm's.
        processes: number of processes that the task runs.
    """
    number, tasks = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    if (first := os.environ.get(FIRST_TASK_ENV)) is not None:  # Here Slurm numbers only the tasks of this node.
        number, tasks = int(first) + number, int(os.environ[TASKS_ENV])
    return Task(number, tasks, processes)


Ask = Callable[[RequestKind, str, str | None], str | None]
"""Function that passes a request on the job's values to the coordinator, and returns the answer."""


def claim(ask: Ask, task: Task) -> Task:
    """Claim the number of ``task``, and return the task.

    If another process has claimed this number, the task counts as one that joins later, and gets the next free number
    among those. So a repaired or added node can join the job with the command that the first nodes used.
    """
    own_claim = f"{socket.gethostname()} {os.getpid()} {secrets.token_hex(8)}"
    if ask(RequestKind.CLAIM, TASK.format(task.number), own_claim) == own_claim:
        return task
    late = next(
        number for number in count() if ask(RequestKind.CLAIM, LATE_TASK.format(number), own_claim) == own_claim
    )
    return replace(task, late=late)


def answer_of(
    client: LeaseClient,
    newest: Callable[[], tuple[str, int] | None],
    kind: RequestKind,
    key: str,
    value: str | None = None,
) -> str | None:
    """Pass a request on the job's values to the coordinator, wait for the answer, and return it.

    Args:
        client: connection to the coordinator.
        newest: returns the address of a coordinator that has taken over; None if none is known.
        kind: kind of the request.
        key: key of the value.
        value: new value; None to read.

    Raises:
        ConfigError: the coordinator cannot be reached, or has another job token, or the job has ended.
    """
    answers: list[str | None] = []
    client.ask(kind, key, value, answers.append)
    began = looked_at = time.monotonic()
    while not answers:
        if time.monotonic() - looked_at > LOOK_S:  # The coordinator at MOEVEMENT_STORE may be lost.
            looked_at = time.monotonic()
            client.look_for(newest())
        client.step((), {})
        if client.stop is not None:
            raise ConfigError(f"the job at {STORE_ENV}={os.environ.get(STORE_ENV)} has ended; start it again")
        waited_s = time.monotonic() - began
        if client.was_refused and waited_s > TOKEN_PATIENCE_S:
            raise ConfigError(
                f"the job at {STORE_ENV}={os.environ.get(STORE_ENV)} has another token than this process; {HOW}"
            )
        if waited_s > REACH_S:
            raise ConfigError(
                f"the coordinator at {STORE_ENV}={os.environ.get(STORE_ENV)} cannot be reached; start it, or correct "
                "the address"
            )
        time.sleep(ANSWER_S)
    return answers[0]


def supervise(
    argv: list[str],
    task: Task,
    spares: int,
    environment: dict[str, str],
    trainer: TrainerKind,
    *,
    fresh_interpreters: bool = False,
) -> int:
    """Run the processes of a task until the job has ended, and return the exit code of the task.

    The exit code is 0 even if the job was stopped. The coordinator reports why, and exits with the job's exit code.

    Args:
        argv: the script and its arguments.
        task: this task.
        spares: number of processes beyond the job's ranks, over all tasks.
        environment: torch's variables.
        trainer: the kind of script.
        fresh_interpreters: True to start each process as a new Python, even where a fork would do.

    Raises:
        ConfigError: there is no coordinator, or its number of ranks is not the number of processes minus the spares.
    """
    argv, variables = launch.read_once(argv)
    lease_s = launch.lease_of(argv)
    launch.refuse_eviction(argv, spares)
    use_file_mode(launch.value_of(argv, FLAG))
    run_dir = launch.run_dir_of(argv)
    record = RunRecord(run_dir) if run_dir is not None else None
    served = served_by(run_dir, lambda flag: launch.value_of(argv, flag))
    client = LeaseClient("", _coordinator(), lease_s, own_token(), started_by=os.environ.get(START_ENV, ""))
    newest = partial(coordinator_of, record)
    ask = partial(answer_of, client, newest)
    if served is not None:  # The coordinator serves the figures, because its host outlives all others.
        ask(RequestKind.SET, SERVED, served.encode())
    ranks, task = int(ask(RequestKind.READ, RANKS) or 0), claim(ask, task)
    client.name = task.name
    _check_spares(task, ranks, spares)
    allow_open_files(ranks)
    relay = Relay(own_token(), client)
    script = KeptScript(argv[0])
    common = {
        **environment,
        **own_token().environment,
        STORE_ENV: ask(RequestKind.READ, STORE) or "",
        SUPERVISOR_ENV: relay.address,
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": environment.get("LOCAL_WORLD_SIZE", str(task.processes)),
        "OMP_NUM_THREADS": launch.threads(task.processes),
        **launch.gpu_environment(trainer, has_spares=True),
        **variables,
        **script.environment,
    }
    running: _Task | None = None
    with (
        tempfile.TemporaryDirectory(prefix="moevement-", ignore_cleanup_errors=True) as scratch,
        no_orphans_left(),
        Signals() as signals,
    ):
        try:
            with launch.temporary_files_in(scratch):
                program = trainer.program(argv, fresh_interpreters=fresh_interpreters)
            signals.check()  # The trainer was imported, and no signal is raised in an import.
            # The import may have taken longer than a lease. No process runs yet, so the leases begin only now.
            client.held_until = boot_time_s() + client.lease_s
            starter = _MemberStarter(task, program, common, int(environment.get("LOCAL_RANK", "0")))
            running = _Task(
                task, client, starter.start, relay=relay, start_standby=partial(_start_standby, client), newest=newest,
                has_ended=lambda: has_ended(record, (client.address, client.other)), health=_health_check(argv),
            )  # fmt: skip
            return running.run(signals)
        except Stopped as stopped:
            return 128 + stopped.number
        finally:
            if running is not None:
                running.end()
            client.close()
            relay.close()
            script.close()
            if running is not None:
                running.end_standby()


def _check_spares(task: Task, ranks: int, spares: int) -> None:
    """Check that the coordinator waits for as many ranks as the tasks that began with the job have."""
    processes = task.tasks * task.processes
    if task.late is None and ranks != processes - spares:
        raise ConfigError(
            f"--spares {spares} of {processes} processes ({task.processes} in each of {task.tasks} tasks), but the "
            f"coordinator waits for {ranks} ranks; give --spares {processes - ranks}"
        )


class _MemberStarter:
    """Starter of the processes of a task, with the program and the environment that they have in common."""

    def __init__(self, task: Task, program: Program, common: dict[str, str], local_task: int) -> None:
        self._task, self._program, self._common = task, program, common
        self._first_local = local_task * task.processes
        self._places: dict[int, int] = {}
        """Place of each process among those of the task, by member."""

    def start(self, member: int, variables: dict[str, str]) -> Child:
        """Start the process of a member. One in place of an ended process has its local rank, and so its device."""
        replaced = self._places.get(int(variables.get(REPLACES_ENV, -1)), 0)
        place = self._places[member] = member % self._task.processes if member in self._task.first else replaced
        own = {"RANK": str(member), MEMBER_ENV: str(member), "LOCAL_RANK": str(self._first_local + place)}
        return Child(f"member_{member}", self._program, {**self._common, **variables, **own}, None)


def _start_standby(client: LeaseClient) -> Child:
    return Child("standby", Program(stand_by, (client.address, client.own_host, own_token())), {}, None)


def _health_check(argv: list[str]) -> HealthCheck | None:
    if (command := launch.value_of(argv, HEALTH_CHECK)) is None:
        return None
    period = launch.value_of(argv, HEALTH_SECONDS)
    period_s = HEALTH_S if period is None else health_seconds(period)
    return HealthCheck(command, os.environ.get(NODE_ENV, socket.gethostname()), period_s=period_s)


def pass_on(signals: Signals, client: LeaseClient, task: str) -> None:
    """Tell the coordinator of a signal: the node leaves, or the job is to end at the next boundary.

    If a node leaves before the job is formed, the job ends. A task may not have heard yet that the job is formed, so it
    first waits for the coordinator's next answer; the caller calls the function again.

    Args:
        signals: handlers with the signal, which the function takes from them once it has acted on it.
        client: client that renews this task's leases.
        task: name of the task, for the user.
    """
    number = signals.asked_by
    assert number is not None
    is_formed, why = client.generation >= 0, f"{signal.Signals(number).name} to {task}"
    if number == NODE_LEAVES and not is_formed and client.heard_at <= signals.asked_at:
        return
    signals.asked_by = None
    if number == NODE_LEAVES and is_formed:
        client.notice(why)
        signals.may_wind_down = True
    else:
        client.request("wind_down", why)


class _Task:
    def __init__(
        self,
        task: Task,
        client: LeaseClient,
        start: Any,
        *,
        relay: Relay,
        start_standby: Callable[[], Child],
        newest: Callable[[], tuple[str, int] | None],
        has_ended: Callable[[], bool] = lambda: False,
        health: HealthCheck | None = None,
    ) -> None:
        self._has_ended, self._health = has_ended, health
        self._client, self._task, self._relay = client, task, relay
        self._start_standby, self._newest = start_standby, newest
        self._standby: Child | None = None
        """Process that stands by for the coordinator, or is the coordinator; None if this task has none."""
        self._is_over = False
        later = task.later()
        self._supervisor = Supervisor(
            first=task.first, start=start, next_member=lambda: next(later), link=client, on_end=self._on_end,
            on_replaced=self._on_replaced, pause=self._pause,
        )  # fmt: skip

    def run(self, signals: Signals) -> int:
        """Supervise the processes until the job has ended; return the exit code of the task."""
        client, looked_at = self._client, -float("inf")
        signals.may_wind_down = True
        while True:
            if self._health is not None and not client.is_leaving:
                self._health.step()
                client.unhealthy = self._health.reason
            self._supervisor.step()
            if client.stop is not None:
                self._is_over = True
                self._supervisor.end(GRACE_S)
                return 0
            self._look_after_standby()
            if boot_time_s() > client.held_until and time.monotonic() - looked_at > LOOK_S:
                looked_at = time.monotonic()
                client.look_for(self._newest())
            if client.is_winding_down:
                self._supervisor.wind_down()
            signals.check()
            if signals.asked_by is not None:
                pass_on(signals, self._client, self._task.name)
            if boot_time_s() > client.held_until + LEASES_WITHOUT * client.lease_s:
                return self._end_without_coordinator()
            self._pause(POLL_S)

    def _look_after_standby(self) -> None:
        client = self._client
        client.has_standby = self._standby is not None and self._standby.poll() is None
        if client.start_standby and client.own_host and not client.has_standby:
            with suppress(OSError):  # The host has no process or memory left; the coordinator asks again.
                self._standby = self._start_standby()
                self._supervisor.others = {self._standby.pid}

    def _end_without_coordinator(self) -> int:
        """End all processes, because the coordinator cannot be reached; return the exit code of the task."""
        self._supervisor.end(0.0)
        if self._has_ended():  # This node was cut off at the end of the job.
            return 0
        print(f"moevement: {self._task.name}: the coordinator cannot be reached", file=sys.stderr, flush=True)
        _ask_slurm_to_requeue()
        return 1

    def end(self) -> None:
        """End the processes that still run, and close the connection to the coordinator."""
        if self._health is not None:
            self._health.close()
        self._supervisor.end(0.0)
        self._client.close()

    def end_standby(self) -> None:
        """Wait until the standby has ended by itself if the job is over, for at most a grace time; then kill it."""
        deadline = time.monotonic() + (STANDBY_GRACE_S if self._is_over else 0.0)
        while self._standby is not None and self._standby.poll() is None and time.monotonic() < deadline:
            time.sleep(POLL_S)
        end_all([] if self._standby is None else [self._standby])

    def _pause(self, seconds: float) -> None:
        """Serve the processes for some seconds; return early when there is something to do."""
        self._relay.poll(seconds, self._client.connection)

    def _on_end(self, member: int, child: Child) -> bool:
        client = self._client
        if client.stop is not None:
            return False
        if is_mistake(child, has_begun=client.generation >= 0, has_trained=client.has_trained):
            why = "found a mistake in the flags" if child.code == USAGE_ERROR else child.how
            client.request("stop", f"member {member} {why}; its output says more", child.code or 1)
            return False
        if child.code == 0:
            return False  # The process has reached the end of the job, and the coordinator learns that from its ranks.
        client.died(member, child.pid, child.how)
        return True

    def _on_replaced(self, member: int, old: Child, new: Child) -> None:
        text = f"member {member} (pid {old.pid}) {old.how}; started pid {new.pid} in its place"
        print(f"moevement: {text}", file=sys.stderr, flush=True)


def _ask_slurm_to_requeue() -> None:
    """Ask Slurm to requeue the job, because the coordinator cannot be reached: its node is probably lost.

    The job cannot go on without the coordinator, but with ``--no-kill`` Slurm does not end the job. Every task sends a
    request, and the first one takes effect. MOEVEMENT_REQUEUE=1 enables the requests.
    """
    job, scontrol = os.environ.get("SLURM_JOB_ID"), shutil.which("scontrol")
    if job and scontrol and os.environ.get(REQUEUE_ENV) == "1":
        subprocess.run([scontrol, "requeue", job], timeout=60, check=False)


def _coordinator() -> tuple[str, int]:
    """Return host and port of the job's coordinator.

    Raises:
        ConfigError: the environment has no address of a coordinator.
    """
    if (address := store_address()) is None:
        raise ConfigError(
            f"--spares under srun needs {STORE_ENV}=HOST:PORT of moevement coordinate (examples/pretrain_moe/slurm)"
        )
    return address
