"""What every rank of the job has: which windows are persisted everywhere.

Each iteration every rank says, for each recent iteration, whether a persisted run of its own begins there; the smallest
answers are the job's. The reduction runs in the background and is read one iteration later, so nobody waits for it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

HORIZON = 512
"""How many iterations back a run may begin."""


class Agreement(ABC):
    """Iterations at which a persisted run begins on every rank. All ranks call both methods once an iteration."""

    @abstractmethod
    def propose(self, iteration: int, starts: Iterable[int]) -> None:
        """Say at which iterations persisted runs of this rank begin; ``iteration`` is the same on all ranks."""

    @abstractmethod
    def agreed(self) -> tuple[int, ...]:
        """What all ranks said the last time, newest first; empty before the first time."""


class Alone(Agreement):
    """One rank agrees with itself."""

    def __init__(self) -> None:
        self._starts: tuple[int, ...] = ()

    def propose(self, iteration: int, starts: Iterable[int]) -> None:
        self._starts = tuple(sorted(starts, reverse=True))

    def agreed(self) -> tuple[int, ...]:
        return self._starts


class GroupAgreement(Agreement):
    """Over a gloo group of all ranks, made for this alone. Every rank must make it at the same point."""

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo")
        self._pending: tuple[int, torch.Tensor, Any] | None = None

    def propose(self, iteration: int, starts: Iterable[int]) -> None:
        said = torch.zeros(HORIZON, dtype=torch.uint8)
        for start in starts:
            if 0 <= iteration - start < HORIZON:
                said[iteration - start] = 1
        work = dist.all_reduce(said, op=dist.ReduceOp.MIN, group=self._group, async_op=True)
        self._pending = iteration, said, work

    def agreed(self) -> tuple[int, ...]:
        if self._pending is None:
            return ()
        iteration, said, work = self._pending
        work.wait()
        self._pending = None
        return tuple(iteration - back for back in said.nonzero().flatten().tolist())
