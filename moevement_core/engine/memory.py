"""Host memory that the snapshots of a rank take: the same figures before it is set aside and while training runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from moevement_core.engine.layout import OperatorState, kept_bytes
from moevement_core.policy.holding import Kept, most_held
from moevement_core.policy.schedule import LAG_ALLOWANCE, LATE_AT_PEERS, Schedule
from moevement_core.snapshot.blocks import BLOCK

IN_FLIGHT = 3
"""Snapshots that peers may not have yet: one is being captured, one is sent, and peers may lag."""


class SnapshotMemory:
    """Of one rank: what it needs itself, and what each peer needs that keeps its copies.

    A peer that lags has fewer snapshots and not more, and one that does not waits with the next, so what is set aside
    for lag is here alone.

    Args:
        states: live tensors of the operators that it holds.
        record_bytes: the most that a boundary record's tensors take.
        to_disk: whether a window more is kept, that is being written to disk while newer ones come.
        keeps_own: whether snapshots stay here when all peers have them.
        is_summed: whether peers keep sums of them, of which no part may go before all does.
    """

    def __init__(
        self, states: Mapping[str, OperatorState], record_bytes: int, *, to_disk: bool, keeps_own: bool = True,
        is_summed: bool = False,
    ) -> None:  # fmt: skip
        self.record_bytes, self.keeps_own = record_bytes, keeps_own
        self.gives_back = not (to_disk or is_summed)
        """Whether parts of a snapshot go before all of it does. Windows on disk share files, and sums are of all."""
        self._states, self._to_disk, self._is_summed = states, to_disk, is_summed
        self._weighed: dict[str, Kept] = {}
        """Of each schedule by its id."""

    def here(self, schedules: Sequence[Schedule]) -> int:
        """Bytes on this rank while one schedule follows the other and nothing breaks."""
        return self._here(self._of_changes(schedules, LAG_ALLOWANCE), schedules)

    def at_peer(self, schedules: Sequence[Schedule]) -> int:
        """Bytes on each peer, likewise."""
        return self._of_changes(schedules, LATE_AT_PEERS)

    @property
    def staging(self) -> int:
        """Bytes, at most, of what of it a peer receives at a time before it is added to a sum."""
        tensors = [
            tensor for state in self._states.values() for tensor in (*state.compute, *state.full, *state.gradient)
        ]
        return BLOCK + max((tensor.nbytes for tensor in tensors), default=0) if self._is_summed else 0

    def slots_at_peer(self, schedule: Schedule) -> tuple[tuple[int, ...], int]:
        """Bytes of each snapshot of a window, and how many of them a peer keeps at a time."""
        whole = self._kept(schedule)[:, 0]
        return tuple(whole.tolist()), schedule.slots_at_first(LATE_AT_PEERS, to_disk=self._to_disk)

    def here_after_gap(self, schedule: Schedule) -> int:
        """Bytes on this rank when a snapshot was left out, and a new run begins beside the one that is persisted."""
        return self._here(self._after_gap(schedule, LAG_ALLOWANCE), [schedule])

    def at_peer_after_gap(self, schedule: Schedule) -> int:
        """Bytes on each peer, likewise."""
        return self._after_gap(schedule, LATE_AT_PEERS)

    def run_bytes(self, snapshots: Iterable[tuple[Schedule, int]]) -> int:
        """Return the bytes of some snapshots.

        Args:
            snapshots: the schedule that each was taken by, and its slot.
        """
        return sum(int(self._kept(schedule)[slot, 0]) for schedule, slot in snapshots)

    def beside(self, run_bytes: int, schedule: Schedule) -> int:
        """Return the bytes of a run that is kept, of a whole window beside it, and of one snapshot more.

        The run may be longer than a window of now: one that reaches over a reorder is. Without room for all of it the
        window could never be delivered whole, and would be abandoned again and again.
        """
        return run_bytes + self._window(schedule) + int(self._kept(schedule)[:, 0].max(initial=0))

    def window_here(self, schedule: Schedule) -> int:
        """Bytes that a whole window needs on this rank."""
        return self._here(self._window(schedule), [schedule])

    def in_flight(self, schedules: Sequence[Schedule]) -> int:
        """Bytes on this rank of what peers may not have yet."""
        return max(most_held(self._kept(one)[:, :1], IN_FLIGHT) for one in schedules)

    def _here(self, nbytes: int, schedules: Sequence[Schedule]) -> int:
        return nbytes if self.keeps_own else min(nbytes, self.in_flight(schedules))

    def _needed(self, schedule: Schedule, lag: int) -> int:
        return self._most_held(schedule, schedule.slots_at_first(lag, to_disk=self._to_disk))

    def _after_gap(self, schedule: Schedule, lag: int) -> int:
        return self._most_held(schedule, schedule.slots_kept(lag, to_disk=self._to_disk))

    def _of_changes(self, schedules: Sequence[Schedule], lag: int) -> int:
        """A window of each is persisted when those of the next begin."""
        return max(
            *(self._needed(one, lag) for one in schedules),
            *(
                self._after_gap(new, lag) + max(0, self._window(old) - self._window(new))
                for old, new in pairwise(schedules)
            ),
            0,
        )

    def _window(self, schedule: Schedule) -> int:
        return int(self._kept(schedule)[:, 0].sum())

    def _most_held(self, schedule: Schedule, count: int) -> int:
        kept = self._kept(schedule)
        return most_held(kept if self.gives_back else kept[:, :1], count)

    def _kept(self, schedule: Schedule) -> Kept:
        if schedule.id not in self._weighed:
            self._weighed[schedule.id] = kept_bytes(schedule, self._states, self.record_bytes)
        return self._weighed[schedule.id]
