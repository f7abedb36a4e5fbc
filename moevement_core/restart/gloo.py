"""Creation of gloo groups on a separate thread, so that an interruption can reach the rank that makes them.

Gloo (torch 2.13) connects all members of a group when it makes the group, and waits up to 30 seconds for each member,
whatever timeout the caller passes. If a rank dies after it has published its address and before others connect to it,
the others stay in this wait, and they have no connection yet that an abort could shut down. After three lease times
(30 seconds by default), the job would go on without these ranks, although they have lost nothing.

A rank that waits here runs Python code, so its guard does not count it as hung. If another rank hangs, the guard of
that rank notices it. A hang in gloo itself ends with the timeout that torch passes to gloo.
"""

from __future__ import annotations

import _thread
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, cast, override

import torch.distributed as dist

LOOK_S = 0.05
"""Seconds between two moments at which the waiting thread runs Python code and can be interrupted."""


def make_gloo_interruptible() -> None:
    """Have torch make gloo groups through :func:`interruptibly`, for the rest of this process's life."""
    torch_groups = dist.distributed_c10d
    if not dist.is_gloo_available() or isinstance(torch_groups.ProcessGroupGloo, _Interruptible):
        return
    torch_groups.ProcessGroupGloo = _Interruptible("ProcessGroupGloo", (), {})  # type: ignore[assignment, misc]


def interruptibly[T](make: Callable[[], T]) -> T:
    """Call ``make`` on a separate thread, and return or raise its result; an interruption ends the wait.

    After an interruption, the thread is left to end by itself. ``make`` must hold no lock while it waits, including the
    lock of the interpreter. The thread is not a :class:`threading.Thread`: every start of such a thread needs
    a lock, which an interruption during the start could leave held.
    """
    results: SimpleQueue[tuple[T | None, BaseException | None]] = SimpleQueue()

    def work() -> None:
        try:
            results.put((make(), None))
        except BaseException as error:
            results.put((None, error))

    _thread.start_new_thread(work, ())
    while True:
        with suppress(Empty):
            result, error = results.get(timeout=LOOK_S)
            break
    if error is not None:
        raise error
    return cast(T, result)


class _Interruptible(type):
    """Metaclass of a class that stands in for ``ProcessGroupGloo`` in calls, attributes and ``isinstance``."""

    @override
    def __call__(cls, *args: Any, **options: Any) -> Any:
        return interruptibly(lambda: dist.ProcessGroupGloo(*args, **options))

    @override
    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, dist.ProcessGroupGloo)

    def __getattr__(cls, name: str) -> Any:
        return getattr(dist.ProcessGroupGloo, name)
