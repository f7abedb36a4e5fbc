"""State that the ranks of an elastic job keep while the job changes its number of ranks.

A survivor may get another rank. So it copies its state to host memory and drops the model, before it builds a new one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from moevement_core.comms.exchange import all_gather_objects
from moevement_core.elastic.exchange import Piece
from moevement_core.elastic.layout import Formation, RankLayout
from moevement_core.recovery.formation_snapshots import FormationSnapshots
from moevement_core.recovery.sources import MemorySource
from moevement_core.restart.generation import generation
from moevement_core.session.rank_report import RankReport, report_of
from moevement_core.session.session import Session
from moevement_core.trainer.commit import Mark
from moevement_core.trainer.interface import BindingInterface


@dataclass(frozen=True, eq=False)
class KeptState:
    """State that a survivor brings into the resized job: its full state after an iteration, and snapshots."""

    report: RankReport
    mark: Mark | None
    """Newest iteration that the rank has committed, with its boundary record.

    None if a failure interrupted the rank in the middle of an update; the rank then brings only snapshots.
    """
    pieces: Sequence[Piece]
    """Full state after the iteration of :attr:`mark`, in host memory."""
    layout: RankLayout
    """Position that the rank had when it reached this state."""
    offer: Any
    """Result of ``Recut.offer``."""
    results: Any
    """Result of ``Recut.results`` for the iteration of :attr:`mark`."""
    snapshots: Sequence[FormationSnapshots]
    """Snapshots that this rank captured or keeps for peers: one entry for each set of ranks that the job had.

    Snapshots from before the last change of ranks are included until the job has persisted a window after it.
    """

    def mark_of(self, iteration: int) -> Mark | None:
        """Return the mark of ``iteration``; None if the rank has not committed that iteration."""
        return self.mark if self.mark is not None and self.mark.iteration == iteration else None


@dataclass
class Resizing:
    """State of an elastic job that a process keeps when it gets a new model. A process has one object of this class."""

    formation: Formation | None = None
    """Layouts of all ranks since the job last changed its ranks."""
    formed_at: int = 0
    """Iteration from which the job went on in :attr:`formation`."""
    start: int = 0
    """Number of the start of the job since which the state of this process has been trained; 0 is the first."""
    kept: KeptState | None = None
    """State that this rank keeps while the job changes its ranks; None at all other times."""

    def formed(self, binding: BindingInterface, start: int) -> None:
        """Record the layouts of all ranks, after every rank has built its model. Collective.

        Args:
            binding: binding of this rank, at the iteration from which the job goes on.
            start: number of the start of the job since which the ranks have trained.
        """
        now = generation()
        layouts = tuple(all_gather_objects(binding.recut().layout(), RankLayout))
        self.formation = Formation(now.roster.generation if now is not None else 0, layouts)
        self.start, self.formed_at = start, binding.iteration

    def report(self, session: Session | None) -> RankReport:
        """Return the report of this rank for the meeting of all ranks.

        Args:
            session: session of a survivor that had begun training; None on other ranks.
        """
        if self.kept is not None:
            return self.kept.report
        report = report_of(session, None)
        if session is None:
            return report
        assert self.formation is not None
        status = replace(
            report.status, start=self.start, formation=self.formation.generation, formed_at=self.formed_at,
            began_at=None,
        )  # fmt: skip
        return replace(report, status=status)

    def keep(self, session: Session | None) -> None:
        """Copy this rank's state to host memory, unless that was done in a change of ranks that a failure interrupted.

        Args:
            session: session of a survivor, whose model the caller frees next; None on other ranks.
        """
        if session is None or self.kept is not None:
            return
        assert self.formation is not None
        recut, mark = session.binding.recut(), None if session.commit.torn else session.commit.mark
        layout = self.formation.layouts[session.saving.topology.rank]
        memory = MemorySource(session.saving.checkpointer)
        opened = [memory.open(holding.source, holding.owner, holding.iteration) for holding in memory.holdings()]
        snapshots = [snapshot for snapshot in opened if snapshot is not None]
        report = self.report(session)
        self.kept = KeptState(
            report=replace(report, status=replace(report.status, may_follow=False)),
            mark=mark,
            pieces=[] if mark is None else [_on_host(piece) for piece in recut.pieces(layout)],
            layout=layout,
            offer=recut.offer(layout),
            results=None if mark is None else recut.results(mark.iteration),
            snapshots=[
                FormationSnapshots.in_memory(snapshots, self.formation, layout.rank),
                *(session.snapshots_before if session.saving.checkpointer.progress.persisted is None else ()),
            ],
        )

    def forget(self) -> None:
        """Free the kept state, because this rank trains again, or because the job starts anew."""
        self.kept = None


def _on_host(piece: Piece) -> Piece:
    return Piece(piece.operator, piece.name, piece.begin, piece.tensor.detach().cpu())
