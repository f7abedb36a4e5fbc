"""Second execution of an iteration on one rank, and its comparison with the first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import override

import numpy as np

from moevement_core.audit.corruption import Corrupter
from moevement_core.audit.evidence import AuditedModel, AuditEvidence, Difference, first_difference
from moevement_core.audit.observe import IterationObserver
from moevement_core.policy.recoverable import RecoverableRun
from moevement_core.rebuild.feeders import start_feeders
from moevement_core.rebuild.live_replicas import snapshot_of_live
from moevement_core.rebuild.prepare import Prepared
from moevement_core.recovery.check import StateCheck
from moevement_core.recovery.feed import Feeding
from moevement_core.recovery.plan import RecoveryPlan
from moevement_core.recovery.replay import ReplayObserver, replay
from moevement_core.restart.generation import working
from moevement_core.saving.saving import Saving
from moevement_core.saving.step_records import StepRecords
from moevement_core.session.recoverer import Recoverer
from moevement_core.snapshot.snapshot import Snapshot
from moevement_core.trainer.capabilities import replica_digests
from moevement_core.trainer.commit import Commit, Mark


@dataclass(frozen=True)
class AuditedIteration:
    """Iteration that some stages execute twice."""

    iteration: int
    segment: frozenset[int]
    """Stages that execute it twice, together."""
    mark: Mark
    """State before the iteration: what the job goes back to if the iteration went wrong."""
    snapshot: Snapshot | None
    """Copy of this rank's state before the iteration; None on a rank that executes it once."""


class SecondExecution:
    """Executions of audited iterations on one rank, the first and the second, one iteration after the other.

    Args:
        saving: saving of this rank's snapshots.
        records: outcomes of recent steps of this rank.
        commit: commit point of this rank.
        recoverer: recoverer of this rank.
        corrupter: injector of corruptions, for drills.
        model: modules and gradients that are observed; None if only the state after the update is compared.
    """

    def __init__(
        self,
        saving: Saving,
        records: StepRecords,
        commit: Commit,
        recoverer: Recoverer,
        corrupter: Corrupter,
        model: AuditedModel | None,
    ) -> None:
        self.unfinished: Mark | None = None
        """Mark of the state that this rank had before it loaded an older one to execute an iteration again.

        None outside of such an execution. The commit point has no mark meanwhile.
        """
        self.audited: AuditedIteration | None = None
        """Iteration whose first execution has begun; None without one."""
        self._saving, self._records, self._commit, self._recoverer = saving, records, commit, recoverer
        self._corrupter, self._observer = corrupter, IterationObserver(model)
        self._first = AuditEvidence()
        """Evidence of the first execution, without the state after the update."""

    # The first execution

    def begin(self, iteration: int, segment: frozenset[int], mark: Mark) -> None:
        """Begin the audit of an iteration: copy the state if this rank's stage is in ``segment``.

        Args:
            iteration: next iteration.
            segment: stages that execute it twice.
            mark: mark of the present state.
        """
        parts, snapshot = self._saving.parts, None
        if parts.topology.stage in segment:
            boundary = mark.boundary if mark.resumed is None else mark.resumed
            snapshot = snapshot_of_live(
                parts.states, parts.topology.table, parts.topology.rank, iteration=iteration - 1, boundary=boundary
            )
        self.audited = AuditedIteration(iteration, segment, mark, snapshot)

    def observe(self) -> None:
        """Observe the audited iteration from its beginning, perhaps anew because the trainer computes it anew."""
        if self.audited is not None and self.audited.snapshot is not None:
            self._observer.begin()

    def executed(self) -> None:
        """End the observation of an iteration, after its update; an evaluation may follow that does not count."""
        if self.audited is not None and self.audited.snapshot is not None:
            self._first = self._observer.end()

    def take(self, committed: int) -> AuditedIteration | None:
        """Return the audited iteration if it is ``committed``, the last one; drop another one."""
        audited, self.audited = self.audited, None
        if audited is None or audited.iteration == committed:
            return audited
        self._observer.end()
        return None

    def interrupted(self) -> None:
        """Drop an audit that a failure has interrupted."""
        self._observer.end()
        self.audited = None

    # The second execution

    def compare(self, audited: AuditedIteration) -> Difference | None:
        """Execute an iteration again, and return the first difference; feed the stages that do so if this one does not.

        Every rank calls it. The state after it is the one before it, unless there is a difference.
        """
        if audited.snapshot is not None:
            return self._execute_again(audited, audited.snapshot)
        for feeder in start_feeders(self._saving.parts, self._prepared(audited)):
            feeder.finish()
        return None

    def _execute_again(self, audited: AuditedIteration, snapshot: Snapshot) -> Difference | None:
        parts, iteration = self._saving.parts, audited.iteration
        binding, topology = parts.binding, parts.topology
        first = self._completed(self._first, iteration)
        parts.checkpointer.wait()
        parts.checkpointer.capturer.settle()
        parts.checkpointer.gradients.wait(iteration)
        boundary, plan = binding.boundary_copy(), self._prepared(audited).own_plan
        assert plan is not None
        record = self._records.of_last(iteration) or self._records.known(iteration).get(iteration)
        is_alone = len(audited.segment) < topology.pipeline.stages
        feeding = Feeding(topology.neighbours, audited.segment, topology.channels.feeds) if is_alone else None
        tied = topology.pipeline.tied
        # A failure from here on leaves a state of no iteration.
        self.unfinished, self._commit.mark = self._commit.mark, None
        with (
            self._recoverer.replaying(),
            self._observer.observing() as observed,
            binding.replaying(iteration if tied and tied <= audited.segment else None, feeding) as trainer,
            working(),
        ):
            replay(
                plan, stage=topology.stage, names=topology.table.names, snapshots={snapshot.iteration: snapshot},
                trainer=trainer, check=StateCheck(parts.states, dict, enabled=False),
                observer=_Again(self._corrupter, self._observer), outcomes={iteration: record} if record else {},
            )  # fmt: skip
        binding.put_boundary(boundary)
        self._commit.mark, self.unfinished = self.unfinished, None
        return first_difference(first, self._completed(observed[0], iteration), list(parts.states))

    def _prepared(self, audited: AuditedIteration) -> Prepared:
        topology, before = self._saving.topology, audited.iteration - 1
        runs = {stage: RecoverableRun(before, np.full(len(topology.table), before)) for stage in audited.segment}
        plan = RecoveryPlan(
            first=before, dense_at=before, until=audited.iteration, begins=before, runs=runs, fetches=()
        )  # fmt: skip
        own_plan = plan if topology.stage in audited.segment else None
        return Prepared((plan,), own_plan, snapshots={}, outcomes={}, fetch_s=0.0)

    def _completed(self, evidence: AuditEvidence, iteration: int) -> AuditEvidence:
        """Add what an execution has left behind: the state after the update, and the log of sent tensors."""
        binding = self._saving.parts.binding
        log = binding.boundary_log
        evidence.sent = None if log is None else log.digest(iteration)
        evidence.state = self._saving.checkpointer.capturer.whole_now()
        evidence.weights = repr(replica_digests(binding))
        return evidence


class _Again(ReplayObserver):
    """Observer of the second execution of an iteration."""

    def __init__(self, corrupter: Corrupter, observer: IterationObserver) -> None:
        self._corrupter, self._observer = corrupter, observer

    @override
    def runs(self, iteration: int, frozen: int) -> None:
        self._corrupter.begin(iteration)
        self._observer.begin()
