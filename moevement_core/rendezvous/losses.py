"""Record of all deaths in a job, and of those from which the job has not recovered yet."""

from __future__ import annotations

import time

from moevement_core.rendezvous.roster import Death, NoticedBy


class Losses:
    """Deaths of ranks and spares that the coordinator of a job has noticed."""

    def __init__(self) -> None:
        self.all: list[Death] = []
        """Every death, including those of spares, in the order in which they were noticed."""
        self.new: list[Death] = []
        """Deaths of ranks since a generation last entered training; no recovery from them has begun."""
        self.unrecovered: list[Death] = []
        """Deaths of ranks from which a recovery has begun, but has not ended."""
        self.uncounted: list[int] = []
        """Ranks whose deaths the coordinator has not counted yet; a rank that died twice is in the list twice."""

    def add(self, member: int, rank: int | None, pid: int, how: str, noticed_by: NoticedBy, silent_s: float) -> None:
        """Record the death of a member.

        Args:
            member: the member.
            rank: its rank; None for a spare.
            pid: its process id.
            how: description of its end, for log lines.
            noticed_by: way in which the death was noticed.
            silent_s: seconds since the member was last known to live.
        """
        now = time.time()
        death = Death(member, rank, pid=pid, how=how, at=now, noticed_by=noticed_by, last_seen=now - silent_s)
        self.all.append(death)
        if rank is not None:
            self.new.append(death)
            self.uncounted.append(rank)

    def entered(self) -> None:
        """Note that a generation has entered training, and begins to recover from all deaths in :attr:`new`."""
        self.unrecovered += self.new
        self.new.clear()

    def recovered(self) -> None:
        """Note that a generation has recovered and resumed training."""
        self.unrecovered.clear()
