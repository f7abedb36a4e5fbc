"""Stand-ins for ``time``, ``threading`` and ``queue``, with the same names, on the simulated clock."""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

from moevement_core.util.gate import Gate
from tests.simulation.world import Task, World

_worlds: list[World] = []


def world() -> World:
    """Return the simulation that runs."""
    return _worlds[-1]


def _monotonic(*_: Any) -> float:
    return world().now


def _wall() -> float:
    return world().now + world().wall_offset_s


SIMULATED_TIME = SimpleNamespace(
    monotonic=_monotonic, perf_counter=_monotonic, clock_gettime=_monotonic, thread_time=lambda: 0.0,
    process_time=lambda: 0.0, time=_wall, time_ns=lambda: int(_wall() * 1e9), CLOCK_BOOTTIME=0,
    sleep=lambda seconds: world().sleep(seconds),
)  # fmt: skip
COARSE_S = 0.1


def _coarse(seconds: float) -> None:
    """Sleep for about ``COARSE_S`` or longer: a polling loop then polls rarely and unevenly, as on a busy host."""
    world().sleep(max(seconds, COARSE_S * world().rng.uniform(0.5, 1.5)))


COARSE_TIME = SimpleNamespace(**{**vars(SIMULATED_TIME), "sleep": _coarse})


class Waiting:
    """Tasks that wait until another task wakes them."""

    def __init__(self) -> None:
        self._tasks: list[Task] = []

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until :meth:`wake_all`; return False if the timeout came first."""
        task = world().current()
        self._tasks.append(task)
        try:
            return task.park(timeout_s)
        finally:
            if task in self._tasks:
                self._tasks.remove(task)

    def until(self, holds: Callable[[], Any], timeout_s: float | None = None) -> bool:
        """Block until ``holds()`` is true; return False if the timeout came first."""
        deadline = None if timeout_s is None else world().now + timeout_s
        while not holds():
            left = None if deadline is None else deadline - world().now
            if left is not None and left <= 0:
                return False
            self.wait(left)
        return True

    def wake_all(self) -> None:
        """Wake every waiting task, which then checks its condition again."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.wake()


class SimulatedEvent:
    def __init__(self) -> None:
        self._is_set, self._waiting = False, Waiting()

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        self._waiting.wake_all()

    def wait(self, timeout: float | None = None) -> bool:
        return self._waiting.until(lambda: self._is_set, timeout)


class SimulatedThread:
    def __init__(self, target: Callable[..., Any] | None = None, name: str = "", args: Any = (), daemon: bool = True):
        self.name = name
        self._target: Any = (lambda: target(*args)) if target is not None else self.run
        self._waiting = Waiting()
        self._task: Task | None = None

    def run(self) -> None:
        """Run the thread of a subclass, which overrides this method instead of passing a target."""

    def start(self) -> None:
        task = self._task = world().start(world().current().process, self._target, self.name)
        task.ended.append(self._waiting.wake_all)

    def is_alive(self) -> bool:
        return self._task is not None and not self._task.is_done

    def join(self, timeout: float | None = None) -> None:
        self._waiting.until(lambda: not self.is_alive(), timeout)


class SimulatedGate:
    def __init__(self) -> None:
        self._event = SimulatedEvent()

    @property
    def is_open(self) -> bool:
        return self._event.is_set()

    def open(self) -> None:
        self._event.set()

    def wait(self) -> None:
        self._event.wait()


class SimulatedCondition:
    def __init__(self, lock: Any = None) -> None:
        self._waiting, self._lock = Waiting(), lock

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass

    def wait_for(self, holds: Callable[[], Any], timeout: float | None = None) -> bool:
        if self._lock is None:
            return self._waiting.until(holds, timeout)
        self._lock.__exit__()
        try:
            return self._waiting.until(holds, timeout)
        finally:
            self._lock.__enter__()

    def notify_all(self) -> None:
        self._waiting.wake_all()


class SimulatedSemaphore:
    def __init__(self, count: int) -> None:
        self._count, self._waiting = count, Waiting()

    def __enter__(self) -> None:
        self._waiting.until(lambda: self._count > 0)
        self._count -= 1

    def __exit__(self, *_: object) -> None:
        self._count += 1
        self._waiting.wake_all()


class SimulatedLock:
    """Lock that is never contended, as no task blocks while it holds one; entering a held lock fails."""

    def __init__(self) -> None:
        self._held = False

    def __enter__(self) -> None:
        assert not self._held, "a task gave way with a lock that another one wants"
        self._held = True

    def __exit__(self, *_: object) -> None:
        self._held = False


class SimulatedQueue:
    def __init__(self) -> None:
        self._items: deque[Any] = deque()
        self._waiting = Waiting()

    def __class_getitem__(cls, _: Any) -> type[SimulatedQueue]:
        return cls

    def put(self, item: Any) -> None:
        self._items.append(item)
        self._waiting.wake_all()

    def get(self) -> Any:
        self._waiting.until(lambda: self._items)
        return self._items.popleft()

    def get_nowait(self) -> Any:
        if not self._items:
            raise queue.Empty
        return self._items.popleft()

    def qsize(self) -> int:
        return len(self._items)

    def empty(self) -> bool:
        return not self._items


SIMULATED_THREADING = SimpleNamespace(
    Event=SimulatedEvent, Thread=SimulatedThread, Condition=SimulatedCondition, Semaphore=SimulatedSemaphore,
    Lock=SimulatedLock, RLock=SimulatedLock, get_ident=lambda: id(world().task),
    current_thread=lambda: world().task,
    main_thread=lambda: world().task.process.tasks[0] if world().task is not None else None,  # type: ignore[union-attr]
)  # fmt: skip
SIMULATED_QUEUE = SimpleNamespace(SimpleQueue=SimulatedQueue, Empty=queue.Empty)

COARSE = ("moevement_core.launching.supervise", "moevement_core.launching.supervisor")
REPLACED: dict[Any, Any] = {time: SIMULATED_TIME, threading: SIMULATED_THREADING, queue: SIMULATED_QUEUE}


def _places() -> Iterator[tuple[ModuleType, str, Any]]:
    """Yield every attribute of product modules that is replaced, with its stand-in."""
    for name, module in list(sys.modules.items()):
        if not name.startswith("moevement_core."):
            continue
        for attribute, value in list(vars(module).items()):
            if isinstance(value, ModuleType) and value in REPLACED:
                is_coarse = value is time and name in COARSE
                yield module, attribute, COARSE_TIME if is_coarse else REPLACED[value]
            elif value is Gate:
                yield module, attribute, SimulatedGate


@contextmanager
def simulated_modules(*more: tuple[Any, str, Any]) -> Iterator[None]:
    """Run product code on the simulated clock inside the ``with`` block.

    Args:
        more: further replacements: the object, the name of its attribute, and the stand-in.
    """
    with ExitStack() as stack:
        for place, name, stand_in in (*_places(), *more):
            stack.enter_context(patch.object(place, name, stand_in))
        yield


@contextmanager
def running(simulation: World) -> Iterator[None]:
    """Make ``simulation`` the one that :func:`world` returns, and end it after the ``with`` block."""
    _worlds.append(simulation)
    try:
        yield
    finally:
        simulation.end()
        _worlds.pop()
