"""Lifetime of snapshots: pure decisions about the snapshots that a rank keeps, made from the reports of all ranks.

A snapshot is *persisted* when every peer has acknowledged it. A *run* consists of consecutive snapshots that together
hold a whole state. After a failure, the job goes back to the newest run that is persisted on every rank. A rank frees
this run only when a newer run is persisted on every rank. It frees a snapshot at once if no run with that snapshot can
become persisted any more. If memory is short, ranks abandon the unfinished window and keep the persisted run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from moevement_core.policy.recoverable import RecoverableRun
from moevement_core.policy.schedule import Contents
from moevement_core.snapshot.agreement import HORIZON, Agreed, RunStatus
from moevement_core.strategies.strategy import Strategy
from moevement_core.util.iterations import is_newer, newest_of


class RunSpan(NamedTuple):
    """Snapshots of a run."""

    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Unneeded:
    """Snapshots that a rank may free now."""

    old: list[int]
    """Iterations of snapshots from before the run to which a recovery would go back."""
    lost: list[int]
    """Iterations of snapshots that no recovery can use: no run with them can be persisted on all ranks any more.

    Peers drop these snapshots as well.
    """
    withheld: list[int]
    """Iterations of snapshots that stay where they are, but are sent to no further peer.

    The last recovery has loaded them, and there is no other run to go back to. No run with them can be persisted on all
    ranks any more.
    """

    @property
    def lost_ranges(self) -> list[tuple[int, int]]:
        """First and last of :attr:`lost`, before and after :attr:`withheld`."""
        before = [iteration for iteration in self.lost if self.withheld and iteration < self.withheld[0]]
        after = [iteration for iteration in self.lost if not self.withheld or iteration > self.withheld[-1]]
        return [(min(part), max(part)) for part in (before, after) if part]


class Lifetime:
    """Decisions about the snapshots that one rank keeps.

    Args:
        strategy: strategy that finds the runs in a set of snapshots.
        persisted: run that is persisted on every rank; None if there is none.
        is_whole: function that returns True if a run is as long as the runs of other stages from the same first
            snapshot; see :meth:`Checkpointer._is_whole`.
    """

    def __init__(
        self,
        strategy: Strategy,
        persisted: RunSpan | None = None,
        is_whole: Callable[[RecoverableRun], bool] = lambda run: True,
    ) -> None:
        self._strategy, self._is_whole = strategy, is_whole
        self.persisted = persisted
        """Newest run that is persisted on every rank; None without one."""
        self._restored = range(0)
        """Snapshots of the run from which the last recovery has restored state."""
        self._runs: dict[int, int] = {}
        """Runs that this rank last reported as persisted: the last snapshot of each, by first snapshot.

        All ranks may then agree on one of these runs as the newest persisted run of the job.
        """

    def learn(self, agreed: Agreed, held: Iterable[int]) -> Unneeded:
        """Apply what all ranks agreed on in the previous iteration, and return the snapshots to free.

        Args:
            agreed: statuses of the job's runs.
            held: iterations of this rank's snapshots.
        """
        newest_first = agreed.newest_persisted
        if newest_first is not None and is_newer(newest_first, self.first_needed):
            self.persisted = RunSpan(newest_first, self._runs[newest_first])
        first, last, here = self.first_needed, self.last_needed, list(held)
        first_open = agreed.first_open(after=first)
        old = [iteration for iteration in here if first is not None and iteration < first]
        never = [iteration for iteration in here if iteration < first_open and is_newer(iteration, last)]
        withheld = [iteration for iteration in never if iteration in self._kept_restored]
        return Unneeded(old, [iteration for iteration in never if iteration not in withheld], withheld)

    def useless_copies(self, agreed: Agreed, last: int | None) -> list[tuple[int, int]]:
        """Return the snapshots of any rank that no recovery can use, as first and last iteration of each range.

        A rank asks its peers to drop such snapshots of its own. But a replacement that took over newer state has never
        had the snapshots of its predecessor. So the ranks that keep copies of them drop these too, because they would
        have no memory for new snapshots otherwise.

        Args:
            agreed: statuses of the job's runs, which :meth:`learn` has applied.
            last: last snapshot of the persisted run by its schedule; None without such a run.
        """
        end, kept = agreed.first_open(after=self.first_needed), self._kept_restored
        newest = newest_of((last, self.last_needed))
        begin = end - HORIZON if newest is None else newest + 1
        ranges = (
            [range(begin, min(kept.start, end)), range(max(begin, kept.stop), end)] if kept else [range(begin, end)]
        )
        return [(each[0], each[-1]) for each in ranges if each]

    @property
    def first_needed(self) -> int | None:
        """First snapshot of the persisted run; None without one."""
        return None if self.persisted is None else self.persisted.first

    @property
    def last_needed(self) -> int | None:
        """Last snapshot of the persisted run; None without one."""
        return None if self.persisted is None else self.persisted.last

    def catch_up(self, persisted: int | None) -> None:
        """Learn after a failure that a newer run is persisted on every rank, if this rank has reported it as persisted.

        The failure may have interrupted this rank between its report and :meth:`learn`. Without this call, the rank
        could free the run to which all others would go back.

        Args:
            persisted: first snapshot of the newest run that any rank knows to be persisted on every rank; None if no
                rank knows one.
        """
        if persisted is not None and is_newer(persisted, self.first_needed) and persisted in self._runs:
            self.persisted = RunSpan(persisted, self._runs[persisted])

    def restored(self, first: int, last: int) -> None:
        """Keep the run from which a recovery has restored state, until any run is persisted on every rank.

        The run need not have been persisted on every rank, and may never be: a replacement may have no memory for its
        copies. If another run is persisted, the job can go back to that one, and this method has no effect. Every rank
        calls it with the same arguments.

        Args:
            first: first snapshot of the run.
            last: last snapshot of the run, the largest over all stages.
        """
        self._restored = range(first, last + 1)

    @property
    def _kept_restored(self) -> range:
        """Snapshots that the last recovery has loaded, if no run is persisted on every rank; else empty."""
        return self._restored if self.persisted is None else range(0)

    @property
    def fallback(self) -> RunSpan | None:
        """Run to which a recovery would go back; None if there is none."""
        kept = self._kept_restored
        return RunSpan(kept[0], kept[-1]) if kept else self.persisted

    def nothing_is_persisted(self) -> None:
        """Forget the persisted run. Snapshots are kept until a new run is persisted on every rank."""
        self.persisted = None
        self._restored = range(0)
        self._runs.clear()

    def statuses(
        self, iteration: int, deliverable: Mapping[int, Contents], had: Mapping[int, Contents]
    ) -> dict[int, RunStatus]:
        """Return the status of each run of this rank, by its first snapshot.

        Args:
            iteration: the iteration of the next snapshot.
            deliverable: contents, by iteration, of snapshots that all peers have or may still receive.
            had: contents, by iteration, of snapshots that all peers have.
        """
        runs, first = [run for run in self._strategy.restore_points(had) if self._is_whole(run)], self.first_needed
        self._runs = {run.first: run.last for run in sorted(runs, key=_last) if first is None or run.first >= first}
        open_ = {run.first for run in self._strategy.restore_points(deliverable)}
        open_ |= set(self._strategy.open_starts(deliverable, is_gapless=iteration - 1 in deliverable))
        return dict.fromkeys(open_, RunStatus.OPEN) | dict.fromkeys(self._runs, RunStatus.PERSISTED)

    def under_way(self, deliverable: Mapping[int, Contents], *, peers_are_full: bool = False) -> list[int]:
        """Return the snapshots to abandon when no memory is free, the oldest first.

        These are the snapshots after the newest run that peers have, or that they will receive without more memory.

        Args:
            deliverable: contents, by iteration, of snapshots that all peers have or may still receive.
            peers_are_full: True if a peer has no memory for the next snapshot. Such a peer can never receive all of a
                run that is longer than a window, as after a reorder. The snapshots of that run are then abandoned, too.
        """
        run = next(self._strategy.restore_points(deliverable), None)
        if peers_are_full and not any(is_newer(first, self.first_needed) for first in self._runs):
            run = None
        kept = max(self._kept_restored, default=None)
        needed = newest_of((*self._runs.values(), self.last_needed, kept, run.last if run else None))
        return sorted(taken for taken in deliverable if is_newer(taken, needed))


def _last(run: RecoverableRun) -> int:
    return run.last
