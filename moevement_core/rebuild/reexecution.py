"""A rank that lost its state, or stands in a stage that did, runs again what led to it; snapshots are taken again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, override

from moevement_core import log
from moevement_core.rebuild.live_replicas import LIVE
from moevement_core.rebuild.prepare import Prepared
from moevement_core.recovery.check import StateCheck
from moevement_core.recovery.feed import Alone
from moevement_core.recovery.plan import RecoveryPlan
from moevement_core.recovery.replay import Observer, replay
from moevement_core.restart import injection
from moevement_core.restart.faults import Phase
from moevement_core.restart.generation import working
from moevement_core.topology.parts import Parts


class TakeAgain(Protocol):
    """:meth:`moevement_core.saving.saving.Saving.take_again`."""

    def __call__(self, iteration: int, record: Mapping[str, Any], *, has_gradients: bool) -> None:
        """Capture snapshots again. Called on every rank when the state of ``iteration`` is live."""


class RunAgain(Observer):
    """Execution of iterations again on one rank.

    Args:
        parts: of this rank.
        prepared: by every rank.
        plan: the part of it that this rank runs.
        take_again: called, on every rank, with each iteration but the last that was run again and its record, where
            what was saved of it is of no use any more; None: it is.
    """

    def __init__(self, parts: Parts, prepared: Prepared, plan: RecoveryPlan, take_again: TakeAgain | None) -> None:
        self.replayed = 0
        """Iterations that were run again, so far."""
        self.redone = 0
        """Iterations whose updates were made again, so far."""
        self._parts, self._prepared, self._plan, self._take_again = parts, prepared, plan, take_again
        self._gradients_stay = True

    def adopt(self) -> None:
        """Take over the snapshots from which the run begins: those of a window that is not over yet are part of it."""
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
            if checkpointer.takes(iteration) or not checkpointer.history.oldest.is_dense:
                checkpointer.adopt(snapshot)

    def run(self, check: StateCheck, shared_from: int | None, *, with_all: bool) -> Mapping[str, Any]:
        """Run all of it, inside the training loop.

        Args:
            check: compares what comes out with what was.
            shared_from: the first iteration in which any copy of an embedding is active; None without copies.
            with_all: whether all ranks run the same; else others feed this stage and wait.

        Returns:
            The record of the last iteration that was run; empty if none was.
        """
        parts, prepared, plan = self._parts, self._prepared, self._plan
        topology, binding = parts.topology, parts.binding
        is_alone = not with_all and bool(plan.iterations)
        alone = Alone(topology.neighbours, frozenset(plan.runs), topology.channels.feeds) if is_alone else None
        with binding.replaying(shared_from, alone) as trainer, working():
            self._gradients_stay = trainer.gradients_stay
            came_of = replay(
                plan, topology.stage, topology.table.names, prepared.snapshots, trainer, check, self, prepared.outcomes
            )
        is_updated = plan.until not in binding.iterations_left_out()
        if plan.until > max(plan.dense_at, plan.begins) and is_updated and self._gradients_stay:
            parts.checkpointer.log_gradients(plan.until, is_replayed=True)
        return came_of

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
        """Take the snapshots again that died with a rank, and those of windows that were under way."""
        if self._take_again is not None and iteration in self._plan.iterations:
            self._lose(self._take_again, iteration, record)
            return
        checkpointer, plan, binding = self._parts.checkpointer, self._plan, self._parts.binding
        if iteration in checkpointer.own.snapshots() or not self._prepared.keeps_first:
            return
        if iteration in self._prepared.snapshots and not self._prepared.other_arithmetic:
            checkpointer.adopt(self._prepared.snapshots[iteration])
        elif record.get("step") and checkpointer.takes(iteration):
            if iteration > plan.dense_at and self._gradients_stay:  # before, some operators had no gradients
                checkpointer.log_gradients(iteration, is_replayed=True)
            checkpointer.take(iteration, {"boundary": binding.boundary_copy(), "iteration": record})
            checkpointer.wait()

    def _lose(self, take_again: TakeAgain, iteration: int, record: Mapping[str, Any]) -> None:
        """Updates were lost: what was saved of this iteration is of another history."""
        binding = self._parts.binding
        is_left_out = iteration in binding.iterations_left_out()
        if not is_left_out and "step" not in record:
            raise NotImplementedError(f"{type(binding).__name__}: its trainer has no record() of a step")
        take_again(iteration, {} if is_left_out else record, has_gradients=self._gradients_stay)
