"""Process of a simulated job, from its start to its end; stands in for ``restart/in_process.py``.

The session's own loop, rejoin and recovery run here. Simulated are the guard around a generation (nvidia's monitoring
thread and its asynchronous exception) and the start of a process.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

from moevement_core.errors import JobStopped
from moevement_core.rendezvous.member import Member
from moevement_core.rendezvous.roster import BLOCKS, MemberInfo
from moevement_core.rendezvous.signed_store import SignedStore
from moevement_core.restart import generation as generations
from moevement_core.restart.generation import Regroup, enter_generation, is_fault_of_others
from moevement_core.session.loop import _Loop, iterations
from moevement_core.session.session import Session
from tests.simulation.modules import world
from tests.simulation.scenario import Scenario
from tests.simulation.trainer import Trainer
from tests.simulation.world import Process, World

NOTICED_S = 0.5
"""Longest time until a rank notices that its generation is interrupted, in seconds."""
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


class RankProcess(Process):
    """Simulated process of a rank or a spare."""

    def __init__(self, simulation: World, node: str, member: int, scenario: Scenario, interrupt: Any) -> None:
        super().__init__(simulation, node, f"member {member}")
        self.member, self.scenario, self.interrupt_all = member, scenario, interrupt
        self.training: Any = None
        self.committed = 0
        """Newest iteration that the rank has committed."""
        self.inside: int | None = None
        """Generation in which the rank trains; None after an interruption."""
        self.on_end.append(lambda is_heard: self._leave_exchanges(is_heard))

    def _leave_exchanges(self, is_heard: bool) -> None:
        if self.inside is not None and is_heard:
            self.world.exchanges.leave(self.inside, self.rank)

    def main(self, client: SignedStore) -> int:
        """Run the process to its end; return its exit code."""
        info = MemberInfo(self.member, 1000 + self.member, self.node, self.node)
        member = Member(client, info)
        scenario = self.scenario

        def loop(session: Session) -> None:
            world().checks.placed(self)
            for iteration in iterations(session, until=scenario.iterations):
                trainer: Any = session.binding
                trainer.forward_backward(iteration)
                session.step()
                world().checks.memory(self)

        self.training = Training(
            lambda: Trainer(scenario.shape, scenario.pace), scenario.config, loop, "gloo", None, {}
        )
        if scenario.shape.replicas > 1:
            client.set(BLOCKS, str(scenario.shape.replicas))
        member.join()
        while True:
            try:
                roster, rank = member.wait_for_rank()
            except JobStopped as stopped:
                return 1 if str(stopped) else 0
            self._enter_generation(roster, rank)
            try:
                reason = self._generation(member)
            except JobStopped as stopped:
                return 1 if str(stopped) else 0
            if reason is None:
                self.training.ended()
                return 0
            self.training.interrupted()
            had_recovered = self.training.resumed_in == roster.generation
            member.leave(reason, self.training.iteration, had_recovered=had_recovered)

    def _enter_generation(self, roster: Any, rank: int) -> None:
        self.generation = generations._generation = enter_generation(roster, rank)
        self.generation.guard = Guard(self)  # type: ignore[assignment]
        self.rank, self.world_size = rank, roster.world
        self.environment.update(RANK=str(rank), WORLD_SIZE=str(self.world_size))
        self.exchanged.clear()
        self.connections.clear()
        self.job_group = None
        self.inside = roster.generation
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
            except Exception as error:
                if not is_fault_of_others():
                    reason = f"rank {self.rank}: {type(error).__name__}: {error}"
                    self.world.say(f"{self.name} failed: {reason}")
                    self.world.checks.failed(self, error)
                self.interrupt_all(self.generation.roster.generation, self.rank)
                world().sleep(600.0)
                raise AssertionError("never interrupted") from error
        except Interrupted:
            return reason
        finally:
            self.inside = None
            self.generation.guard = None

    def notice(self, generation: int) -> None:
        """Interrupt the rank if it is in ``generation``, as its monitoring thread would."""
        if not self.is_alive or self.inside != generation:
            return
        if self.is_stopped or not self.world.network.reaches(self.node, "coordinator"):
            self.world.after(0.3, partial(self.notice, generation))
            return
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
