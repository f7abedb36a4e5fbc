"""Groups of gloo, made where an interruption can reach the rank that makes them.

Gloo (torch 2.13) connects all members of a group when it is made, and waits 30 seconds for each; no timeout that a
caller gives changes that. A rank that dies after it has published its address, and before it is called, leaves the
others in this wait. There is no connection yet that could be shut down, and after three leases (30 seconds, too) the
job would go on without ranks that have lost nothing.

A rank that waits here runs Python code, so it is not taken to hang however long that takes: it waits for others, and
who hangs there is noticed there. What hangs in gloo itself ends with the timeout that torch is given.
"""

from __future__ import annotations

import _thread
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, cast, override

import torch.distributed as dist

LOOK_S = 0.05
"""Seconds between two moments at which a waiting thread runs Python code, in which an interruption is raised."""


def make_gloo_interruptible() -> None:
    """Have torch make groups of gloo by :func:`interruptibly` from now on, for the life of this process."""
    torch_groups = dist.distributed_c10d
    if not dist.is_gloo_available() or isinstance(torch_groups.ProcessGroupGloo, _Interruptible):
        return
    torch_groups.ProcessGroupGloo = _Interruptible("ProcessGroupGloo", (), {})  # type: ignore[assignment, misc]


def interruptibly[T](make: Callable[[], T]) -> T:
    """Return what ``make`` returns, or raise what it raises; an exception from outside ends the wait for it.

    ``make`` runs on a thread of its own, which then is left to end by itself. It must hold no lock meanwhile, the
    interpreter's included. The thread is started without :class:`threading.Thread`, in whose locks an exception from
    outside would leave everybody who starts another one.
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
            made, error = results.get(timeout=LOOK_S)
            break
    if error is not None:
        raise error
    return cast(T, made)


class _Interruptible(type):
    """Stands for torch's class: is called as it is, and has its attributes and instances."""

    @override
    def __call__(cls, *args: Any, **options: Any) -> Any:
        return interruptibly(lambda: dist.ProcessGroupGloo(*args, **options))

    @override
    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, dist.ProcessGroupGloo)

    def __getattr__(cls, name: str) -> Any:
        return getattr(dist.ProcessGroupGloo, name)
