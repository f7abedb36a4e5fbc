"""Agreement of all ranks about recoverable runs: which are persisted on every rank, and which never will be.

A recoverable run consists of consecutive snapshots that together hold a whole state. Every iteration, each rank
proposes the status of its recent runs. The smallest status of a run over all ranks is its status in the job. The
reduction runs in the background, and ranks read its result one iteration later, so no rank waits for it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum

import torch

from moevement_core.comms.tree import Reduction, TreeGroup
from moevement_core.util.iterations import is_newer

HORIZON = 512
"""Number of newest iterations that an agreement covers. Runs that began before them have no status."""
MOST_PERIOD = HORIZON // 4
"""Largest number of iterations from the beginning of one window to the beginning of the next.

A run that the job still needs may have begun two such periods ago, and even earlier if peers receive snapshots late.
:data:`HORIZON` covers four periods.
"""


class RunStatus(IntEnum):
    """Status of a recoverable run; the smallest over all ranks is the status in the job."""

    NEVER = 0
    """Status of an abandoned run, and of an iteration at which no run begins."""
    OPEN = 1
    """Status of a run that may still become persisted: some peer has not received all of its snapshots yet."""
    PERSISTED = 2
    """Status of a run whose snapshots have all reached all peers."""


class Writing(IntEnum):
    """Progress of a rank with the window that the job is writing to disk.

    The smallest value over all ranks is the progress of the job.
    """

    NOTHING = 0
    """Status of a rank that writes no window."""
    BUSY = 1
    FAILED = 2
    """Status of a rank that could not write all of its files."""
    DURABLE = 3
    """Status of a rank whose files are all on disk."""


@dataclass(frozen=True, slots=True)
class Agreed:
    """Statuses of the job's runs, as all ranks agreed at one iteration."""

    iteration: int
    """Iteration in which ranks proposed the statuses. Runs that begin in this iteration or later have no status yet."""
    statuses: Mapping[int, RunStatus]
    """Status of each run, by the iteration of its first snapshot. Runs that are not in this mapping are NEVER."""
    writing: Writing = Writing.NOTHING
    """Progress of the rank that is least advanced in writing the window to disk."""
    is_winding_down: bool = False
    """True if any rank has received a request to end the job between two iterations."""

    @property
    def newest_persisted(self) -> int | None:
        """First snapshot of the newest run that is persisted on every rank; None if there is none."""
        return max((start for start, s in self.statuses.items() if s is RunStatus.PERSISTED), default=None)

    def first_open(self, after: int | None) -> int:
        """Return the first iteration after ``after`` at which an open or persisted run begins; None: the very first.

        If no open or persisted run begins after ``after``, return :attr:`iteration`.
        """
        may = (start for start, status in self.statuses.items() if status and is_newer(start, after))
        return min(may, default=self.iteration)


class Agreement(ABC):
    """Interface of an agreement on the job's runs. All ranks call both methods once an iteration, ``agreed`` first."""

    winding_down: Callable[[], bool] = staticmethod(lambda: False)
    """Function that returns True if this rank has received a request to end the job; called at every proposal."""

    @abstractmethod
    def propose(self, iteration: int, statuses: Mapping[int, RunStatus], writing: Writing = Writing.NOTHING) -> None:
        """Propose the statuses of this rank's runs, without waiting for other ranks.

        Args:
            iteration: iteration of the proposal, the same on all ranks.
            statuses: status of each run of this rank, by its first snapshot.
            writing: progress of this rank with the window on disk.
        """

    @abstractmethod
    def agreed(self) -> Agreed | None:
        """Return the statuses that the last proposals of all ranks have led to; None if ranks have proposed nothing.

        An implementation may return each result only once, and None until the next proposals.
        """

    def close(self) -> None:  # noqa: B027, not every agreement has a thread
        """End the thread of the agreement, if it has one; called when the generation is over."""


class SingleRankAgreement(Agreement):
    """Agreement of a job with a single rank: the result is what this rank proposed."""

    def __init__(self) -> None:
        self._proposed: Agreed | None = None

    def propose(self, iteration: int, statuses: Mapping[int, RunStatus], writing: Writing = Writing.NOTHING) -> None:
        self._proposed = Agreed(iteration, dict(statuses), writing, self.winding_down())

    def agreed(self) -> Agreed | None:
        return self._proposed


class GroupAgreement(Agreement):
    """Agreement over a tree of all ranks. A rank sends and receives at most five messages of 514 bytes an iteration.

    Args:
        group: group of all ranks, which only this agreement uses.
    """

    def __init__(self, group: TreeGroup) -> None:
        self._group = group
        self._pending: tuple[int, torch.Tensor, Callable[[], None]] | None = None

    def propose(self, iteration: int, statuses: Mapping[int, RunStatus], writing: Writing = Writing.NOTHING) -> None:
        values = torch.zeros(HORIZON + 2, dtype=torch.uint8)
        values[HORIZON] = int(writing)  # an element of its own, because the window may have begun at any time
        values[HORIZON + 1] = int(not self.winding_down())
        for start, value in statuses.items():
            if 0 <= iteration - start < HORIZON:
                values[iteration - start] = int(value)
        self._pending = iteration, values, self._group.reduce_later(values, Reduction.MIN)

    def agreed(self) -> Agreed | None:
        if self._pending is None:
            return None
        iteration, values, wait = self._pending
        wait()
        self._pending = None
        backs = values[:HORIZON].nonzero().flatten().tolist()
        statuses = {iteration - back: RunStatus(int(values[back])) for back in backs}
        return Agreed(iteration, statuses, Writing(int(values[HORIZON])), not values[HORIZON + 1])

    def close(self) -> None:
        self._group.close()
