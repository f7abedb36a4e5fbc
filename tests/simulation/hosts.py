"""Simulated nodes with their supervisors and processes, and the host of the coordinator."""

from __future__ import annotations

import signal
from functools import partial
from types import SimpleNamespace
from typing import Any

from moevement_core.comms.address import address_of
from moevement_core.errors import ConfigError
from moevement_core.launching.coordinate import GRACE_S
from moevement_core.launching.supervise import Task as SupervisorTask
from moevement_core.launching.supervise import _Task, answer_of, claim
from moevement_core.rendezvous.coordinator import Coordinator
from moevement_core.rendezvous.coordinator_loop import LEASES_ALONE, CoordinatorLoop, Turn
from moevement_core.rendezvous.lease_client import LeaseClient
from moevement_core.rendezvous.office import Term
from moevement_core.rendezvous.relay import Relay
from moevement_core.rendezvous.standby import Standby
from moevement_core.rendezvous.status_page import PAGE_ENV, StatusPage, boot_time_s
from moevement_core.rendezvous.values import Values
from moevement_core.run.drain_requests import DrainRequest
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
        self.standbys: list[Process] = []
        """Standbys of the supervisor, and coordinators that were standbys."""
        self.is_up = True
        self.lease: LeaseClient | None = None
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
        self.lease = lease
        try:
            newest = partial(getattr, job, "address")  # as job.json has it
            own = SupervisorTask(self.number, scenario.nodes, scenario.processes)
            task = claim(partial(answer_of, lease, newest), own)
        except ConfigError:  # The job has ended meanwhile.
            process.end()
            return
        lease.name = task.name
        listener: Any = Listener(job.world.network, process, process)
        running = _Task(
            task, lease, partial(self._start_rank, process), relay=Relay(TOKEN, lease, listener),
            start_standby=partial(self._start_standby, lease), newest=newest,  # type: ignore[arg-type]
        )  # fmt: skip
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

    def _start_standby(self, lease: LeaseClient) -> Child:
        job = self.job
        job.ports += 1
        port = job.ports
        process: Any = Process(job.world, self.name, f"standby {port} on {self.name}")
        self.standbys.append(process)
        listener: Any = Listener(job.world.network, process, port)
        process.code, process.member = 0, port

        def main() -> None:
            standby = Standby(lease.address, f"{self.name}:{port}", listener, TOKEN)
            job.standbys.append((standby, process))
            while not (standby.is_elected or standby.is_over):
                standby.poll(job.world.rng.uniform(0.05, 0.15))
            if standby.is_elected:
                standby.close()
                job.world.say(f"{process.name} takes over in term {standby.term.number}")
                job.control = Control(job, process, port, standby.values, standby.term)
                job.control.run()
            process.end()

        job.world.start(process, main, process.name)
        return Child(process)

    def _supervisor_ended(self, process: Process, *, is_heard: bool) -> None:
        for child in (*self.ranks, *self.standbys):
            child.end(is_heard=is_heard)
        self.ranks.clear()
        self.standbys.clear()
        self.job.world.after(RESTART_S, self.start)

    def lose(self, *, is_heard: bool, for_s: float) -> None:
        """End all processes of the node, and boot it again after ``for_s`` seconds."""
        self.is_up = False
        if not is_heard:
            self.job.world.network.dark.add(self.name)
        if self.supervisor is not None:
            self.supervisor.end(is_heard=is_heard)
        self.job.world.after(for_s, self._boot)

    def _boot(self) -> None:
        self.is_up = True
        self.job.world.network.dark.discard(self.name)
        self.start()


class Control:
    """Coordinator of a simulated job, in its own process.

    Args:
        job: the job.
        process: process of the coordinator.
        port: port at which supervisors reach it.
        values: values of the job, from the coordinator before this one.
        term: term of this coordinator.
    """

    def __init__(self, job: Job, process: Process, port: int, values: Values, term: Term) -> None:
        world, scenario = job.world, job.scenario
        self.job, self.process, self.values = job, process, values
        self.address = (process.node, port)
        self.coordinator = Coordinator(
            values, scenario.shape.ranks, scenario.spare_timeout_s, self._say,
            groups=SimpleNamespace(list_keys=list), lease_s=scenario.lease_s, clock=lambda: world.now,
        )  # fmt: skip
        self.reason: str | None = None
        listener: Any = Listener(world.network, process, port)
        self.loop = CoordinatorLoop(self.coordinator, listener, values, term, TOKEN, on_wind_down=self._say)
        self.server = self.loop.server

    @property
    def started(self) -> int:
        """Newest generation whose ranks have entered training; -1 before the first."""
        return self.loop.generation

    def _say(self, text: str) -> None:
        self.job.world.say(f"{self.process.name}: {text}")

    @property
    def is_over(self) -> bool:
        """True if this coordinator has ended the job."""
        return self.loop.is_over

    def run(self) -> None:
        """Run the coordinator until the job has ended, as ``moevement coordinate`` does."""
        job, coordinator, deaths, started = self.job, self.coordinator, 0, self.started
        while not self.is_over:
            turn = self.loop.turn(job.world.rng.uniform(0.05, 0.15))
            if turn is Turn.REPLACED:
                self._follow()
                return
            if turn is Turn.WAITED:
                continue
            for target in coordinator.drains.request(job.drains):
                job.drains.pop(target, None)
            for death in coordinator.losses.all[deaths:]:
                self._say(f"member {death.member} (rank {death.rank}) {death.how}")
            deaths = len(coordinator.losses.all)
            if self.started != started:
                started = self.started
                self._say(f"generation {started} is formed: {dict(coordinator.roster.ranks)}")
            if job.scenario.slow_answers_s:
                job.world.sleep(job.world.rng.uniform(0.0, job.scenario.slow_answers_s))
        self.reason = coordinator.end[0]
        self._say(f"{coordinator.state.value} {self.reason}")
        self.loop.end(GRACE_S)

    def _follow(self) -> None:
        """Wait until the job ends that another coordinator has taken over, or until that one is lost."""
        self._say("replaced")
        client, world, lease_s = self.loop.follow(), self.job.world, self.coordinator.membership.lease_s
        heard_at = world.now
        while client.stop is None and world.now - heard_at < LEASES_ALONE * lease_s:
            client.step((), {})
            world.sleep(0.05)
            if boot_time_s() < client.held_until:
                heard_at = world.now


class Job:
    """Simulated job: its coordinators, of which one is in office, and its nodes.

    Args:
        world: simulation that runs the job.
        scenario: shape of the job, and its faults.
    """

    def __init__(self, world: World, scenario: Scenario) -> None:
        self.world, self.scenario = world, scenario
        self.members: dict[int, RankProcess] = {}
        self.standbys: list[tuple[Standby, Process]] = []
        self.drains: dict[str, DrainRequest] = {}
        """Requests to drain nodes and ranks, as the run directory would have them."""
        self.ports = PORT
        """Largest port in use."""
        process = Process(world, COORDINATOR, "coordinator")
        self.control = Control(self, process, PORT, Values(), Term(1, f"{COORDINATOR}:{PORT}"))
        """Coordinator that has taken office last."""
        world.start(process, self.control.run, "coordinator")
        self.hosts = [Host(self, number) for number in range(scenario.nodes)]

    def take_back(self, target: str) -> None:
        """Take back a request to drain ``target``, if it still stands."""
        self.drains.pop(target, None)

    @property
    def coordinator(self) -> Coordinator:
        """State of the coordinator that has taken office last."""
        return self.control.coordinator

    @property
    def address(self) -> tuple[str, int]:
        """Address of the coordinator that has taken office last."""
        return self.control.address

    @property
    def started(self) -> int:
        """Newest generation whose ranks have entered training."""
        return max(self.control.started, self.control.coordinator.roster.generation)

    @property
    def reason(self) -> str | None:
        """Reason why the job was stopped; empty if it was not; None while it runs."""
        return self.control.reason

    @property
    def is_over(self) -> bool:
        """True if the coordinator has ended the job."""
        return self.control.is_over

    @property
    def is_quiet(self) -> bool:
        """True if the job is over and all supervisors that have joined it have ended."""
        return self.is_over and not any(
            host.supervisor is not None and host.supervisor.is_alive and host.lease is not None and host.lease.name
            for host in self.hosts
        )

    @property
    def is_prepared(self) -> bool:
        """True if a standby may take over and knows that, and it and all supervisors know each other."""
        address, cut = self.control.server.office.standby, self.world.network.cut
        leases = [host.lease for host in self.hosts if host.lease is not None]
        names = {lease.name for lease in leases}
        know_it = sum(lease.other == address_of(address) for lease in leases) if address else 0
        is_settled = know_it == len(self.hosts) and not self.control.server.office.is_dropping
        return is_settled and any(
            standby._address == address and standby._may_take_over and standby._voters == names
            and process.is_alive and not process.is_stopped and process.node not in cut
            for standby, process in self.standbys
        )  # fmt: skip

    def survives(self, lost: str) -> bool:
        """Return True if the job has a coordinator without this node, as far as the rules of its office say."""
        office, node = self.control.server.office, self.control.process.node
        if not office.standby:
            return node != lost
        if node == lost and office.standby.partition(":")[0] == lost:
            return False
        # The standby may not have received the newest list of voters yet.
        return all(self._has_majority(voters, lost, by_vote=node == lost) for _, voters in office._voters)

    def _has_majority(self, voters: frozenset[str], lost: str, *, by_vote: bool) -> bool:
        """Return True if enough of the voters are left without a node: half of them, or more than half by a vote."""
        left = sum(
            host.name != lost and host.name not in self.world.network.cut and host.supervisor is not None
            and host.supervisor.is_alive and host.lease is not None and host.lease.name in voters
            for host in self.hosts
        )  # fmt: skip
        return 2 * left > len(voters) if by_vote else 2 * left >= len(voters)
