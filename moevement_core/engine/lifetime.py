"""Which snapshots a rank has to keep. Pure: given what all ranks have, it answers with what may go.

A snapshot is *persisted* when every peer has acknowledged it. A run of snapshots that is persisted on every rank of the
job is the state to fall back to; only when a newer one is, the older may go. What no run can use that may still be
persisted goes at once, and the window under way is given up before the persisted one is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from moevement_core.policy.recoverable import RecoverableRun
from moevement_core.policy.schedule import Contents
from moevement_core.snapshot.agreement import NONE, Agreed, RunStatus
from moevement_core.strategies.strategy import Strategy


@dataclass(frozen=True, slots=True)
class Unneeded:
    """What may go now."""

    old: list[int]
    """Snapshots from before the run to fall back to."""
    lost: list[int]
    """Those that some rank will never have, so that no recovery can use them; peers are to drop them, too."""
    is_newer: bool
    """Whether there is a newer run to fall back to."""


class Lifetime:
    """Of the snapshots of one rank.

    Args:
        strategy: which runs there are.
        needed: first and last snapshot of the run that is persisted on every rank; ``NONE`` if there is none.
        is_whole: whether a run is as long as those of other stages that begin where it does.
    """

    def __init__(
        self,
        strategy: Strategy,
        needed: tuple[int, int] = (NONE, NONE),
        is_whole: Callable[[RecoverableRun], bool] = lambda run: True,
    ) -> None:
        self._strategy, self._is_whole = strategy, is_whole
        self.persisted, self.last_needed = needed
        """Where the newest run begins, and ends, that is persisted on every rank."""
        self._runs: dict[int, int] = {}
        """Runs of this rank that were said to be persisted: last snapshot by first. They may become the job's."""

    def learn(self, agreed: Agreed, held: Iterable[int]) -> Unneeded:
        """Take in where the job's runs stood an iteration ago.

        Args:
            agreed: by all ranks.
            held: iterations of this rank's snapshots.
        """
        is_newer = agreed.newest_persisted > self.persisted
        if is_newer:
            # In this order: interrupted in between, the run that is persisted already is still kept.
            self.last_needed = self._runs[agreed.newest_persisted]
            self.persisted = agreed.newest_persisted
        first_open = agreed.first_open(after=self.persisted)
        here = list(held)
        old = [one for one in here if one < self.persisted]
        lost = [one for one in here if self.last_needed < one < first_open]
        return Unneeded(old, lost, is_newer)

    def nothing_is_persisted(self) -> None:
        """The run that was is of no use any more; what is kept is so until there is another."""
        self.persisted = self.last_needed = NONE
        self._runs.clear()

    def statuses(
        self, iteration: int, deliverable: Mapping[int, Contents], had: Mapping[int, Contents]
    ) -> dict[int, RunStatus]:
        """How far the runs of this rank are, by their first snapshot.

        Args:
            iteration: whose snapshot comes next.
            deliverable: what snapshots hold that all peers have or may still have.
            had: what those hold that all peers have.
        """
        runs = [run for run in self._strategy.restore_points(had) if self._is_whole(run)]
        self._runs = {run.first: run.last for run in sorted(runs, key=_last) if run.first >= self.persisted}
        open_ = {run.first for run in self._strategy.restore_points(deliverable)}
        open_ |= set(self._strategy.open_starts(deliverable, is_gapless=iteration - 1 in deliverable))
        return dict.fromkeys(open_, RunStatus.OPEN) | dict.fromkeys(self._runs, RunStatus.PERSISTED)

    def under_way(self, deliverable: Mapping[int, Contents], *, peers_are_full: bool = False) -> list[int]:
        """What is given up when no memory is free: snapshots beyond every run whose delivery is a matter of time.

        Args:
            deliverable: what snapshots hold that all peers have or may still have.
            peers_are_full: whether one of them has no room for what comes next. Then it never will be for a run that is
                longer than others, as those are that reach over a reorder.
        """
        newest = next(self._strategy.restore_points(deliverable), None)
        if peers_are_full and not any(first > self.persisted for first in self._runs):
            newest = None
        needed = max((*self._runs.values(), self.last_needed, newest.last if newest else NONE))
        return sorted(taken for taken in deliverable if taken > needed)


def _last(run: RecoverableRun) -> int:
    return run.last
