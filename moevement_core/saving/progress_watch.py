"""Watch over checkpointing: announces persisted windows, and warns of silent peers, overdue windows and high cost."""

from __future__ import annotations

from collections.abc import Sequence

from moevement_core.engine.checkpointer import Checkpointer
from moevement_core.overhead.cap import RECENT, CapWatch
from moevement_core.overhead.meter import OverheadMeter
from moevement_core.policy.schedule import LAG_ALLOWANCE
from moevement_core.replication.sender import Sender
from moevement_core.run.events import AboveCap, NothingPersisted, WindowPersisted
from moevement_core.saving.reports import Reports
from moevement_core.util.iterations import is_newer


class ProgressWatch:
    """Watch over one rank's checkpointing. Collective: all ranks call each method in the same order, once an iteration.

    Args:
        checkpointer: checkpointer to watch.
        reports: reports to the people who run the job.
        peer_timeout_s: seconds without an answer after which a peer is reported.
        announced: first snapshot of the newest window that the job logged as persisted; None without one.
        meter: meter of the cost of saving; None to ignore the cost.
        cap: largest share of training time that saving may cost; None for no limit.
    """

    def __init__(
        self,
        checkpointer: Checkpointer,
        reports: Reports,
        peer_timeout_s: float,
        announced: int | None,
        meter: OverheadMeter | None = None,
        cap: float | None = None,
    ) -> None:
        self._meter, self._cap_watch = meter, CapWatch(cap) if cap is not None else None
        self.announced = announced
        self.longest_unpersisted = 0
        """Largest number of consecutive iterations in which the newest persisted recoverable run stayed the same."""
        self._checkpointer, self._reports = checkpointer, reports
        self._peer_timeout_s = peer_timeout_s
        self._persisted_since: tuple[int | None, int] | None = None
        """First snapshot of the newest persisted recoverable run, and the iteration at which this rank first saw it."""
        self._silent: set[int] = set()

    def allowed_share(self, worth: float) -> float | None:
        """Return the largest share of training time that saving may cost at present; None without a cap.

        Args:
            worth: share that saving should cost because ranks fail. If it is above the cap, it takes the cap's place.
        """
        return None if self._cap_watch is None else max(self._cap_watch.cap, worth)

    def forget_peers(self) -> None:
        """Forget which peers were silent, because a new generation has other peers."""
        self._silent.clear()

    def look(self, committed: int, senders: Sequence[Sender], worth: float = 0.0) -> None:
        """Check peers, persistence and cost before the iteration after ``committed``.

        Args:
            committed: last committed iteration.
            senders: senders of this rank's copies.
            worth: share of training time that saving should cost because ranks fail. The watch warns of no cost below.
        """
        self._watch_peers(senders)
        self._watch_persistence(committed)
        self._watch_cost(committed, worth)
        self._announce(len(senders))

    def _watch_peers(self, senders: Sequence[Sender]) -> None:
        for sender in senders:
            silent = sender.silent_s > self._peer_timeout_s
            if silent and sender.peer not in self._silent:
                self._silent.add(sender.peer)
                self._reports.report(
                    f"peer {sender.peer} has not answered for {sender.silent_s:.0f} s; training continues"
                )  # fmt: skip
            elif not silent:
                self._silent.discard(sender.peer)

    def _watch_persistence(self, committed: int) -> None:
        """Warn if the newest persisted window stays the same for longer than two windows take.

        A failure would then cost more than planned, because ranks would repeat more iterations.
        """
        persisted = self._checkpointer.progress.persisted
        if self._persisted_since is None or persisted != self._persisted_since[0]:
            self._persisted_since = persisted, committed
        since = committed - self._persisted_since[1]
        self.longest_unpersisted = max(self.longest_unpersisted, since)
        size = self._checkpointer.history.newest.size
        limit = 2 * size + LAG_ALLOWANCE + 1
        if since < limit or since % limit or (since // limit) & (since // limit - 1):  # limit times 1, 2, 4, 8 ...
            return
        newest = "no window" if persisted is None else f"no window after that of iteration {persisted}"
        text = (
            f"for {since} iterations, {newest} has reached all peers (a window has {size} iterations); "
            "a failure now costs more than planned. The logs of the ranks name peers that lag or refuse copies"
        )
        self._reports.warn(text, NothingPersisted(text, since, persisted))

    def _watch_cost(self, committed: int, worth: float) -> None:
        """Warn if saving costs more than the cap allows, for example because flags fix the window."""
        if self._meter is None or self._cap_watch is None or committed % RECENT:
            return
        evidence = self._meter.evidence()
        if not self._cap_watch.has_passed(evidence, worth):
            return
        schedule, cap = self._checkpointer.history.newest, self._cap_watch.cap
        text = (
            f"saving costs {100 * evidence.share:.1f}% of training (standard error {100 * evidence.error:.1f}), more "
            f"than the {100 * cap:g}% of --moevement-overhead-cap; windows have {schedule.snapshots} snapshots every "
            f"{schedule.size} iterations. To lower the cost: leave out --moevement-window and "
            "--moevement-dense-interval, so that windows adapt to the cap; give --moevement-protection parity:3+1 in "
            "place of copies; give --moevement-replicas 1; or send copies over a separate link (--moevement-interfaces)"
        )
        self._reports.warn(
            text, AboveCap(text, iteration=committed, overhead=evidence.share, error=evidence.error, cap=cap)
        )

    def _announce(self, peers: int) -> None:
        """Log a line and record an event for each window that is persisted on every rank."""
        progress = self._checkpointer.progress
        persisted = progress.persisted
        if persisted is None or not is_newer(persisted, self.announced) or not self._reports.is_recorded:
            return
        schedule = self._checkpointer.history.at(persisted)
        if schedule.slot(persisted) == 0 or self.announced is None:
            self.announced = persisted
            self._reports.log(
                f"the window whose first snapshot is {persisted} is persisted on every rank "
                f"({schedule.snapshots} slots, {peers} peers; replication lag {progress.lag})"
            )
            self._reports.event(WindowPersisted(persisted, schedule.size, schedule.id, progress.lag))
