"""Run the job of one seed."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from moevement_core import log
from moevement_core.comms import exchange
from moevement_core.launching import supervisor
from moevement_core.recovery import boundary_log
from moevement_core.rendezvous import lease_client, lease_server, signed_store
from moevement_core.replication import config as replication_config
from moevement_core.replication import receiver, sender
from moevement_core.saving import saving, window_start
from moevement_core.saving.peers import Peers
from moevement_core.session import loop
from moevement_core.snapshot.snapshot import Snapshot, digest_of
from moevement_core.topology import topology
from tests.simulation.checks import Checks, Violation
from tests.simulation.collectives import Exchanges, distributed
from tests.simulation.hosts import Job, NoOrphans, end_all
from tests.simulation.modules import running, simulated_modules, world
from tests.simulation.network import SELECTORS, Connections, Network, sockets
from tests.simulation.scenario import Fault, Kind, Scenario, draw
from tests.simulation.store import Prefixed
from tests.simulation.world import Stuck, World

MOST_S = 600.0
"""Within that time every job has ended, or has been stopped with a reason."""


@dataclass(frozen=True)
class Outcome:
    """Of one seed."""

    seed: int
    scenario: Scenario
    violation: str | None
    trace: list[str]
    events: int
    simulated_s: float
    generations: int
    reason: str


class _Environment:
    """Variables of the process that runs."""

    def get(self, name: str, default: Any = None) -> Any:
        return world().current().process.environment.get(name, default)

    def __getitem__(self, name: str) -> Any:
        return world().current().process.environment[name]

    def __setitem__(self, name: str, value: str) -> None:
        world().current().process.environment[name] = value


class _Digests:
    """Of the boundary log, at once."""

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
    """What a function of ``torch.distributed`` is answered by in the simulation that runs."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return world().distributed[name](*args, **kwargs)  # type: ignore[attr-defined]

    return call


_product_acknowledged = Peers._acknowledged


def _acknowledged(self: Peers, snapshot: Snapshot, peer: int) -> None:
    """The product's own, after which it is known here, too."""
    _product_acknowledged(self, snapshot, peer)
    world().checks.acknowledged(snapshot.header.rank, snapshot, peer, {one.peer for one in self.senders})


class _Socket:
    def __getattr__(self, name: str) -> Any:
        return getattr(world().sockets, name)  # type: ignore[attr-defined]


@contextmanager
def stand_ins() -> Iterator[None]:
    """Product code stands on what is simulated in here."""
    torch.set_num_threads(1)
    its_os = SimpleNamespace(environ=_Environment(), getpid=lambda: 1)
    replaced: list[tuple[Any, str, Any]] = [
        (lease_client, "socket", _Socket()),
        (signed_store, "dist", SimpleNamespace(PrefixStore=Prefixed, DistStoreError=dist.DistStoreError)),
        (exchange, "_get_object_coll_device", lambda group=None: "cpu"),
        (lease_server, "selectors", SELECTORS),
        (supervisor, "end_all", end_all),
        (supervisor, "Orphans", NoOrphans),
        (replication_config, "os", its_os),
        (loop, "os", its_os),
        (loop, "state_digest", lambda parts: {}),
        (topology, "connections_of", lambda copies: Connections("simulated")),
        (Peers, "_acknowledged", _acknowledged),
        (saving, "RECORD_SLACK_BYTES", 4096),
        (boundary_log, "_Digests", _Digests),
        *((module, "own_address", lambda *_: "simulated") for module in (saving, window_start)),
        *((module, "let_training_go_first", lambda: None) for module in (sender, receiver)),
        *((log, level, _log(level)) for level in ("info", "warning")),
        *((place, name, _current(name)) for place, name, _ in distributed(None)),  # type: ignore[arg-type]
    ]
    with simulated_modules(*replaced):
        yield


def simulate(seed: int, *, full_trace: bool = False, scenario: Scenario | None = None) -> Outcome:
    """Run the job of ``seed`` to its end; in :func:`stand_ins`."""
    scenario = scenario or draw(seed)
    its: Any = World(seed, full_trace=full_trace)
    its.network = Network(its, scenario.slowest_s, scenario.drop, scenario.beside_s)
    its.exchanges = Exchanges(its)
    its.sockets = sockets(its.network)
    its.distributed = {name: function for _, name, function in distributed(its.exchanges)}
    violation, job = None, None
    with ExitStack() as stack:
        stack.enter_context(running(its))
        its.say(f"seed {seed}: {scenario}")
        job = Job(its, scenario)
        checks = its.checks = Checks(job)
        its.watch = checks.every_event
        faults = Faults(job, its)
        try:
            its.run(lambda: job.is_quiet, MOST_S)
            checks.at_end()
        except Stuck as stuck:
            violation = f"somebody waits for ever: {stuck}"
            its.trace += its.who_waits()
        except Violation as error:
            violation = str(error)
        except Exception as error:  # of a task: where a real process would have ended with a traceback
            violation = f"{type(error).__name__}: {error}"
            its.trace += traceback.format_exc().splitlines()
        assert faults is not None
        if violation is not None:
            its.say(f"VIOLATION: {violation}")
    return Outcome(
        seed, scenario, violation, its.trace, its.events, its.now, job.started + 1, job.reason or ""
    )  # fmt: skip


class Faults:
    """Lets the faults of a scenario happen when their time has come."""

    def __init__(self, job: Job, its: World) -> None:
        self.job, self.world = job, its
        self._left = list(job.scenario.faults)
        self._arm_first()

    def _arm_first(self) -> None:
        """The next fault, or those that come at once."""
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
        its, job = self.world, self.job
        its.say(f"FAULT {fault.kind} of {fault.target} for {fault.for_s:.2f} s")
        member = job.coordinator.roster.ranks.get(fault.target)
        process = job.members.get(member) if member is not None else None
        host = next((one for one in job.hosts if process is not None and one.name == process.node), job.hosts[0])
        match fault.kind:
            case Kind.KILL if process is not None:
                process.end()
            case Kind.NODE | Kind.POWER:
                host.lose(is_heard=fault.kind is Kind.NODE, for_s=fault.for_s + 3 * job.scenario.lease_s)
            case Kind.HANG if process is not None:
                process.stop()
                its.after(fault.for_s, process.go_on)
            case Kind.CUT:
                its.network.isolate(host.name)
                its.after(fault.for_s, partial(its.network.heal, host.name))
            case Kind.SUPERVISOR if host.supervisor is not None:
                host.supervisor.end()
            case Kind.PAUSE:
                job.process.stop()
                its.after(fault.for_s, job.process.go_on)
            case Kind.SLOW:
                its.network.slow.add(host.name)
                its.after(fault.for_s, partial(its.network.slow.discard, host.name))
            case Kind.CLOCK:
                its.wall_offset_s += fault.for_s
        self._arm_first()
