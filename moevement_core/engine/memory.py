"""Host memory that the snapshots of a rank take: the same figures before it is set aside and while training runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from moevement_core.engine.layout import OperatorState, kept_bytes
from moevement_core.policy.holding import Kept, most_held
from moevement_core.policy.schedule import LAG_ALLOWANCE, Schedule

IN_FLIGHT = 2 + LAG_ALLOWANCE
"""Snapshots that peers may not have yet: one is being captured, one is sent, and peers may lag."""


class SnapshotMemory:
    """Of one rank: what each peer needs that keeps its copies, and what it needs itself.

    Args:
        states: live tensors of the operators that it holds.
        record_bytes: the most that a boundary record's tensors take.
        to_disk: whether a window more is kept, that is being written to disk while newer ones come.
        keeps_own: whether snapshots stay here when all peers have them.
        is_summed: whether peers keep sums of them, of which no part may go before all does.
    """

    def __init__(
        self,
        states: Mapping[str, OperatorState],
        record_bytes: int,
        *,
        to_disk: bool,
        keeps_own: bool = True,
        is_summed: bool = False,
    ) -> None:
        self.record_bytes, self.keeps_own = record_bytes, keeps_own
        self.gives_back = not (to_disk or is_summed)
        """Whether parts of a snapshot go before all of it does. Windows on disk share files, and sums are of all."""
        self._states, self._to_disk = states, to_disk
        self._weighed: dict[str, Kept] = {}
        """Of each schedule by its id."""

    def here(self, nbytes: int, schedules: Sequence[Schedule]) -> int:
        """Of what a peer needs, the bytes that this rank needs itself: all, or what peers may not have yet."""
        if self.keeps_own:
            return nbytes
        return min(nbytes, max(most_held(self._kept(one)[:, :1], IN_FLIGHT) for one in schedules))

    def needed(self, schedule: Schedule) -> int:
        """Bytes while ``schedule`` is in force and nothing breaks."""
        return self._most_held(schedule, schedule.slots_at_first(LAG_ALLOWANCE, to_disk=self._to_disk))

    def after_gap(self, schedule: Schedule) -> int:
        """Bytes when a snapshot was left out, and a new run begins beside the one that is persisted."""
        return self._most_held(schedule, schedule.slots_kept(LAG_ALLOWANCE, to_disk=self._to_disk))

    def of_changes(self, schedules: Sequence[Schedule]) -> int:
        """Bytes while one schedule follows the other: a window of each is persisted when those of the next begin."""
        changes = pairwise(schedules)
        return max(
            *map(self.needed, schedules),
            *(self.after_gap(new) + max(0, self.window(old) - self.window(new)) for old, new in changes),
            0,
        )

    def window(self, schedule: Schedule) -> int:
        """Bytes of all snapshots of one window."""
        return int(self._kept(schedule)[:, 0].sum())

    def _most_held(self, schedule: Schedule, count: int) -> int:
        kept = self._kept(schedule)
        return most_held(kept if self.gives_back else kept[:, :1], count)

    def _kept(self, schedule: Schedule) -> Kept:
        if schedule.id not in self._weighed:
            self._weighed[schedule.id] = kept_bytes(schedule, self._states, self.record_bytes)
        return self._weighed[schedule.id]
