"""Cost of saving in the whole job, from sums over ranks, so that all ranks know the same cost."""

from __future__ import annotations

from collections.abc import Sequence

from moevement_core.overhead.cap import FEWEST_CLEAR, Evidence


class JobCost:
    """Cost of saving as the mean over ranks, and what a saved byte costs, for windows that are not measured yet."""

    def __init__(self) -> None:
        self._of_byte: float | None = None
        """Share of training time that each byte cost which the job saved in an iteration, at the last measurement."""

    def report(self, own: Evidence, saved_bytes: float) -> list[float]:
        """Return what this rank adds to the sums.

        Args:
            own: cost that this rank has measured.
            saved_bytes: mean bytes that this rank saves in an iteration at present.
        """
        has_measured = own.comparisons >= FEWEST_CLEAR
        measured = [1.0, own.share, own.error, own.comparisons] if has_measured else [0.0] * 4
        return [*measured, saved_bytes, *((0.0, 0.0) if self._of_byte is None else (1.0, self._of_byte))]

    def learn(self, sums: Sequence[float], *, has_failed: bool) -> Evidence | None:
        """Return the cost of saving; None if it is not known.

        Ranks wait for each other in every iteration, so all ranks measure about the same cost. If ranks fail, and the
        present windows are not measured yet, the cost of a byte in earlier windows stands in for a measurement: the
        next failure may come first.

        Args:
            sums: sums of the results of :meth:`report` over all ranks.
            has_failed: True if a rank has failed since the job began.
        """
        ranks, share, error, comparisons, job_bytes, knowing, of_byte = sums
        if ranks:
            self._of_byte = share / ranks / job_bytes if job_bytes else None
            return Evidence(share / ranks, error / ranks, comparisons / ranks)
        if not knowing or not has_failed:
            return None
        return Evidence(of_byte / knowing * job_bytes, error=0.0, comparisons=FEWEST_CLEAR)
