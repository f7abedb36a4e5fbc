"""Simulated run of the job of one seed, with stand-ins for all that product code needs."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from moevement_core import log
from moevement_core.comms import exchange, signed_server
from moevement_core.comms.tree import TreeGroup
from moevement_core.engine.own import OwnSnapshots
from moevement_core.launching import supervisor
from moevement_core.recovery import boundary_log
from moevement_core.rendezvous import lease_client, mirror, standby, value_client
from moevement_core.replication import config as replication_config
from moevement_core.replication import receiver, sender
from moevement_core.run.drain_requests import DrainRequest
from moevement_core.saving import window_start
from moevement_core.saving.peers import Peers
from moevement_core.session import build, loop
from moevement_core.snapshot.snapshot import Snapshot, digest_of
from moevement_core.topology import topology
from tests.simulation.checks import Checks, Violation
from tests.simulation.collectives import Exchanges, distributed
from tests.simulation.hosts import Job, NoOrphans, end_all
from tests.simulation.modules import running, simulated_modules, world
from tests.simulation.network import SELECTORS, Connections, Network, sockets
from tests.simulation.scenario import MOVES, OF_COORDINATOR, Fault, Kind, Scenario, draw
from tests.simulation.world import Stuck, World

MOST_S = 600.0
"""Simulated seconds within which every job ends, or is stopped with a reason."""


@dataclass(frozen=True)
class Outcome:
    """Result of the job of one seed."""

    seed: int
    scenario: Scenario
    violation: str | None
    trace: list[str]
    events: int
    simulated_s: float
    generations: int
    repeated: int
    """Number of updates that replays and redo have repeated, over all ranks."""
    reason: str


class _Environment:
    """Environment variables of the simulated process that runs."""

    def get(self, name: str, default: Any = None) -> Any:
        return world().current().process.environment.get(name, default)

    def __getitem__(self, name: str) -> Any:
        return world().current().process.environment[name]

    def __setitem__(self, name: str, value: str) -> None:
        world().current().process.environment[name] = value


def job_group() -> TreeGroup:
    """Return the group of all ranks of the current process's generation, over simulated connections."""
    process = world().current().process
    if process.job_group is None:
        ranks = range(process.world_size)
        connections = Connections("simulated")
        addresses = world().exchanges.gather("job group", ranks, connections.address)
        connections.open(process.rank, addresses)
        process.job_group = TreeGroup(ranks, process.rank, connections.channel("job") if len(ranks) > 1 else None)
    return process.job_group


class _Digests:
    """Digests of the boundary log, which are computed at once."""

    def __init__(self, device: Any) -> None:
        pass

    def of(self, buffer: torch.Tensor, copied: Any) -> Any:
        digest = digest_of(buffer)
        return SimpleNamespace(result=lambda: digest)


def _log(level: str) -> Any:
    def say(text: str) -> None:
        task = world().task
        world().say(f"{task.process.name if task else '-'}: {level}: {text}")

    return say


def _current(name: str) -> Any:
    """Return a stand-in for a function of ``torch.distributed``. It calls the current simulation's replacement."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return world().distributed[name](*args, **kwargs)  # type: ignore[attr-defined]

    return call


_product_acknowledged, _product_peers = OwnSnapshots.acknowledged, Peers.__init__


def _init_peers(self: Peers, *args: Any, **kwargs: Any) -> None:
    """Make the product's object, and note it in the rank's snapshots, where :func:`_acknowledged` finds it."""
    _product_peers(self, *args, **kwargs)
    vars(self._own)["peers"] = self


def _acknowledged(self: OwnSnapshots, snapshot: Snapshot, peer: int) -> None:
    """Call the product's method, then report the acknowledgement to the checks."""
    _product_acknowledged(self, snapshot, peer)
    peers = {connection.peer for connection in vars(self)["peers"].senders}
    world().checks.acknowledged(snapshot.header.rank, snapshot, peer, peers)


class _Socket:
    def __getattr__(self, name: str) -> Any:
        return getattr(world().sockets, name)  # type: ignore[attr-defined]


@contextmanager
def stand_ins() -> Iterator[None]:
    """Run product code on the simulated modules inside the ``with`` block."""
    torch.set_num_threads(1)
    simulated_os = SimpleNamespace(environ=_Environment(), getpid=lambda: 1)
    replaced: list[tuple[Any, str, Any]] = [
        *((module, "socket", _Socket()) for module in (lease_client, standby, mirror)),
        *((module, "job_group", job_group) for module in (exchange, topology)),
        *((module, "selectors", SELECTORS) for module in (signed_server, value_client)),
        (supervisor, "end_all", end_all),
        (supervisor, "Orphans", NoOrphans),
        (replication_config, "os", simulated_os),
        (loop, "os", simulated_os),
        (loop, "state_digest", lambda parts: {}),
        (topology, "connections_of", lambda copies: Connections("simulated")),
        (Peers, "__init__", _init_peers),
        (OwnSnapshots, "acknowledged", _acknowledged),
        (build, "RECORD_SLACK_BYTES", 4096),
        (boundary_log, "_Digests", _Digests),
        *((module, "own_address", lambda *_: "simulated") for module in (build, window_start)),
        *((module, "lower_priority", lambda: None) for module in (sender, receiver)),
        *((log, level, _log(level)) for level in ("info", "warning")),
        *((place, name, _current(name)) for place, name, _ in distributed(None)),  # type: ignore[arg-type]
    ]
    with simulated_modules(*replaced):
        yield


def simulate(seed: int, *, full_trace: bool = False, scenario: Scenario | None = None) -> Outcome:
    """Run the job of ``seed`` to its end, inside of :func:`stand_ins`; return the outcome."""
    scenario = scenario or draw(seed)
    simulation: Any = World(seed, full_trace=full_trace)
    simulation.network = Network(simulation, scenario.slowest_s, scenario.drop, scenario.beside_s)
    simulation.exchanges = Exchanges(simulation)
    simulation.sockets = sockets(simulation.network)
    simulation.distributed = {name: function for _, name, function in distributed(simulation.exchanges)}
    violation, job = None, None
    with ExitStack() as stack:
        stack.enter_context(running(simulation))
        simulation.say(f"seed {seed}: {scenario}")
        job = Job(simulation, scenario)
        checks = simulation.checks = Checks(job)
        simulation.watch = checks.every_event
        faults = Faults(job, simulation)
        try:
            simulation.run(lambda: job.is_quiet, MOST_S)
            checks.at_end()
        except Stuck as stuck:
            violation = f"somebody waits forever: {stuck}"
            simulation.trace += simulation.who_waits()
        except Violation as error:
            violation = str(error)
        except Exception as error:  # raised in a task; a real process would have ended with a traceback
            violation = f"{type(error).__name__}: {error}"
            simulation.trace += traceback.format_exc().splitlines()
        assert faults is not None
        if violation is not None:
            simulation.say(f"VIOLATION: {violation}")
    return Outcome(
        seed, scenario, violation, simulation.trace, simulation.events, simulation.now, job.started + 1,
        simulation.checks.repeated, job.reason or "",
    )  # fmt: skip


class Faults:
    """Injector that triggers the faults of a scenario when their times have come."""

    def __init__(self, job: Job, simulation: World) -> None:
        self.job, self.world = job, simulation
        self._left = list(job.scenario.faults)
        self._arm_first()

    def _arm_first(self) -> None:
        """Schedule the next fault now, or when the ranks commit its iteration."""
        if not self._left:
            self.world.checks.on_commit = lambda: None
            return
        fault = self._left[0]
        if fault.at_iteration is None or self.world.checks.newest >= fault.at_iteration:
            self._left.pop(0)
            self.world.checks.on_commit = lambda: None
            self.world.after(fault.after_s, partial(self._strike, fault))
        else:
            self.world.checks.on_commit = self._arm_first

    def _strike(self, fault: Fault) -> None:
        if self.job.is_over:
            return
        simulation, job = self.world, self.job
        if not self._is_possible(fault):
            simulation.after(0.2, partial(self._strike, fault))
            return
        simulation.say(f"FAULT {fault.kind} of {fault.target} for {fault.for_s:.2f} s")
        member = job.coordinator.roster.ranks.get(fault.target)
        process = job.members.get(member) if member is not None else None
        host = next((node for node in job.hosts if process is not None and node.name == process.node), job.hosts[0])
        match fault.kind:
            case Kind.KILL if process is not None:
                process.end()
            case Kind.NODE | Kind.POWER:
                host.lose(is_heard=fault.kind is Kind.NODE, for_s=fault.for_s + 3 * job.scenario.lease_s)
            case Kind.HANG if process is not None:
                process.stop()
                simulation.after(fault.for_s, process.go_on)
            case Kind.CUT:
                simulation.network.isolate(host.name)
                simulation.after(fault.for_s, partial(simulation.network.heal, host.name))
            case Kind.SUPERVISOR if host.supervisor is not None:
                host.supervisor.end()
            case Kind.PAUSE:
                job.control.process.stop()
                simulation.after(fault.for_s, job.control.process.go_on)
            case Kind.COORDINATOR:
                job.control.process.end()
            case Kind.DARK:
                self._lose_coordinator(fault)
            case Kind.PARTED:
                node = job.control.process.node
                simulation.network.isolate(node)
                simulation.after(fault.for_s, partial(simulation.network.heal, node))
            case Kind.SLOW:
                simulation.network.slow.add(host.name)
                simulation.after(fault.for_s, partial(simulation.network.slow.discard, host.name))
            case Kind.CLOCK:
                simulation.wall_offset_s += fault.for_s
            case Kind.DRAIN:
                job.drains[host.name] = DrainRequest("simulated")
                simulation.after(fault.for_s, partial(job.take_back, host.name))
            case Kind.MOVE:
                job.drains[str(fault.target)] = DrainRequest("simulated")
        self._arm_first()

    def _lose_coordinator(self, fault: Fault) -> None:
        process = self.job.control.process
        for host in self.job.hosts:
            if host.name == process.node:
                host.lose(is_heard=False, for_s=fault.for_s + 3 * self.job.scenario.lease_s)
        if process.is_alive:
            self.world.network.dark.add(process.node)
            process.end(is_heard=False)

    def _is_possible(self, fault: Fault) -> bool:
        """Return True if the job can go on after a fault, as far as its coordinator is concerned.

        Two losses at a time may leave it without a coordinator: of the coordinator with its standby, or with half of
        the nodes.
        """
        job, control = self.job, self.job.control
        if fault.kind in (Kind.KILL, Kind.HANG, Kind.SLOW, Kind.CLOCK, *MOVES):
            return True
        is_cut = control.process.node in self.world.network.cut
        if is_cut or not control.process.is_alive or not control.server.is_in_office:
            return False
        if fault.kind in OF_COORDINATOR:
            return job.is_prepared and job.survives(control.process.node)
        if fault.kind is Kind.PAUSE:
            return True
        member = job.coordinator.roster.ranks.get(fault.target)
        node = job.members[member].node if member in job.members else job.hosts[0].name
        is_needed = node in (control.process.node, control.server.office.standby.partition(":")[0])
        return job.survives(node) and (not is_needed or job.is_prepared)
