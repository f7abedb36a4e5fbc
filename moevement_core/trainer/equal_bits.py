"""Prediction whether a replay restores equal bits, or values whose last bits differ because sums had another order.

Three causes change last bits and are no error:

- kernels that add in no fixed order
- a replacement on another kind of processor
- under NCCL, a replacement on another node or device, because NCCL orders sums by the nodes and devices of ranks

If a rank loads state and executes no iteration again, its bits are equal in all these cases.
"""

from __future__ import annotations

from collections.abc import Sequence

from moevement_core.comms.exchange import all_gather_objects
from moevement_core.recovery.plan import RecoveryPlan, Report
from moevement_core.restart.generation import generation
from moevement_core.storage.manifest import Manifest
from moevement_core.util.arithmetic import arithmetic, is_repeatable, sums_follow_places
from moevement_core.util.iterations import is_newer, newest_of

NOT_REPEATABLE = "kernels add in no fixed order (without --deterministic-mode)"


def placement() -> str:
    """Return a digest of the node and device of every rank; empty if the order of sums does not depend on these."""
    now = generation()
    if now is None or not sums_follow_places():
        return ""
    return now.roster.placement


class PlacementHistory:
    """History of placements (node and device of each rank), back to the oldest snapshot that the job may need."""

    def __init__(self) -> None:
        self._placements: list[tuple[int, str]] = []
        """Pairs of an iteration and the placement that came into force after it."""

    def note(self, iteration: int, placement: str, since: int | None = None) -> None:
        """Record that ranks execute all iterations after ``iteration`` on the nodes and devices of ``placement``.

        Args:
            iteration: iteration whose state is live.
            placement: current placement.
            since: iteration after which the placement is in force, as survivors report; None if unknown. Only a
                rank without a history uses this value.
        """
        if not self._placements and since is not None:
            self._placements.append((min(iteration, since), placement))
        while self._placements and self._placements[-1][0] >= iteration:
            self._placements.pop()
        if not self._placements or self._placements[-1][1] != placement:
            self._placements.append((iteration, placement))

    def unchanged_since(self, placement: str) -> int | None:
        """Return the iteration after which ``placement``, the current placement, came into force.

        The result is a very large number if ranks have executed no iteration under this placement yet, and None without
        a history.
        """
        if not self._placements:
            return None
        after, newest = self._placements[-1]
        return after if newest == placement else _NEVER

    def forget_before(self, iteration: int) -> None:
        """Forget placements that ended at ``iteration`` or earlier."""
        while len(self._placements) > 1 and self._placements[1][0] <= iteration:
            self._placements.pop(0)


_NEVER = 1 << 62
"""Result of :meth:`PlacementHistory.unchanged_since` if no iteration was computed under the current placement yet."""


def why_replay_may_differ(reports: Sequence[Report], plans: Sequence[RecoveryPlan]) -> str:
    """Return why ``plans`` may restore a state that differs from the lost state in last bits; empty if not.

    Plans without a replay restore equal bits, because ranks only load state and repeat updates, which are elementwise.

    Args:
        reports: report of each rank of the job.
        plans: plans that the ranks will execute.
    """
    replayed = [plan.iterations for plan in plans if plan.iterations]
    if not replayed:
        return ""
    kinds = sorted({report.arithmetic for report in reports})
    if len(kinds) > 1:
        return f"ranks run on different processors or libraries: {' and '.join(kinds)}"
    if not all(report.is_repeatable for report in reports):
        return NOT_REPEATABLE
    if not is_newer(min(iterations.start for iterations in replayed), placed_since(reports)):
        return "ranks are on other nodes or devices than when these iterations were computed first"
    return ""


def placed_since(reports: Sequence[Report]) -> int | None:
    """Return the latest iteration that any rank reports as ``placed_since``; None if no rank has a history.

    In the iterations after it, no rank changed its node or device.
    """
    return newest_of(report.placed_since for report in reports)


def arithmetic_of_all() -> tuple[str, ...]:
    """Return the arithmetic (processor, libraries) of each rank, or one entry if all are equal. Every rank calls it.

    If sums depend on the nodes and devices of ranks, the last entry is a digest of these (:func:`placement`).
    """
    of_ranks = all_gather_objects(arithmetic(), str)
    placed = (f"placement {placement()}",) if placement() else ()
    return (*(of_ranks if len(set(of_ranks)) > 1 else of_ranks[:1]), *placed)


def why_window_may_differ(manifest: Manifest, here: tuple[str, ...]) -> str:
    """Return why a replay of a window may differ in last bits from the job that wrote the window; empty if not.

    Args:
        manifest: manifest of the window.
        here: result of :func:`arithmetic_of_all` in this job.
    """
    if not manifest.arithmetic:
        return f"the manifest of {manifest.name} does not name the processors that wrote it"
    if manifest.arithmetic == here:
        return "" if is_repeatable() else NOT_REPEATABLE
    then, now = (" and ".join(sorted(set(kinds))) for kinds in (manifest.arithmetic, here))
    if then == now:
        return f"{manifest.name} was written on {then}; now other ranks run on these processors"
    return f"{manifest.name} was written on {then}, and these ranks are on {now}"
