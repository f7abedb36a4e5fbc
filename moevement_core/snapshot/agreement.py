"""What every rank of the job has: which windows are persisted everywhere, and which never will be.

Each iteration every rank says where each recent run of its own stands; the smallest answers are the job's. The
reduction runs in the background and is read one iteration later, so nobody waits for it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist

HORIZON = 512
"""How many iterations back a run may begin."""
MOST_PERIOD = HORIZON // 4
"""Iterations from one window to the next at most: ranks agree on runs that began up to twice as long ago, and a lag."""
NONE = -(1 << 40)
"""In the place of an iteration: there is none. Runs may begin before iteration 0."""


class RunStatus(IntEnum):
    """How far a run that begins at some iteration is."""

    NEVER = 0
    """It was abandoned, or no run begins there."""
    OPEN = 1
    """It may still become persisted."""
    PERSISTED = 2
    """All peers have all of it."""


class Writing(IntEnum):
    """How far the window is that is being written to disk; the job is as far as its least far rank."""

    NOTHING = 0
    """None is."""
    BUSY = 1
    FAILED = 2
    """This rank is done with it, and could not write it."""
    DURABLE = 3
    """This rank's files are on disk."""


@dataclass(frozen=True, slots=True)
class Agreed:
    """Where the runs of the job stand: that of the rank that is least far."""

    iteration: int
    """When it was said; of runs that begin then or later nothing is known."""
    statuses: Mapping[int, RunStatus]
    """By the iteration at which the run begins; a run that is not in here stands at NEVER."""
    writing: Writing = Writing.NOTHING
    """Of the window that all ranks are writing to disk."""
    is_winding_down: bool = False
    """Whether any rank was asked to end the job at a boundary."""

    @property
    def newest_persisted(self) -> int:
        """Where the newest run begins that is persisted on every rank, ``NONE`` if there is none."""
        return max((start for start, s in self.statuses.items() if s is RunStatus.PERSISTED), default=NONE)

    def first_open(self, after: int) -> int:
        """The first beginning later than ``after`` of a run that the job may still persist, known or to come."""
        may = (start for start, status in self.statuses.items() if start > after and status)
        return min(may, default=self.iteration)


class Agreement(ABC):
    """Where the runs of the job stand. All ranks call both methods once an iteration."""

    winding_down: Callable[[], bool] = staticmethod(lambda: False)
    """Whether this rank was asked to end the job at a boundary; asked at every proposal."""

    @abstractmethod
    def propose(self, iteration: int, statuses: Mapping[int, RunStatus], writing: Writing = Writing.NOTHING) -> None:
        """Say where this rank's runs stand, by their beginnings; ``iteration`` is the same on all ranks."""

    @abstractmethod
    def agreed(self) -> Agreed | None:
        """What all ranks said the last time; nothing before the first time."""


class Alone(Agreement):
    """One rank agrees with itself."""

    def __init__(self) -> None:
        self._proposed: Agreed | None = None

    def propose(self, iteration: int, statuses: Mapping[int, RunStatus], writing: Writing = Writing.NOTHING) -> None:
        self._proposed = Agreed(iteration, dict(statuses), writing, self.winding_down())

    def agreed(self) -> Agreed | None:
        return self._proposed


class GroupAgreement(Agreement):
    """Over a gloo group of all ranks, made for this alone. Every rank must make it at the same point."""

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo")
        self._pending: tuple[int, torch.Tensor, Any] | None = None

    def propose(self, iteration: int, statuses: Mapping[int, RunStatus], writing: Writing = Writing.NOTHING) -> None:
        said = torch.zeros(HORIZON + 2, dtype=torch.uint8)
        said[HORIZON] = int(writing)  # however long ago it began
        said[HORIZON + 1] = int(not self.winding_down())
        for start, value in statuses.items():
            if 0 <= iteration - start < HORIZON:
                said[iteration - start] = int(value)
        work = dist.all_reduce(said, op=dist.ReduceOp.MIN, group=self._group, async_op=True)
        self._pending = iteration, said, work

    def agreed(self) -> Agreed | None:
        if self._pending is None:
            return None
        iteration, said, work = self._pending
        work.wait()
        self._pending = None
        backs = said[:HORIZON].nonzero().flatten().tolist()
        statuses = {iteration - back: RunStatus(int(said[back])) for back in backs}
        return Agreed(iteration, statuses, Writing(int(said[HORIZON])), not said[HORIZON + 1])
