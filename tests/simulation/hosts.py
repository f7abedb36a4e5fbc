"""Simulated nodes with their supervisors and processes, and the host of the coordinator."""

from __future__ import annotations

import signal
from functools import partial
from types import SimpleNamespace
from typing import Any

from moevement_core.launching.supervise import Task as SupervisorTask
from moevement_core.launching.supervise import _Task, answer_of, claim
from moevement_core.rendezvous.coordinator import Coordinator, State
from moevement_core.rendezvous.lease_client import LeaseClient
from moevement_core.rendezvous.lease_server import LeaseServer
from moevement_core.rendezvous.relay import Relay
from moevement_core.rendezvous.roster import STOP
from moevement_core.rendezvous.status_page import PAGE_ENV, StatusPage
from moevement_core.rendezvous.values import Values
from tests.simulation.network import COORDINATOR, Listener
from tests.simulation.rank import TOKEN, RankProcess
from tests.simulation.scenario import Scenario
from tests.simulation.world import Process, World

PORT = 1
RESTART_S = 2.0
"""Seconds from the end of a supervisor to the start of the next one."""


class Child:
    """Process of a rank, as its supervisor handles it."""

    logs = None

    def __init__(self, process: RankProcess) -> None:
        self.process, self.pid, self.label = process, 1000 + process.member, process.name
        self.code: int | None = None
        process.on_end.append(lambda _: setattr(self, "ended", True))
        self.ended = False

    def poll(self) -> int | None:
        if self.code is None and self.ended:
            self.code = self.process.code  # type: ignore[attr-defined]
        return self.code

    def is_stopped(self) -> bool:
        return self.process.is_stopped

    def send(self, number: int) -> None:
        if number == signal.SIGKILL:
            self.process.end()
        elif number == signal.SIGSTOP:
            self.process.stop()
        elif number == signal.SIGCONT:
            self.process.go_on()

    @property
    def how(self) -> str:
        code = self.code or 0
        return f"was killed by signal {-code}" if code < 0 else f"ended with {code}"

    def lines_of(self, _: str) -> list[str]:
        return []


def end_all(children: list[Child]) -> None:
    """End the processes that a supervisor has left, in place of the product's function of this name."""
    for child in children:
        child.process.end()


class NoOrphans:
    """Stand-in for the product's search for orphans. Simulated processes leave none."""

    is_due = False

    def expect(self) -> None:
        """Do nothing when a process has ended."""

    def release_device(self, member: int, started_pids: object) -> bool:
        """Return True, as a simulated process holds no device."""
        return True


class Host:
    """Simulated node with its supervisor and ranks.

    Args:
        job: job that the node belongs to.
        number: index of the node.
    """

    def __init__(self, job: Job, number: int) -> None:
        self.job, self.number, self.name = job, number, f"node{number}"
        self.supervisor: Process | None = None
        self.ranks: list[RankProcess] = []
        self.is_up = True
        self._starts = 0
        self.start()

    def start(self) -> None:
        """Start a supervisor, which starts its processes; do nothing if one lives, or the node is down."""
        if not self.is_up or self.job.is_over or (self.supervisor is not None and self.supervisor.is_alive):
            return
        self._starts += 1
        process = self.supervisor = Process(self.job.world, self.name, f"supervisor of {self.name}")
        process.on_end.append(lambda is_heard: self._supervisor_ended(process, is_heard=is_heard))
        self.job.world.start(process, lambda: self._supervise(process), process.name)

    def _supervise(self, process: Process) -> None:
        job, scenario = self.job, self.job.scenario
        lease = LeaseClient("", (COORDINATOR, PORT), scenario.lease_s, TOKEN)
        task = claim(partial(answer_of, lease), SupervisorTask(self.number, scenario.nodes, scenario.processes))
        lease.name = task.name
        listener: Any = Listener(job.world.network, process, process)
        running = _Task(task, lease, partial(self._start_rank, process), Relay(TOKEN, lease, listener))
        try:
            running.run(SimpleNamespace(check=lambda: None, asked_by=None))  # type: ignore[arg-type]
        finally:
            if not job.world.is_over:
                running.end()
                process.end()

    def _start_rank(self, supervisor: Process, member: int, variables: dict[str, str]) -> Child:
        job = self.job
        process = RankProcess(job.world, self.name, member, job.scenario, supervisor)
        process.environment.update(variables, MOEVEMENT_NODE=self.name)
        process.page = StatusPage(variables[PAGE_ENV])
        process.code = -9  # type: ignore[attr-defined]
        self.ranks.append(process)
        job.members[member] = process
        child = Child(process)
        scenario = job.scenario

        def main() -> None:
            job.world.sleep(job.world.rng.uniform(0.05, scenario.start_s))
            process.code = process.main()  # type: ignore[attr-defined]
            process.end()

        job.world.start(process, main, process.name)
        return child

    def _supervisor_ended(self, process: Process, *, is_heard: bool) -> None:
        for rank in self.ranks:
            rank.end(is_heard=is_heard)
        self.ranks.clear()
        self.job.world.after(RESTART_S, self.start)

    def lose(self, *, is_heard: bool, for_s: float) -> None:
        """End all processes of the node, and boot it again after ``for_s`` seconds."""
        self.is_up = False
        if self.supervisor is not None:
            self.supervisor.end(is_heard=is_heard)
        self.job.world.after(for_s, self._boot)

    def _boot(self) -> None:
        self.is_up = True
        self.start()


class Job:
    """Simulated job: its coordinator and its nodes.

    Args:
        world: simulation that runs the job.
        scenario: shape of the job, and its faults.
    """

    def __init__(self, world: World, scenario: Scenario) -> None:
        self.world, self.scenario = world, scenario
        self.values = Values()
        self.members: dict[int, RankProcess] = {}
        self.process = Process(world, COORDINATOR, "coordinator")
        self.coordinator = Coordinator(
            self.values, scenario.shape.ranks, scenario.spare_timeout_s, lambda text: world.say(f"coordinator: {text}"),
            groups=SimpleNamespace(list_keys=list), lease_s=scenario.lease_s, clock=lambda: world.now,
        )  # fmt: skip
        self.started = -1
        """Newest generation whose ranks have entered training."""
        self.reason: str | None = None
        self.requests: list[str] = []
        listener: Any = Listener(world.network, self.process, PORT)
        self.server = LeaseServer(listener, self.coordinator, TOKEN, self._take_request, self.values)
        world.start(self.process, self._coordinate, "coordinator")
        self.hosts = [Host(self, number) for number in range(scenario.nodes)]

    @property
    def is_over(self) -> bool:
        """True if the coordinator has ended the job."""
        return self.coordinator.state in (State.DONE, State.STOPPED)

    @property
    def is_quiet(self) -> bool:
        """True if the job is over and all supervisors have ended."""
        return self.is_over and not any(host.supervisor is not None and host.supervisor.is_alive for host in self.hosts)

    def _take_request(self, kind: str, why: str, code: int) -> None:
        self.requests.append(f"{kind}: {why}")
        if kind == "stop" and not self.is_over:
            self.coordinator.stop(why)

    def _coordinate(self) -> None:
        """Run the loop of the coordinator, as ``moevement coordinate`` does."""
        deaths, coordinator = 0, self.coordinator
        while not self.is_over:
            self.server.poll(self.world.rng.uniform(0.05, 0.15), self._answer())
            if self.scenario.slow_answers_s:
                self.world.sleep(self.world.rng.uniform(0.0, self.scenario.slow_answers_s))
            coordinator.step()
            for death in coordinator.deaths[deaths:]:
                self.world.say(f"coordinator: member {death.member} (rank {death.rank}) {death.how}")
            deaths = len(coordinator.deaths)
            if coordinator.state is State.RUNNING and coordinator.roster.generation != self.started:
                self.started = coordinator.roster.generation
                self.world.say(f"coordinator: generation {self.started} is formed: {dict(coordinator.roster.ranks)}")
        self.reason = self.values.read(STOP) or ""
        self.world.say(f"coordinator: {coordinator.state.value} {self.reason}")
        while True:
            self.server.poll(0.25, self._answer())

    def _answer(self) -> dict[str, Any]:
        answer: dict[str, Any] = {"generation": self.started, "wind_down": False}
        if self.is_over:
            answer["stop"] = {"reason": self.values.read(STOP) or "", "code": 0}
        return answer
