"""Simulated clock, the tasks that share it, and the processes that own the tasks.

A task stands for a thread of a process, and is a greenlet. When product code blocks, its task yields to the task that
is next on the clock. Nothing here depends on real time, so the same seed gives the same order of events.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from typing import Any

import greenlet

from moevement_core.rendezvous import status_page
from moevement_core.restart import generation

EPOCH_S = 1.7e9
"""Time of the wall clock when a simulation begins, in seconds since the epoch."""


class Stuck(Exception):
    """Error raised when no event is left, or when a job exceeds its time limit."""


class World:
    """Clock, event queue and tasks of one simulation.

    Args:
        seed: seed of all random draws.
        full_trace: True to keep all lines of the trace instead of the newest ones.
    """

    def __init__(self, seed: int, *, full_trace: bool = False) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.now = 0.0
        self.wall_offset_s = EPOCH_S
        self.task: Task | None = None
        self.is_over = False
        self.events = 0
        self.trace: list[str] = []
        self._full_trace = full_trace
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0
        self.hub = greenlet.getcurrent()
        self._tasks: list[Task] = []
        self.watch: Callable[[], None] = lambda: None
        """Callback after every event."""
        self.network: Any = None
        self.exchanges: Any = None
        self.checks: Any = None

    def say(self, text: str) -> None:
        """Add a line to the trace."""
        self.trace.append(f"{self.now:10.4f} {text}")
        if not self._full_trace and len(self.trace) > 400:
            del self.trace[:200]

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        """Call ``action`` after ``seconds`` of simulated time."""
        self._number += 1
        heapq.heappush(self._heap, (self.now + seconds, self._number, action))

    def run(self, until: Callable[[], bool], most_s: float) -> None:
        """Execute events in the order of their times until ``until()`` is true.

        Raises:
            Stuck: no event is left, or the next one is later than ``most_s`` seconds.
        """
        while not until():
            if not self._heap:
                raise Stuck("nothing is left that could happen")
            at, _, action = heapq.heappop(self._heap)
            if at > most_s:
                raise Stuck(f"not over after {most_s:g} s")
            self.now = max(self.now, at)
            self.events += 1
            action()
            self.watch()

    def end(self) -> None:
        """Unwind all tasks, which frees what they hold."""
        self.is_over = True
        for task in self._tasks:
            task.kill()

    def who_waits(self) -> list[str]:
        """Return one line for each task of a living process, with the functions in which it waits."""
        lines = []
        for task in self._tasks:
            frame, names = task.greenlet.gr_frame, list[str]()
            while frame is not None:
                names.append(f"{frame.f_code.co_name}:{frame.f_lineno}")
                frame = frame.f_back
            if names and task.process.is_alive:
                state = ", stopped" if task.process.is_stopped else ""
                lines.append(f"{task.process.name}{state}, {task.name} waits in {' < '.join(names[3:10])}")
        return lines

    # Tasks

    def start(self, process: Process, body: Callable[[], Any], name: str) -> Task:
        """Start a thread of ``process``."""
        task = Task(self, process, body, name)
        process.tasks.append(task)
        self._tasks.append(task)
        task.wake()
        return task

    def current(self) -> Task:
        """Return the task that runs; only code of a task may call this."""
        assert self.task is not None, "product code blocks outside of a task"
        return self.task

    def sleep(self, seconds: float) -> None:
        """Block the current task for ``seconds`` of simulated time."""
        self.current().park(seconds)

    def resume(self, task: Task) -> None:
        """Let ``task`` run until it blocks; a task of a stopped process is deferred."""
        process = task.process
        if task.is_done or not process.is_alive:
            return
        if process.is_stopped:
            if task not in process.deferred:  # It may be woken more than once, but goes on once.
                process.deferred.append(task)
            return
        before, self.task = self.task, task
        process.switch_to()
        try:
            task.greenlet.switch()
        finally:
            self.task = before
        if task.error is not None:
            raise task.error

    def give_way(self) -> None:
        """Switch to the clock; return when the task is resumed."""
        self.hub.switch()


class Process:
    """Simulated process on a node."""

    def __init__(self, world: World, node: str, name: str) -> None:
        self.world, self.node, self.name = world, node, name
        self.is_alive, self.is_stopped = True, False
        self.tasks: list[Task] = []
        self.deferred: list[Task] = []
        self.on_end: list[Callable[[bool], None]] = []
        """Callbacks for the end of the process; they get False if no peer can notice it, as the node lost its power."""
        self.generation: generation.Generation | None = None
        self.page: status_page.StatusPage | None = None
        self.environment: dict[str, str] = {}
        self.rank, self.world_size = -1, 0
        self.exchanged: dict[Any, int] = {}
        """Number of exchanges of each kind that the process has joined."""
        self.groups_made = 0
        self.job_group: Any = None
        """Group of all ranks of the current generation; None until the process uses it."""
        self.connections: list[Any] = []
        """Connections of the current generation."""

    def switch_to(self) -> None:
        """Set module variables to this process's values. Real processes would each have their own variables."""
        generation._generation = self.generation
        status_page._page = self.page

    def stop(self) -> None:
        """Suspend the process, as SIGSTOP does."""
        self.is_stopped = self.is_alive

    def go_on(self) -> None:
        """Resume the process and its deferred tasks, as SIGCONT does."""
        if self.is_stopped:
            self.is_stopped = False
            deferred, self.deferred = self.deferred, []
            for task in deferred:
                self.world.after(0.0, lambda task=task: self.world.resume(task))  # type: ignore[misc]

    def end(self, *, is_heard: bool = True) -> None:
        """End the process, as SIGKILL or the return of its main function does."""
        if self.is_alive:
            self.is_alive = self.is_stopped = False
            for call in self.on_end:
                call(is_heard)


class Task:
    """Thread of a simulated process."""

    def __init__(self, world: World, process: Process, body: Callable[[], Any], name: str) -> None:
        self.world, self.process, self.name = world, process, name
        self.error: BaseException | None = None
        self.is_done = False
        self.ended: list[Callable[[], None]] = []
        self.pending: BaseException | None = None
        """Error that is raised in the task as soon as it is in no atomic section."""
        self.atomic = 0
        self.greenlet = greenlet.greenlet(self._run, world.hub)
        self._body = body
        self._token = 0
        self._timed_out = False

    def _run(self) -> None:
        try:
            self._body()
        except greenlet.GreenletExit:
            pass
        except BaseException as error:
            self.error = error
        self.is_done = True
        for call in self.ended:
            call()

    def wake(self) -> None:
        """Resume the task at once if it is parked."""
        self._token += 1
        token = self._token
        self.world.after(0.0, lambda: self._resume(token, timed_out=False))

    def park(self, timeout_s: float | None = None) -> bool:
        """Block until :meth:`wake`; return False if the timeout came first."""
        if self.world.is_over:
            raise greenlet.GreenletExit
        self.raise_pending()
        self._token += 1
        token = self._token
        if timeout_s is not None:
            self.world.after(timeout_s, lambda: self._resume(token, timed_out=True))
        self.world.give_way()
        if self.world.is_over:
            raise greenlet.GreenletExit
        self.raise_pending()
        return not self._timed_out

    def raise_pending(self) -> None:
        """Raise the pending error, unless the task is in an atomic section."""
        if self.pending is not None and not self.atomic:
            error, self.pending = self.pending, None
            raise error

    def interrupt(self, error: BaseException) -> None:
        """Raise ``error`` in the task where it waits; an atomic section delays the error."""
        self.pending = error
        if not self.atomic:
            self.wake()

    def _resume(self, token: int, *, timed_out: bool) -> None:
        if token == self._token:
            self._timed_out = timed_out
            self.world.resume(self)

    def kill(self) -> None:
        """Unwind the stack of the task."""
        if self.greenlet and not self.greenlet.dead:
            self.greenlet.throw(greenlet.GreenletExit)
