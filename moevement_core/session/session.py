"""Fault tolerance of one rank: the calls that a trainer makes in every iteration and after a failure.

Before iteration t+1, the session makes the boundary record and begins to copy ``SS_t`` to the host. Before the
optimizer step of iteration t+1, it waits until the copy is complete. The order of operators and the window may change
at the beginning of a window (``saving/windows.py``). The session adds these collectives to training:

- in each iteration, a background reduction for which no rank waits (``GroupAgreement``)
- a vote of all ranks before each update
- decisions at the beginning of a window (``saving/windows.py``)
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from moevement_core.overhead.fields import overhead_fields
from moevement_core.rebuild.prepare import Prepared
from moevement_core.recovery.formation_snapshots import FormationSnapshots
from moevement_core.rendezvous.status_page import own_page
from moevement_core.restart import injection
from moevement_core.restart.faults import Phase
from moevement_core.restart.generation import has_committed, refuse_if_interrupted, vote
from moevement_core.saving.saving import Saving, learned_record
from moevement_core.saving.stage_policy import Policy
from moevement_core.saving.step_records import StepRecords
from moevement_core.saving.totals import Totals, summary
from moevement_core.session.auditor import Auditor
from moevement_core.session.drill import wipe_and_recover
from moevement_core.session.handover import leave_if_asked
from moevement_core.session.loss_watch import LossWatch
from moevement_core.session.recoverer import Recoverer
from moevement_core.session.speed_watch import SpeedWatch
from moevement_core.speed.waits import waits
from moevement_core.strategies.capabilities import LosesUpdates
from moevement_core.trainer import observer
from moevement_core.trainer.capabilities import SupportsExit, iterations_left_out
from moevement_core.trainer.commit import Mark
from moevement_core.trainer.config import SessionConfig
from moevement_core.trainer.interface import BindingInterface


class Session:
    """Session of one rank, with the calls that a trainer makes for fault tolerance.

    Collective: all ranks have an instance, and call each method in the same order. ``session/build.py`` makes it.

    Args:
        binding: binding of the trainer.
        config: flags of the job.
        saving: saving of this rank's snapshots.
        speed: watch over the speed of ranks.
        loss_watch: watch over the loss.
        prepared: recovery that :meth:`begin_training` executes, for example from a window on disk; None without one.
        snapshots_before: snapshots from before an elastic job changed its ranks. The session frees them when a window
            has been persisted since then.
        is_first: True if the job starts, so that the session captures all snapshots of a window before the first
            iteration.
    """

    def __init__(
        self,
        binding: BindingInterface,
        config: SessionConfig,
        saving: Saving,
        speed: SpeedWatch,
        loss_watch: LossWatch,
        prepared: Prepared | None,
        snapshots_before: Sequence[FormationSnapshots] = (),
        *,
        is_first: bool,
    ) -> None:
        self.binding, self.saving, self.snapshots_before = binding, saving, snapshots_before
        self.speed, self.loss_watch = speed, loss_watch
        self._drill, self._peer_timeout_s = config.drill, config.timeouts.peer_s
        self._is_elastic, self._lease_s = config.elastic.is_elastic, config.timeouts.lease_s
        injection.begin(config.drill.faults, lambda: binding.iteration)  # injected faults may occur from here on
        self.commit = binding.commit_point(self._vote)
        self.commit.updating = saving.checkpointer.gradients.mark
        self.commit.updated = self._log_gradients
        self.commit.overwriting = saving.checkpointer.gradients.end
        self.records = StepRecords(self.commit, binding.boundary_log, saving.checkpointer.own)
        self.recoverer = Recoverer(saving, self.records)
        self.auditor = Auditor(
            config.audit, config.drill.corruptions, saving=saving, records=self.records, commit=self.commit,
            recoverer=self.recoverer,
        )  # fmt: skip
        self.totals = Totals()
        self._prepared, self._is_first = prepared, is_first
        self._start_clock()

    def _start_clock(self) -> None:
        drill = self._drill
        injection.start_clock(
            mtbf_s=drill.mtbf_s,
            seed=drill.seed,
            trace=drill.trace,
            speedup=drill.speedup,
            nodes=list(self.saving.topology.nodes),
        )

    def _vote(self) -> None:
        """Wait until every rank has reached the commit point, and raise if a rank was interrupted."""
        with waits.waiting():
            vote(self.saving.topology.channels.job_group)

    def _log_gradients(self, iteration: int) -> None:
        if observer.observer.is_capturing:
            self.saving.checkpointer.log_gradients(iteration)

    # Once an iteration

    def begin_training(self) -> None:
        """Execute the prepared recovery, if there is one, and mark the state that training starts from.

        Called inside the training loop, before its first iteration, unless :meth:`Rejoined.resume` does the recovery.
        """
        if prepared := self._prepared:
            self.recoverer.execute(prepared)
            self._prepared = None  # frees its host memory
            self.saving.windows.forget(self.binding.iteration)
        refuse_if_interrupted()  # this state depends on exchanges that an interruption may have cut off
        self.commit.mark = Mark(self.binding.iteration, self.binding.boundary_copy(), {})
        self.recoverer.note_placement(self.binding.iteration)

    def begin_iteration(self, committed: int) -> None:
        """Begin the snapshot of ``state@committed``, and prepare the next iteration.

        The trainer calls it while that state is live, before any part of the next iteration.
        """
        saving = self.saving
        observer.observer.before_iteration(self, committed)
        if saving.checkpointer.progress.persisted is not None:
            self.snapshots_before = ()
        injection.at(Phase.START)
        if observer.observer.is_capturing:
            self.auditor.check(committed)
        leave_if_asked(saving, committed, self._lease_s, may_hand_over=self._may_hand_over)
        if committed in self._drill.wipe_at and committed != saving.began_at and not self._is_first:
            wipe_and_recover(self.saving.parts, self.recoverer, committed, self._drill.wipe_stages)
            if isinstance(saving.windows.strategy, LosesUpdates):
                saving.windows.forget(committed)
        if self.binding.boundary_log is not None:
            self.binding.boundary_log.begin(committed + 1)
        began = time.perf_counter()
        if not observer.observer.is_capturing:
            saving.checkpointer.pause(committed)
            saving.checkpointer.gradients.wait(committed)
            self.totals.last_begin_s = 0.0
            self._watch_speed(committed)
            return
        saving.windows.count(committed)
        saving.decide(committed)
        boundary = self.binding.boundary_copy()
        self._mark_begun(committed, boundary)
        self._forget_before(saving.oldest_needed(committed))
        learned = learned_record(saving.windows.strategy)
        record = {"boundary": boundary, "iteration": self.records.of_last(committed), **learned}
        saving.capture(committed, record, is_first=self._is_first)
        self._is_first = False
        if isinstance(self.binding, SupportsExit):
            self.binding.plan_exit(committed, is_winding_down=saving.checkpointer.progress.is_winding_down)
        injection.at(Phase.SNAPSHOT)
        saving.disk.watch()
        saving.watch.look(committed, saving.peers.senders, saving.windows.worth)
        gradient_stall_s = saving.checkpointer.gradients.wait(committed)  # the trainer clears gradients next
        self.totals.stall_s += gradient_stall_s
        saving.peers.begin_iteration(is_saving=saving.checkpointer.is_saving)
        begin_s = time.perf_counter() - began
        self.totals.began(begin_s)
        saving.meter.begin(committed + 1, begin_s, saving.policy_s, gradient_stall_s)
        self.auditor.begin(committed)
        self._watch_speed(committed)

    def _watch_speed(self, committed: int) -> None:
        self.speed.begin_iteration(committed, self.saving.topology, self.saving.peers.senders)

    @property
    def _may_hand_over(self) -> bool:
        """True if a recovery uses the state that a leaving rank hands to a peer; an elastic job rebuilds all ranks."""
        return self.recoverer.may_take_over and not self._is_elastic

    def _mark_begun(self, committed: int, boundary: Mapping[str, Any]) -> None:
        mark = self.commit.mark
        if mark is None or mark.iteration != committed:  # the first iteration, or the first after left-out ones
            mark = Mark(committed, boundary, {})
        self.commit.mark = replace(mark, resumed=boundary)

    def _forget_before(self, iteration: int) -> None:
        self.records.forget_before(iteration)
        self.recoverer.placements.forget_before(iteration)
        if self.binding.boundary_log is not None:
            self.binding.boundary_log.free_before(iteration)

    def step(self) -> Any:
        """Wait until the snapshot is copied, make the optimizer step, and return what the trainer's own step returns.

        A failure leaves the step either complete or not begun.
        """
        self.totals.stall_s += self.saving.checkpointer.wait()
        if self.binding.boundary_log is not None:
            self.binding.boundary_log.end()  # so that a rank that is interrupted after its step has a complete log
        iteration = self.binding.iteration + 1
        self.speed.begin_update()
        result = self.commit.step(iteration)
        self.speed.end_update()
        self.auditor.executions.executed()
        self.records.committed(iteration)
        has_committed()
        if (page := own_page()) is not None:
            page.commit(iteration)
        return result

    def end_iteration(self, committed: int, step_s: float, outcome: Mapping[str, Any]) -> None:
        """Record the results of an iteration.

        Args:
            committed: number of the iteration.
            step_s: seconds that the iteration took.
            outcome: results of the iteration: ``skipped`` (True if it had no update), ``grad_norm`` and ``losses``.

        Raises:
            Exception: the loss has spiked, and the job rolls back; the exception leads to the next generation.
        """
        progress = self.saving.checkpointer.progress
        is_saving = self.saving.checkpointer.is_saving
        if not self.saving.meter.is_settling:
            self.saving.windows.measured(step_s, progress.stall_s, is_saving=is_saving)
        self.saving.peers.end_iteration(is_saving=is_saving)
        saving = self.saving
        saving.meter.end(
            committed, step_s, progress.stall_s, progress.digest_cpu_s, saving.peers.cpu_s_since(), is_saving=is_saving
        )
        self.records.ended(committed, outcome)
        self.totals.ended(step_s, progress)
        self.loss_watch.ended(committed, outcome)

    def metrics(self) -> dict[str, Any]:
        """Return the fields of a metrics line for the last iteration."""
        checkpointer, log = self.saving.checkpointer, self.binding.boundary_log
        progress = checkpointer.progress
        return {
            "stall_s": progress.stall_s + progress.gradient_stall_s,
            "copied_bytes": progress.copied_bytes,
            "replicated_bytes": progress.replicated_bytes,
            "replication_lag": progress.lag,
            "copies_under_way": self.saving.copies_missing,
            "persisted_from": progress.persisted,
            "window": checkpointer.history.newest.size,
            "window_snapshots": checkpointer.history.newest.snapshots,
            "windows_abandoned": progress.abandoned,
            "snapshot_memory_bytes": progress.memory_bytes,
            "log_bytes": log.bytes_of_last if log is not None else 0,
            "log_memory_bytes": log.memory_bytes if log is not None else 0,
            "on_disk": self.saving.disk.newest,
            "disk_written_bytes": self.saving.disk.written_bytes,
            "tokens_owed": self.saving.windows.tokens_owed,
            **self.speed.fields(),
            **self.auditor.fields(),
            **overhead_fields(self.saving.meter.measured(), self.saving.watch.allowed_share(self.saving.windows.worth)),
        }

    # After a failure

    def disconnect(self) -> None:
        """End senders, receivers and writers after the restart guard aborted communication. Snapshots and logs stay."""
        self.saving.meter.interrupted()
        if isinstance(self.binding, SupportsExit):
            self.binding.plan_exit(self.binding.iteration, is_winding_down=False)
        self.saving.peers.disconnect(self.saving.checkpointer.replicator.receivers)
        self.saving.topology.channels.close()
        self.saving.disk.interrupted()

    def interrupted(self) -> None:
        """Undo work that is half done because the restart guard raised its exception in the middle of it."""
        self.commit.interrupted()
        self.recoverer.interrupted()
        self.speed.interrupted()
        self.auditor.interrupted()
        if self.binding.boundary_log is not None:
            self.binding.boundary_log.interrupted()
        self.saving.interrupted()

    def rewire(self, policy: Policy) -> None:
        """Continue in a new generation, with new channels and peers.

        Args:
            policy: policy on which the ranks of the stage agreed.
        """
        self.saving.rewire(policy)
        self._start_clock()

    def resumed(self, committed: int) -> None:
        """Set the records of steps, of token counts and of placements back to ``committed``, the resume iteration.

        Every rank calls it before the first iteration after a failure.
        """
        self.saving.forget_handed_over()
        self.auditor.resumed(committed)
        self.recoverer.clean_at = None
        self.records.resumed(committed, was_left_out=committed in iterations_left_out(self.binding))
        self.saving.windows.forget(committed)
        self.recoverer.note_placement(committed)

    # The end

    def end_threads(self) -> None:
        """End the threads of a session that its process no longer needs. Waits for no other rank."""
        self.saving.checkpointer.capturer.close()

    def finish(self) -> dict[str, Any]:
        """Send the last snapshots to peers, and return the costs of checkpointing. Every rank calls this method."""
        saving = self.saving
        self.auditor.check(self.binding.iteration)
        injection.at(Phase.EXIT, self.binding.iteration)
        if saving.topology.rank == 0:
            injection.warn_of_missed()
        if not saving.checkpointer.close(timeout_s=self._peer_timeout_s):
            saving.reports.report("some peers did not acknowledge this rank's last snapshots in time")
        on_disk = saving.disk.close()
        decided = (saving.windows.windows, saving.windows.reorders, saving.watch.longest_unpersisted)
        return summary(
            totals=self.totals, progress=saving.checkpointer.progress, on_disk=on_disk, decided=decided,
            warnings=saving.reports.warnings, recoveries=self.recoverer.done,
            window=saving.checkpointer.history.newest.size,
        )  # fmt: skip
