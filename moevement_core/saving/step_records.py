"""Outcomes of recent steps. A replay clips by their gradient norms, and compares its own results with them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moevement_core.engine.own import OwnSnapshots
from moevement_core.recovery.boundary_log import BoundaryLog
from moevement_core.trainer.commit import Commit


class StepRecords:
    """Step records of one rank.

    Args:
        commit: commit point, which holds the outcome of the last committed step.
        log: boundary log; None without a pipeline.
        own: snapshots of this rank, which hold records.
    """

    def __init__(self, commit: Commit, log: BoundaryLog | None, own: OwnSnapshots) -> None:
        self._commit, self._log, self._own = commit, log, own
        self._last: dict[str, Any] = {}
        self._recent: dict[int, Mapping[str, Any]] = {}
        """Outcomes of the steps that a replay may re-execute, by iteration; kept as long as boundary logs."""

    def of_last(self, iteration: int) -> dict[str, Any]:
        """Return the record of ``iteration``; empty unless ``iteration`` is the last one that ran."""
        return self._last if self._last.get("iteration") == iteration else {}

    def committed(self, iteration: int) -> None:
        """Keep the outcome of the step of ``iteration``, which was just committed."""
        self._recent[iteration] = self._outcome_of(iteration)

    def ended(self, iteration: int, outcome: Mapping[str, Any]) -> None:
        """Complete the record of ``iteration`` with ``outcome``: skipped or not, gradient norm, losses."""
        self._last = {**self._record_of(iteration), **outcome}

    def resumed(self, iteration: int, *, was_left_out: bool = False) -> None:
        """Begin with the record of ``iteration``, from which the job resumes after a failure.

        Args:
            iteration: the resume iteration.
            was_left_out: True if the user told the job to skip this iteration, so that it has no record.
        """
        self._last = {} if was_left_out else self._record_of(iteration)

    def reexecuted(self, record: Mapping[str, Any]) -> None:
        """Drop all outcomes. Called after a recovery that lost updates: re-executed steps may have other outcomes.

        Args:
            record: record of the last re-executed iteration; empty without one.
        """
        self._recent.clear()
        if record:
            self._last = dict(record)

    def take(self, outcomes: Mapping[int, Mapping[str, Any]]) -> None:
        """Add outcomes from other ranks or snapshots. Outcomes that this rank has recorded take precedence."""
        self._recent = {iteration: record["step"] for iteration, record in outcomes.items()} | self._recent

    def known(self, until: int) -> dict[int, Any]:
        """Return all outcomes that this rank has, by iteration.

        They come from its snapshots, from its records, and for the iteration ``until`` from the commit point.
        """
        records = (snapshot.record()["iteration"] for snapshot in self._own.snapshots.values())
        outcomes = {record["iteration"]: {"step": record["step"]} for record in records if record}
        outcomes |= {iteration: {"step": outcome} for iteration, outcome in self._recent.items() if outcome}
        if last := self._outcome_of(until):
            outcomes[until] = {"step": last}
        return outcomes

    def forget_before(self, iteration: int) -> None:
        """Drop the records of iterations before ``iteration``, which no replay executes again."""
        self._recent = {ran: outcome for ran, outcome in self._recent.items() if ran >= iteration}

    def _record_of(self, iteration: int) -> dict[str, Any]:
        sent = self._log.digest(iteration) if self._log is not None else None
        return {"iteration": iteration, "step": self._outcome_of(iteration), "sent": sent}

    def _outcome_of(self, iteration: int) -> Mapping[str, Any]:
        """Return the outcome of the step of ``iteration``; empty unless that step is the last committed one."""
        mark = self._commit.mark
        return mark.outcome if mark is not None and mark.iteration == iteration else {}
