"""Host memory that one rank's snapshots need, computed the same way before a job starts and while training runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from moevement_core.engine.layout import OperatorState, kept_bytes
from moevement_core.policy.holding import Kept, most_held
from moevement_core.policy.schedule import LAG_ALLOWANCE, LATE_AT_PEERS, Schedule, slots_with_snapshot
from moevement_core.snapshot.blocks import BLOCK

IN_FLIGHT = 3
"""Number of snapshots that peers may not have yet: one in capture, one being sent, and one because peers may lag."""
MOST_WEIGHED = 64
"""Number of schedules whose bytes are remembered; to remember another one, all of them are forgotten."""


class SnapshotMemory:
    """Bytes that the snapshots of one rank need, on the rank itself and on each peer that keeps copies.

    Only the rank itself sets memory aside for lag. A peer that lags holds fewer snapshots than a peer that does not, so
    it needs no memory for lag. If a peer has no free memory, the rank waits with the next snapshot.

    Args:
        states: live tensors of the operators that the rank holds.
        record_bytes: most bytes that the tensors of a boundary record take.
        to_disk: True if the rank also keeps the window that it is writing to disk while newer snapshots arrive.
        keeps_own_copies: True if the rank keeps own snapshots after all its peers have them.
        is_summed: True if peers keep parity. Parity is a sum of whole snapshots, so ranks free no part of a snapshot.
    """

    def __init__(
        self, states: Mapping[str, OperatorState], record_bytes: int, *, to_disk: bool, keeps_own_copies: bool = True,
        is_summed: bool = False,
    ) -> None:  # fmt: skip
        self.record_bytes, self.keeps_own_copies = record_bytes, keeps_own_copies
        self.gives_back = not (to_disk or is_summed)
        """True if a rank may free a part of a snapshot. Windows on disk and parity need whole snapshots."""
        self._states, self._to_disk, self.is_summed = states, to_disk, is_summed
        self._weighed: dict[tuple[str, bool], Kept] = {}
        """Results of :func:`kept_bytes`, by the schedule's id and the argument ``at_peers``."""

    def here(self, schedules: Sequence[Schedule]) -> int:
        """Return the bytes of own snapshots if ``schedules`` follow each other and no snapshot is left out."""
        durable = max(self._durable(schedule) for schedule in schedules)
        return self._here(self._of_changes(schedules, LAG_ALLOWANCE), schedules) + durable

    def at_peer(self, schedules: Sequence[Schedule]) -> int:
        """Return the bytes of copies on each peer if ``schedules`` follow each other and no snapshot is left out."""
        return self._of_changes(schedules, LATE_AT_PEERS, at_peers=True)

    @property
    def staging(self) -> int:
        """Most bytes that a peer receives before it adds them to a parity sum; 0 without parity."""
        tensors = [
            tensor for state in self._states.values() for tensor in (*state.compute, *state.full, *state.gradient)
        ]
        return BLOCK + max((tensor.nbytes for tensor in tensors), default=0) if self.is_summed else 0

    def slots_here(self, schedule: Schedule) -> tuple[int, ...]:
        """Return the bytes of each own snapshot of a window of ``schedule``, in the order of slots."""
        return tuple(self._kept(schedule)[:, 0].tolist())

    def slots_at_peer(self, schedule: Schedule) -> tuple[tuple[int, ...], int]:
        """Return the bytes on a peer of each snapshot of a window, and the number of snapshots that a peer keeps."""
        whole = self._kept(schedule, at_peers=True)[:, 0]
        return tuple(whole.tolist()), schedule.retention(LATE_AT_PEERS, to_disk=self._to_disk).slots_at_first

    def here_after_gap(self, schedule: Schedule) -> int:
        """Return the bytes of own snapshots (the persisted run and a new run) after a snapshot was left out."""
        return self._here(self._after_gap(schedule, LAG_ALLOWANCE), [schedule]) + self._durable(schedule)

    def at_peer_after_gap(self, schedule: Schedule) -> int:
        """Return the bytes of copies on each peer (the persisted run and a new run) after a snapshot was left out."""
        return self._after_gap(schedule, LATE_AT_PEERS, at_peers=True)

    def run_bytes(self, snapshots: Iterable[tuple[Schedule, int]]) -> int:
        """Return the bytes of ``snapshots`` together.

        Args:
            snapshots: schedule and slot of each snapshot.
        """
        # Not every slot has a row: a schedule with an interval has slots without a snapshot.
        rows: dict[str, dict[int, int]] = {}
        total = 0
        for schedule, slot in snapshots:
            if schedule.id not in rows:
                rows[schedule.id] = {taken: row for row, taken in enumerate(slots_with_snapshot(schedule))}
            total += int(self._kept(schedule)[rows[schedule.id][slot], 0])
        return total

    def beside(self, run_bytes: int, schedule: Schedule) -> int:
        """Return the bytes of the persisted run, of a whole new window, and of one more snapshot, together.

        A run across a reorder of operators is longer than a window. If peers had less memory than the result, no new
        window would fit beside such a run, and ranks would abandon every window.

        Args:
            run_bytes: bytes of the persisted run.
            schedule: schedule of the new window.
        """
        return run_bytes + self._window(schedule) + int(self._kept(schedule)[:, 0].max(initial=0))

    def window_here(self, schedule: Schedule) -> int:
        """Return the bytes of own snapshots of a whole window of ``schedule``."""
        return self._here(self._window(schedule), [schedule])

    def in_flight(self, schedules: Sequence[Schedule]) -> int:
        """Return the bytes of own snapshots that peers may not have yet."""
        return max(most_held(self._kept(schedule)[:, :1], IN_FLIGHT) for schedule in schedules)

    def _here(self, nbytes: int, schedules: Sequence[Schedule]) -> int:
        return nbytes if self.keeps_own_copies else min(nbytes, self.in_flight(schedules))

    def _needed(self, schedule: Schedule, lag: int, *, at_peers: bool = False) -> int:
        return self._most_held(
            schedule, schedule.retention(lag, to_disk=self._to_disk).slots_at_first, at_peers=at_peers
        )

    def _after_gap(self, schedule: Schedule, lag: int, *, at_peers: bool = False) -> int:
        return self._most_held(schedule, schedule.retention(lag, to_disk=self._to_disk).slots, at_peers=at_peers)

    def _of_changes(self, schedules: Sequence[Schedule], lag: int, *, at_peers: bool = False) -> int:
        """Return the peak bytes of snapshots if each schedule has a persisted window before the next one begins."""
        return max(
            *(self._needed(schedule, lag, at_peers=at_peers) for schedule in schedules),
            *(
                self._after_gap(new, lag, at_peers=at_peers)
                + max(0, self._window(old, at_peers=at_peers) - self._window(new, at_peers=at_peers))
                for old, new in pairwise(schedules)
            ),
            0,
        )

    def _durable(self, schedule: Schedule) -> int:
        """Return the bytes of own snapshots that a rank keeps for operators that the newest window on disk lacks."""
        kept = schedule.retention(LAG_ALLOWANCE, to_disk=self._to_disk).for_disk
        return most_held(self._kept(schedule)[:, :1], kept)

    def _window(self, schedule: Schedule, *, at_peers: bool = False) -> int:
        return int(self._kept(schedule, at_peers=at_peers)[:, 0].sum())

    def _most_held(self, schedule: Schedule, count: int, *, at_peers: bool = False) -> int:
        kept = self._kept(schedule, at_peers=at_peers)
        return most_held(kept if self.gives_back else kept[:, :1], count)

    def _kept(self, schedule: Schedule, *, at_peers: bool = False) -> Kept:
        at_peers = at_peers and not self.is_summed  # parity is a sum of whole snapshots
        if (schedule.id, at_peers) not in self._weighed:
            if len(self._weighed) >= MOST_WEIGHED:  # some strategies have another schedule in every iteration
                self._weighed.clear()
            self._weighed[schedule.id, at_peers] = kept_bytes(
                schedule, self._states, self.record_bytes, at_peers=at_peers
            )
        return self._weighed[schedule.id, at_peers]
