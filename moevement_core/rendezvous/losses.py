"""Deaths of a job: all of them, and those that the job has not recovered from yet."""

from __future__ import annotations

import time

from moevement_core.rendezvous.roster import Death, NoticedBy


class Losses:
    """Deaths as the coordinator sees them."""

    def __init__(self) -> None:
        self.all: list[Death] = []
        """Spares included, in the order in which they were noticed."""
        self.new: list[Death] = []
        """Deaths of ranks since the last generation that entered training."""
        self.unrecovered: list[Death] = []
        """Deaths before them, from which the job has not recovered yet."""
        self._uncounted: list[int] = []

    def add(self, member: int, rank: int | None, pid: int, how: str, noticed_by: NoticedBy, silent_s: float) -> None:
        """A member is dead."""
        now = time.time()
        death = Death(member, rank, pid, how, now, noticed_by, now - silent_s)
        self.all.append(death)
        if rank is not None:
            self.new.append(death)
            self._uncounted.append(rank)

    def entered(self) -> None:
        """Ranks have entered training again: they recover from what is new."""
        self.unrecovered += self.new
        self.new.clear()

    def recovered(self) -> None:
        """Training has gone on since."""
        self.unrecovered.clear()

    def uncounted(self) -> list[int]:
        """Ranks that died since this was last asked."""
        ranks, self._uncounted = self._uncounted, []
        return ranks
