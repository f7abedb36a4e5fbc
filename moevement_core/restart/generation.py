"""Generation that this process is in: the job between two failures, with one set of ranks.

A process is in one generation at a time, so this module holds it. Any thread may ask for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from moevement_core.comms.tree import TreeGroup
from moevement_core.rendezvous.drains import Departure
from moevement_core.rendezvous.roster import Roster
from moevement_core.rendezvous.status_page import wait_until_held
from moevement_core.restart.leaving import Leaving

if TYPE_CHECKING:  # The guard needs nvidia-resiliency-ext, and jobs without spares run without it.
    from moevement_core.restart.guard import Guard

NOTICED_S = 2.0
"""Longest time in seconds from the death of a process until the job notices it.

Connections to the process break at once, so other ranks may get errors before that.
"""


class Regroup(Exception):
    """Exception that all ranks raise at the same place to leave their generation and meet again without a failure."""


class RankLeaves(Exception):
    """Exception of a rank that gives its rank back, because the user asked for it; the text says who has its state."""


class GenerationInterrupted(Exception):
    """Exception of a rank that learns of an interruption from the coordinator before its monitoring thread does."""


@dataclass
class Generation:
    """State of the generation that this process is in."""

    roster: Roster
    rank: int
    aborting: bool = False
    """True once an abort has begun; all errors of communication from then on are results of the abort."""
    interrupted_at: float = 0.0
    """Time at which the previous generation was interrupted, in seconds since the epoch; 0 in a new process."""
    aborted_at: float = 0.0
    """Time at which this process was interrupted in this generation, in seconds since the epoch; 0 before that."""
    left_in: Mapping[str, float] = field(default_factory=dict)
    """Seconds that this process took to leave the previous generation, by phase; empty if there was none."""
    free_before: int | None = None
    """Bytes of device memory that were free after this process had left the previous generation.

    None if the process was not in that generation, or has used no device.
    """
    leaving: Leaving = field(default_factory=Leaving)
    """Phases in which this process leaves this generation, with their durations."""
    free_bytes: int | None = None
    """Bytes of device memory that were free after this process had left this generation."""
    guard: Guard | None = None
    """Guard of this generation, while it runs."""
    is_interrupted: Callable[[], bool] = lambda: False
    """Function for the main thread that asks the coordinator if any rank was interrupted in this generation."""
    give_back: Callable[[str, bool], None] = lambda reason, is_certain: None
    """Function that gives the rank back because its device has computed something wrong, and ends this process.

    Its second argument is True if it is certain that it was this device. A device that is given back with certainty for
    the second time in a job is not used again.
    """
    report_departure: Callable[[Departure], None] = lambda departure: None
    """Function that tells the coordinator what this rank does at the boundary at which it was asked to leave."""

    def abort(self) -> None:
        """Note that the abort of this generation begins now."""
        self.aborting = True
        self.aborted_at = time.time()


_generation: Generation | None = None


def generation() -> Generation | None:
    """Return the generation of this process; None in a job without spares, which ends with its first failure."""
    return _generation


def nodes_of(ranks: Iterable[int]) -> tuple[str, ...]:
    """Return the node of each rank. Before the job is formed, each rank counts as a node of its own."""
    if _generation is None:
        return tuple(f"rank {rank}" for rank in ranks)
    return tuple(_generation.roster.nodes[rank] for rank in ranks)


def enter_generation(roster: Roster, rank: int) -> Generation:
    """Begin a generation in this process, and keep the record of how the process left the previous generation."""
    global _generation
    before = _generation
    _generation = Generation(roster, rank)
    if before is not None:
        _generation.interrupted_at, _generation.left_in = before.aborted_at, before.leaving.seconds
        _generation.free_before = before.free_bytes
    return _generation


def is_aborting() -> bool:
    """Return True if an abort has begun. Callers then do not report errors of communication, which the abort causes."""
    return _generation is not None and _generation.aborting


def refuse_if_interrupted() -> None:
    """Raise if any rank was interrupted in this generation, because results of collectives may then be garbage.

    A rank calls this after its last collective and before it uses the results. On NCCL, a collective that another rank
    has aborted may complete without an error, with a wrong finite number. A rank aborts its communication only after
    the coordinator knows of the interruption. So a rank that asks the coordinator after the collective learns of it
    even if its own monitoring thread is late. On gloo, an aborted collective raises an error.

    A call costs one request to the coordinator; see docs/recovery_internals.md.

    Raises:
        GenerationInterrupted: a rank was interrupted.
    """
    if _generation is not None and _generation.is_interrupted():
        raise GenerationInterrupted(f"generation {_generation.roster.generation} was interrupted")


def vote(group: TreeGroup) -> None:
    """Wait until all ranks of the job have called this function, then raise if any rank was interrupted. Collective.

    One rank asks the coordinator, as in :func:`refuse_if_interrupted`, after all ranks have finished their last
    collective, and the others get its answer. So the coordinator gets one question, at any number of ranks. In a job
    without spares the function does nothing.

    Args:
        group: group of all ranks of the job.

    Raises:
        GenerationInterrupted: a rank was interrupted.
        RuntimeError: a rank is lost.
    """
    if (now := _generation) is None:
        return
    with waiting_for_others():  # also for the coordinator, which only one rank asks
        is_interrupted = group.ask_once(now.is_interrupted)
    if is_interrupted:
        raise GenerationInterrupted(f"generation {now.roster.generation} was interrupted")


def is_fault_of_others(in_generation: Generation | None = None, since_s: float | None = None) -> bool:
    """Return True if an error of communication came from a failure of another rank.

    The function waits until that failure is noticed, for at most :data:`NOTICED_S` seconds after the error.

    Args:
        in_generation: generation in which the error was raised; None: the current one.
        since_s: monotonic time of the error in seconds; None: now.
    """
    deadline = (time.monotonic() if since_s is None else since_s) + NOTICED_S
    in_generation = _generation if in_generation is None else in_generation
    while in_generation is not None and not in_generation.aborting and time.monotonic() < deadline:
        time.sleep(0.02)
    return in_generation is not None and in_generation.aborting


def atomic() -> AbstractContextManager[Any]:
    """Return a context in which no interruption reaches this process. Code in it must not wait for any other process.

    If the lease of this process's node has run out, the function first waits until the node has a lease again. Until
    then, a replacement may have the rank of this process.
    """
    wait_until_held()
    return _generation.guard.atomic() if _generation is not None and _generation.guard is not None else nullcontext()


def has_committed() -> None:
    """Note that this rank has committed an iteration; from then on, the guard uses its shorter limit on hangs."""
    if _generation is not None and _generation.guard is not None:
        _generation.guard.expect_progress()


def waiting_for_others() -> AbstractContextManager[Any]:
    """Return a context in which this rank waits for ranks that work, with ten times the usual limit on hangs.

    If a rank that works hangs, the guard of that rank notices the hang first.
    """
    if _generation is None or _generation.guard is None:
        return nullcontext()
    return _generation.guard.waiting_for_others()


def connecting() -> AbstractContextManager[Any]:
    """Return a context in which ranks make communicators, with the limit on hangs that holds after a first commit."""
    now = _generation
    return now.guard.connecting() if now is not None and now.guard is not None else nullcontext()


def working() -> AbstractContextManager[Any]:
    """Return a context with the usual limit on hangs, for work of this rank inside :func:`waiting_for_others`."""
    return _generation.guard.working() if _generation is not None and _generation.guard is not None else nullcontext()
