"""Tasks that some processes share; whatever happens to who waits for them, or to one of them, nobody waits for ever.

Pools of the standard library have threads that hand tasks and results over. Where a worker ends while one of them is
in the middle of it, the pool never does (https://github.com/python/cpython/issues/94777), and Ctrl-C ends them all.
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


def shared[Task, Result](work: Callable[[Task], Result], tasks: Sequence[Task], workers: int) -> list[Result]:
    """What ``work`` returns for each task, in their order.

    Args:
        work: a function of a module.
        tasks: every worker gets all of them when it starts, and then one number after the other.
        workers: processes; those that are left when this is interrupted are killed.

    Raises:
        ProcessGroupError: one of them has ended.
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
            for connection in [one for one in running if one in ready]:
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
    # Forked, a worker would inherit threads of whatever else this process does.
    context = get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_work, args=(there, work, tasks), daemon=True)
    process.start()
    there.close()  # else nobody would see that the worker has ended
    return here, process


def _hand_over(connection: Connection, number: int | None) -> None:
    if number is not None:
        with suppress(OSError):  # it has ended, which is seen when its result is waited for
            connection.send(number)


def _received(connection: Connection, process: SpawnProcess) -> tuple[int, Any]:
    try:
        number, result, error = connection.recv()
    except (EOFError, OSError):
        process.join(1.0)
        raise ProcessGroupError(
            f"a worker (pid {process.pid}) ended with exit code {process.exitcode}, before its results had come; where "
            "memory ran out, start fewer"
        ) from None
    if error is not None:
        raise error
    return number, result


def _work(connection: Connection, work: Callable[[Any], Any], tasks: Sequence[Any]) -> None:
    """In a worker, until who has started it is gone, or ends it."""
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
    """Start processes to which SIGINT never comes: they are ended by who waits for them."""
    resource_tracker.ensure_running()  # which unblocks SIGINT when it starts
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
