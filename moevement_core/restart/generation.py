"""The generation that this process is in: the job between two failures, with one set of ranks.

There is one in a process, so it is kept here; it is asked for from any thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from moevement_core.rendezvous.roster import Roster
from moevement_core.rendezvous.status_page import wait_until_held
from moevement_core.restart.guard import Guard
from moevement_core.restart.leaving import Leaving

NOTICED_S = 2.0
"""Most seconds that the death of a process takes to be noticed; its broken connections are seen at once."""


class Regroup(Exception):
    """Request that all ranks leave their generation at the same place and meet again: nothing has failed."""


class GenerationInterrupted(Exception):
    """The generation was interrupted, and this rank has learned of it before its monitoring thread has."""


@dataclass
class Generation:
    """State of this process in its generation."""

    roster: Roster
    rank: int
    aborting: bool = False
    """Whatever fails now fails because everything is being aborted."""
    interrupted_at: float = 0.0
    """Time at which this process was interrupted in the previous generation, in seconds since the epoch; 0 if it was
    not in it.
    """
    aborted_at: float = 0.0
    """Time at which this generation was aborted, in seconds since the epoch."""
    left_in: Mapping[str, float] = field(default_factory=dict)
    """Seconds of each phase in which this process left the generation before; empty if it was not in it."""
    free_before: int | None = None
    """Bytes of device memory that were free when it had; None if it was not in it, or has used no device."""
    leaving: Leaving = field(default_factory=Leaving)
    """Phases in which this process leaves the generation."""
    free_bytes: int | None = None
    """Bytes of device memory that were free when it had left this one."""
    guard: Guard | None = None
    """Guard of this generation, while it runs."""
    is_interrupted: Callable[[], bool] = lambda: False
    """Reads from the job's store whether any rank was interrupted in this generation; for the main thread."""

    def abort(self) -> None:
        """Everything is being aborted from now on."""
        self.aborting = True
        self.aborted_at = time.time()


_generation: Generation | None = None


def generation() -> Generation | None:
    """The one of this process; nothing in a job that ends with its first failure."""
    return _generation


def enter_generation(roster: Roster, rank: int) -> Generation:
    """Begin a generation in this process."""
    global _generation
    before = _generation
    _generation = Generation(roster, rank)
    if before is not None:
        _generation.interrupted_at, _generation.left_in = before.aborted_at, before.leaving.seconds
        _generation.free_before = before.free_bytes
    return _generation


def is_aborting() -> bool:
    """Return whether errors of communication are caused by an abort, and not worth a report."""
    return _generation is not None and _generation.aborting


def refuse_if_interrupted() -> None:
    """Raise if any rank was interrupted in this generation: what collectives have given since then may be garbage.

    Called after the last collective whose result is about to count, and before it counts. A rank aborts its
    communication only when the interruption stands in the job's store. Other ranks may then complete an aborted
    collective of NCCL without an error, with a wrong finite number; but whoever reads the store after that finds the
    interruption there, however late its own monitoring thread is. Over gloo an aborted collective is an error.

    Costs one question to the job's store; see docs/recovery_internals.md.

    Raises:
        GenerationInterrupted: one was.
    """
    if _generation is not None and _generation.is_interrupted():
        raise GenerationInterrupted(f"generation {_generation.roster.generation} was interrupted")


def is_fault_of_others(its: Generation | None = None, since_s: float | None = None) -> bool:
    """Return whether an error of communication came from a failure elsewhere; wait a moment for that to be noticed.

    Args:
        its: the generation in which the error came; None: that of now.
        since_s: when, by the monotonic clock; None: now.
    """
    deadline = (time.monotonic() if since_s is None else since_s) + NOTICED_S
    its = _generation if its is None else its
    while its is not None and not its.aborting and time.monotonic() < deadline:
        time.sleep(0.02)
    return its is not None and its.aborting


def atomic() -> AbstractContextManager[Any]:
    """A section that no restart interrupts, and that must not wait for any other process; entered while held."""
    wait_until_held()
    return _generation.guard.atomic() if _generation is not None and _generation.guard is not None else nullcontext()


def has_committed() -> None:
    """Note that this rank has committed an iteration: from now on its main thread is expected to make progress."""
    if _generation is not None and _generation.guard is not None:
        _generation.guard.expect_progress()


def waiting_for_others() -> AbstractContextManager[Any]:
    """This rank waits for others that are at work; who hangs there is noticed there."""
    if _generation is None or _generation.guard is None:
        return nullcontext()
    return _generation.guard.waiting_for_others()


def connecting() -> AbstractContextManager[Any]:
    """Ranks make communicators with each other; a call that takes long hangs, however new the generation is."""
    now = _generation
    return now.guard.connecting() if now is not None and now.guard is not None else nullcontext()


def working() -> AbstractContextManager[Any]:
    """Mark, within :func:`waiting_for_others`, that this rank is one of those that work."""
    return _generation.guard.working() if _generation is not None and _generation.guard is not None else nullcontext()
