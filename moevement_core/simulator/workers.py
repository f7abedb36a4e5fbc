"""Pool of worker processes that share tasks. If a worker ends early, the pool raises an error instead of waiting.

Pools of the standard library can hang: they pass tasks and results through threads, and never return if a worker ends
while such a thread works (https://github.com/python/cpython/issues/94777). Ctrl-C, which ends all workers, can cause
this.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import get_context, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any

from moevement_core.errors import ProcessGroupError
from moevement_core.util.interrupts import held_back


def shared[Task, Result](work: Callable[[Task], Result], tasks: Sequence[Task], workers: int) -> list[Result]:
    """Return the results of ``work`` for all tasks, in the order of the tasks.

    Args:
        work: function at the top level of a module, so that workers can import it.
        tasks: arguments of ``work``. A worker gets all tasks when it starts, and later the indices of the tasks
            that it has to execute.
        workers: number of processes. The call kills all of them before it returns or raises.

    Raises:
        ProcessGroupError: a worker ended before it had sent all results.
    """
    running: dict[Connection, SpawnProcess] = {}
    results: dict[int, Result] = {}
    left = iter(range(len(tasks)))
    try:
        with _started_deaf():
            for _ in range(workers):
                connection, process = _started(work, tasks)
                running[connection] = process
        for connection in running:
            _hand_over(connection, next(left, None))
        while len(results) < len(tasks):
            ready = wait(list(running))
            for connection in [connection for connection in running if connection in ready]:
                number, result = _received(connection, running[connection])
                results[number] = result
                _hand_over(connection, next(left, None))
        return [results[number] for number in range(len(tasks))]
    finally:
        for process in running.values():
            process.kill()
        for connection, process in running.items():
            process.join()
            connection.close()


def _started(work: Callable[..., Any], tasks: Sequence[Any]) -> tuple[Connection, SpawnProcess]:
    # A forked worker would inherit the locks of all other threads of this process.
    context = get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_work, args=(there, work, tasks), daemon=True)
    process.start()
    there.close()  # otherwise the connection would stay open after the worker's end
    return here, process


def _hand_over(connection: Connection, number: int | None) -> None:
    if number is not None:
        with suppress(OSError):  # the worker has ended; _received() reports that
            connection.send(number)


def _received(connection: Connection, process: SpawnProcess) -> tuple[int, Any]:
    try:
        number, result, error = connection.recv()
    except (EOFError, OSError):
        process.join(1.0)
        raise ProcessGroupError(
            f"a worker (pid {process.pid}) ended with exit code {process.exitcode} before it sent its results; if "
            "memory ran out, start fewer workers"
        ) from None
    if error is not None:
        raise error
    return number, result


def _work(connection: Connection, work: Callable[[Any], Any], tasks: Sequence[Any]) -> None:
    """Run a worker: execute tasks until the parent process closes the connection or kills the worker."""
    with suppress(EOFError, OSError):
        while True:
            number = connection.recv()
            answer: tuple[int, Any, Exception | None]
            try:
                answer = number, work(tasks[number]), None
            except Exception as error:
                answer = number, None, error
            connection.send(answer)


@contextmanager
def _started_deaf() -> Iterator[None]:
    """Block SIGINT in processes that start inside the context. On Ctrl-C, the parent process kills them itself.

    The parent process acts on SIGINT only after the context. Otherwise it could leave a process that has not yet got
    all of its arguments, which would print an error.
    """
    resource_tracker.ensure_running()  # This comes first, because the start of the tracker unblocks SIGINT.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        with held_back():
            yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
