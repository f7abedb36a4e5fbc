"""Process of a simulated job, from its start to its end; stands in for ``restart/in_process.py``.

The session's own loop, rejoin and recovery run here. Simulated are the guard around a generation (nvidia's monitoring
thread and its asynchronous exception) and the start of a process.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist
from nvidia_resiliency_ext.inprocess.attribution import Interruption, InterruptionRecord

from moevement_core.comms.token import Token
from moevement_core.errors import JobStopped
from moevement_core.rendezvous.drains import Departure
from moevement_core.rendezvous.interruption import GenerationStore, is_interrupted
from moevement_core.rendezvous.member import Member
from moevement_core.rendezvous.roster import BLOCKS, MemberInfo
from moevement_core.rendezvous.value_client import ValueClient
from moevement_core.restart import generation as generations
from moevement_core.restart.generation import RankLeaves, Regroup, enter_generation, is_fault_of_others
from moevement_core.session.loop import _Loop, iterations
from moevement_core.session.session import Session
from moevement_core.util.exit_codes import DRAINED
from tests.simulation.modules import world
from tests.simulation.network import connected
from tests.simulation.scenario import Scenario
from tests.simulation.trainer import Trainer
from tests.simulation.world import Process, World

TOKEN = Token("of a job that is simulated" * 2)
NOTICED_S = 0.5
"""Longest time until a rank notices that its generation is interrupted, in seconds."""
LEASES_TO_DEPART = 4
"""Number of lease times for which a rank that has given its rank back waits for others."""
ABORT_S = 0.3


class Interrupted(BaseException):
    """Exception that interrupts a rank, in place of the one that nvidia's monitoring thread raises."""


class Guard:
    """Guard of one rank in one generation. It delays interruptions, and looks for no hangs."""

    def __init__(self, process: RankProcess) -> None:
        self._process = process

    @contextmanager
    def atomic(self) -> Iterator[None]:
        """Delay interruptions to the end of the ``with`` block or to the next wait, as the product's guard does."""
        task = world().current()
        task.raise_pending()
        world().checks.enters_atomic(self._process)
        task.atomic += 1
        try:
            yield
        finally:
            task.atomic -= 1
        if world().rng.random() < 0.5:  # otherwise at the next wait
            task.raise_pending()

    def waiting_for_others(self) -> AbstractContextManager[None]:
        return nullcontext()

    def working(self) -> AbstractContextManager[None]:
        return nullcontext()

    def connecting(self) -> AbstractContextManager[None]:
        return nullcontext()

    def expect_progress(self) -> None:
        """Do nothing, as this guard looks for no hangs."""


class Training(_Loop):
    """Loop of a session that reports to the checks where the job resumes or starts over."""

    def _take_up(self) -> bool:
        is_taken_up, process = super()._take_up(), world().current().process
        if is_taken_up:
            assert self._rejoined is not None
            world().checks.went_on(process, self._rejoined.until)
        return is_taken_up

    def _forget(self) -> None:
        if self._has_begun:
            world().checks.starts_over(world().current().process, "nothing to resume")
        else:
            world().checks.forgets(world().current().process)
        super()._forget()


class _Client(ValueClient):
    """Client of the job's values over the simulated network of a node."""

    def __init__(self, process: RankProcess) -> None:
        super().__init__("", TOKEN)
        self._process = process

    def _connected(self) -> Any:
        return connected(self._process.world.network, self._process, self._process.supervisor)


class RankProcess(Process):
    """Simulated process of a rank or a spare."""

    def __init__(self, simulation: World, node: str, member: int, scenario: Scenario, supervisor: Process) -> None:
        super().__init__(simulation, node, f"member {member}")
        self.member, self.scenario, self.supervisor = member, scenario, supervisor
        self.training: Any = None
        self.committed = 0
        """Newest iteration that the rank has committed."""
        self.inside: int | None = None
        """Generation in which the rank trains; None after an interruption."""
        self.on_end.append(lambda is_heard: self._leave_exchanges(is_heard))

    def _leave_exchanges(self, is_heard: bool) -> None:
        if self.inside is not None and is_heard:
            self.world.exchanges.leave(self.inside, self.rank)

    def connect(self) -> ValueClient:
        """Return a new client of the job's values."""
        return _Client(self)

    def main(self) -> int:
        """Run the process to its end; return its exit code."""
        client = self.values = self.connect()
        self.watching = self.connect()
        info = MemberInfo(self.member, 1000 + self.member, self.node, self.node)
        member = Member(client, info)
        scenario = self.scenario

        def loop(session: Session) -> None:
            world().checks.placed(self)
            for iteration in iterations(session, until=scenario.iterations):
                trainer: Any = session.binding
                trainer.run(iteration)
                session.step()
                world().checks.memory(self)

        self.training = Training(
            lambda: Trainer(scenario.shape, scenario.pace), scenario.config, loop, "gloo", None, {}, ()
        )
        if scenario.shape.replicas > 1:
            client.set(BLOCKS, str(scenario.shape.replicas))
        member.join()
        while True:
            try:
                roster, rank = member.wait_for_rank()
            except JobStopped as stopped:
                return 1 if str(stopped) else 0
            self._enter_generation(roster, rank, member)
            try:
                reason = self._generation(member)
            except JobStopped as stopped:
                return 1 if str(stopped) else 0
            except RankLeaves:
                return DRAINED
            if reason is None:
                self.training.ended()
                return 0
            self.training.interrupted()
            had_recovered = self.training.resumed_in == roster.generation
            member.leave(reason, self.training.iteration, had_recovered=had_recovered)

    def _enter_generation(self, roster: Any, rank: int, member: Member) -> None:
        self.generation = generations._generation = enter_generation(roster, rank)
        self.generation.guard = Guard(self)  # type: ignore[assignment]
        self.rank, self.world_size = rank, roster.world
        self.environment.update(RANK=str(rank), WORLD_SIZE=str(self.world_size))
        self.exchanged.clear()
        self.connections.clear()
        self.job_group = None
        self.inside = roster.generation
        self.generation.is_interrupted = lambda: is_interrupted(self.values, roster.generation)
        self.generation.report_departure = member.report_departure
        self.signals = GenerationStore(roster.generation, self.watching, self.connect)
        self.world.start(self, partial(self._watch, self.signals, roster.generation), "monitor")
        self.world.say(f"{self.name} enters generation {roster.generation} as rank {rank}")
        self.world.checks.enters(self)

    def _generation(self, member: Member) -> str | None:
        """Run one generation. Return why the rank left it, "" if another rank failed, None if the job is over."""
        reason = ""
        assert self.generation is not None
        try:
            try:
                self.training.enter(None)
                member.finished()
                self.world.say(f"{self.name} has finished")
                member.wait_for_end()
                return None
            except (JobStopped, Regroup):
                raise
            except RankLeaves as leaves:
                # No check of the lease: a process that the job has given up may report that it leaves.
                task = self.world.current()
                task.raise_pending()
                task.atomic += 1
                try:
                    member.report_departure(Departure.GIVES_BACK, str(leaves))
                    deadline = self.world.now + LEASES_TO_DEPART * self.scenario.lease_s
                    while self.world.now < deadline and not self.generation.is_interrupted():
                        self.world.sleep(NOTICED_S / 4)
                finally:
                    task.atomic -= 1
                raise
            except Exception as error:
                if not is_fault_of_others():
                    reason = f"rank {self.rank}: {type(error).__name__}: {error}"
                    self.world.say(f"{self.name} failed: {reason}")
                    self.world.checks.failed(self, error)
                self.signals.record_interrupted([InterruptionRecord(self.rank, Interruption.EXCEPTION)])
                world().sleep(600.0)
                raise AssertionError("never interrupted") from error
        except Interrupted:
            return reason
        finally:
            self.inside = None
            self.generation.guard = None

    def _watch(self, signals: GenerationStore, generation: int) -> None:
        """Interrupt the rank when its generation is interrupted, as its monitoring thread would."""
        while self.inside == generation:
            with suppress(dist.DistStoreError):
                signals.wait_for_interrupted(timedelta(seconds=NOTICED_S))
                self.world.sleep(self.world.rng.uniform(0.01, NOTICED_S))
                if self.inside == generation:
                    self._interrupt(generation)
                break

    def _interrupt(self, generation: int) -> None:
        now = self.generation
        assert now is not None
        if now.aborting:
            return
        now.abort()
        for connections in self.connections:
            connections.shut_down()
        self.world.exchanges.leave(generation, self.rank)
        self.world.after(self.world.rng.uniform(0.0, ABORT_S), partial(self._raise, generation))

    def _raise(self, generation: int) -> None:
        if self.is_alive and self.inside == generation:
            self.world.say(f"{self.name} is interrupted in generation {generation}")
            self.tasks[0].interrupt(Interrupted())
