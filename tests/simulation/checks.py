"""What has to hold, whatever happens."""

from __future__ import annotations

from typing import Any

from moevement_core.rendezvous.roster import NoticedBy
from tests.simulation.hosts import Job
from tests.simulation.trainer import Trainer, failure_free


class Violation(AssertionError):
    """Something does not hold that has to."""


class Checks:
    """Of one simulation."""

    def __init__(self, job: Job) -> None:
        self.job = job
        its = job.scenario
        self.expected = failure_free(its.shape, its.iterations)
        self.newest = 0
        """The newest iteration that anybody has committed."""
        self.made: dict[int, set[int]] = {}
        """By generation, ranks that have a process."""
        self._roster: Any = None

    def every_event(self) -> None:
        """Called after each of them; looks only where something may have changed."""
        roster = self.job.coordinator.roster
        if roster is not self._roster:
            self._roster = roster
            if len(set(roster.ranks.values())) < len(roster.ranks):
                raise Violation(f"one member has two ranks: {dict(roster.ranks)}")
            if roster.ranks and sorted(roster.ranks) != list(range(self.job.scenario.shape.ranks)):
                raise Violation(f"ranks are missing: {dict(roster.ranks)}")

    def enters(self, process: Any) -> None:
        """A process has a rank."""
        generation = process.generation.roster.generation
        ranks = self.made.setdefault(generation, set())
        if process.rank in ranks:
            raise Violation(f"two members are rank {process.rank} in generation {generation}")
        ranks.add(process.rank)

    def enters_atomic(self, process: Any) -> None:
        """It is about to change what others could see."""
        if not process.page.is_held:
            raise Violation(f"{process.name} acts without a lease")
        for death in self.job.coordinator.deaths:
            if death.member == process.member and death.noticed_by in (NoticedBy.LEASE, NoticedBy.RESET):
                raise Violation(f"{process.name} trains, and the job goes on without it: it {death.how}")

    def updated(self, trainer: Trainer) -> None:
        """A rank has a new state: every operator that is not frozen has that of the failure-free job."""
        iteration = trainer.iteration + 1
        expected = self.expected[iteration][trainer.rank]
        for place, master in enumerate(trainer.masters.tolist()):
            if place not in trainer.frozen and master != expected[place]:
                raise Violation(f"rank {trainer.rank}: operator {place} has another state in iteration {iteration}")
        self.newest = max(self.newest, iteration)

    def failed(self, process: Any, error: Exception) -> None:
        """A rank has found something wrong."""
        name = type(error).__name__
        if name not in ("RuntimeError", "NoWayBack"):
            raise Violation(f"{process.name}: {name}: {error}") from error

    def at_end(self) -> None:
        """The job has come to its end, or was stopped."""
        job, its = self.job, self.job.scenario
        if job.reason:
            if not job.reason.startswith(("no spare came", "members ")):
                raise Violation(f"the job was stopped: {job.reason}")
            return
        for rank, member in job.coordinator.roster.ranks.items():
            trainer = job.members[member].training._binding
            found = tuple(trainer.masters.tolist()) if trainer is not None else None
            if trainer is None or trainer.iteration != its.iterations or found != self.expected[its.iterations][rank]:
                at = trainer.iteration if trainer is not None else None
                raise Violation(f"rank {rank} ends with another state, at iteration {at}")
