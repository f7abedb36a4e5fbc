"""Re-execution of iterations on a rank whose stage lost its state, and recapture of their snapshots."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, override

from moevement_core import log
from moevement_core.rebuild.live_replicas import LIVE
from moevement_core.rebuild.prepare import Prepared
from moevement_core.recovery.check import StateCheck
from moevement_core.recovery.feed import Feeding
from moevement_core.recovery.plan import RecoveryPlan
from moevement_core.recovery.replay import ReplayObserver, replay
from moevement_core.restart import injection
from moevement_core.restart.faults import Phase
from moevement_core.restart.generation import working
from moevement_core.topology.parts import RankParts
from moevement_core.trainer.capabilities import iterations_left_out


class CaptureAnew(Protocol):
    """Type of :meth:`moevement_core.saving.saving.Saving.recapture`."""

    def __call__(self, iteration: int, record: Mapping[str, Any], *, has_gradients: bool) -> None:
        """Capture the snapshot of ``iteration`` again. Every rank calls it when ``state@iteration`` is live."""


@dataclass(frozen=True)
class Recapture:
    """Capture of snapshots of re-executed iterations, whose earlier snapshots are not valid any more."""

    after: int
    """Newest iteration whose earlier snapshot stays valid."""
    capture: CaptureAnew
    """Function that captures a snapshot anew."""


class Reexecution(ReplayObserver):
    """Re-execution of iterations on one rank.

    Args:
        parts: objects of this rank that a recovery uses.
        prepared: prepared recovery.
        plan: plan of this rank.
        recapture: capture of the snapshots of re-executed iterations but the last, on every rank, because iterations
            have other results than in their first execution. None if they have the same results.
    """

    def __init__(self, parts: RankParts, prepared: Prepared, plan: RecoveryPlan, recapture: Recapture | None) -> None:
        self.replayed = 0
        """Number of iterations re-executed so far."""
        self.redone = 0
        """Number of iterations whose updates were repeated so far."""
        self._parts, self._prepared, self._plan, self._recapture = parts, prepared, plan, recapture
        self._gradients_stay = True

    def adopt(self) -> None:
        """Make the fetched snapshots, from which the replay begins, this rank's own snapshots again.

        Training can then complete the window that they belong to.
        """
        parts, prepared, plan = self._parts, self._prepared, self._plan
        if not prepared.keeps_first:
            return
        checkpointer, run = parts.checkpointer, plan.runs[parts.topology.stage]
        for iteration, snapshot in sorted(prepared.snapshots.items()):
            if iteration >= run.last + (plan.redone_until is not None or run.is_stale):
                continue
            if snapshot.header.schedule == LIVE:
                continue
            # A window of another strategy, from disk, does not fit into the few buffers of dense snapshots.
            if checkpointer.history.takes(iteration) or not checkpointer.history.oldest.is_dense:
                checkpointer.adopt(snapshot)

    def run(self, check: StateCheck, shared_from: int | None, *, with_all: bool) -> Mapping[str, Any]:
        """Re-execute all iterations of the plan, inside the training loop.

        Args:
            check: check that compares the result with the lost state.
            shared_from: first iteration in which a tied embedding is active on some stage; None without one.
            with_all: True if all ranks replay; otherwise other stages feed this rank's stage and wait.

        Returns:
            Record of the last re-executed iteration; empty if there was none.
        """
        parts, prepared, plan = self._parts, self._prepared, self._plan
        topology, binding = parts.topology, parts.binding
        is_alone = not with_all and bool(plan.iterations)
        feeding = Feeding(topology.neighbours, frozenset(plan.runs), topology.channels.feeds) if is_alone else None
        with binding.replaying(shared_from, feeding) as trainer, working():
            self._gradients_stay = trainer.gradients_stay
            last_record = replay(
                plan,
                stage=topology.stage,
                names=topology.table.names,
                snapshots=prepared.snapshots,
                trainer=trainer,
                check=check,
                observer=self,
                outcomes=prepared.outcomes,
            )
        is_updated = plan.until not in iterations_left_out(binding)
        if plan.until > max(plan.dense_at, plan.begins) and is_updated and self._gradients_stay:
            parts.checkpointer.log_gradients(plan.until, is_replayed=True)
        return last_record

    @override
    def runs(self, iteration: int, frozen: int) -> None:
        injection.at(Phase.REPLAY, iteration)
        self.replayed += 1
        topology = self._parts.topology
        if topology.speaks_for_stage and topology.stage == min(self._plan.runs):
            operators = len(topology.table)
            active = f"{operators - frozen} of {operators} operators of stage {topology.stage} active"
            log.info(f"replaying iteration {iteration} of {self._plan.until}, {active}")

    @override
    def redoes(self, iteration: int) -> None:
        injection.at(Phase.REDO, iteration)
        self.redone += 1

    @override
    def is_dense(self, iteration: int, record: Mapping[str, Any]) -> None:
        """Add the snapshot of ``iteration``, which is dense now, to this rank's own snapshots if it is missing there.

        The snapshot is missing if the failure destroyed it, or if this rank had not captured it yet. Training needs it
        to complete an unfinished window. If the recovery has lost updates, the rank captures the snapshots of
        re-executed iterations anew, missing or not.
        """
        if self._recapture is not None and iteration > self._recapture.after:
            self._capture_anew(self._recapture.capture, iteration, record)
            return
        checkpointer, plan, binding = self._parts.checkpointer, self._plan, self._parts.binding
        if iteration in checkpointer.own.snapshots or not self._prepared.keeps_first:
            return
        if iteration in self._prepared.snapshots and not self._prepared.other_arithmetic:
            checkpointer.adopt(self._prepared.snapshots[iteration])
        elif record.get("step") and checkpointer.history.takes(iteration):
            if iteration > plan.dense_at and self._gradients_stay:  # until then, frozen operators have no gradients
                checkpointer.log_gradients(iteration, is_replayed=True)
            checkpointer.take(iteration, {"boundary": binding.boundary_copy(), "iteration": record})
            checkpointer.wait()

    def _capture_anew(self, capture: CaptureAnew, iteration: int, record: Mapping[str, Any]) -> None:
        """Capture the snapshot of an iteration again, because the saved one is of the first execution."""
        binding = self._parts.binding
        is_left_out = iteration in iterations_left_out(binding)
        if not is_left_out and "step" not in record:
            raise NotImplementedError(
                f"{type(binding).__name__}: record() of its Trainer returns no key 'step'; add it"
            )
        capture(iteration, {} if is_left_out else record, has_gradients=self._gradients_stay)
