"""Recovery of lost state: together, the ranks plan a recovery, fetch snapshots, and execute the plan."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace

from moevement_core.errors import RecoveryError
from moevement_core.policy.partial_experts import LostTokens
from moevement_core.rebuild.execute import execute
from moevement_core.rebuild.live_replicas import LiveReplicas
from moevement_core.rebuild.prepare import Prepared, Scope, prepare
from moevement_core.rebuild.reexecution import Recapture
from moevement_core.rebuild.survivors import SurvivorChecks, check_kept
from moevement_core.recovery import flips
from moevement_core.recovery.holdings import Source
from moevement_core.recovery.plan import Report
from moevement_core.recovery.scope import segments
from moevement_core.recovery.sources import MemorySource, SnapshotSource, UpTo
from moevement_core.run.events import RecoveredFromDisk
from moevement_core.run.outcome import Recovery
from moevement_core.saving.saving import Saving
from moevement_core.saving.step_records import StepRecords
from moevement_core.strategies.capabilities import LosesUpdates
from moevement_core.topology.parts import RankParts
from moevement_core.trainer.capabilities import iterations_left_out, tie_of_stages
from moevement_core.trainer.commit import Mark
from moevement_core.trainer.equal_bits import PlacementHistory, placement
from moevement_core.util import damage
from moevement_core.util.arithmetic import arithmetic, is_repeatable


class Recoverer:
    """Recoverer of one rank's state. Collective: all ranks call each method in the same order.

    Args:
        saving: object that saves this rank's snapshots; its strategy decides how far the job rolls back.
        records: outcomes of recent steps of this rank.
    """

    def __init__(self, saving: Saving, records: StepRecords) -> None:
        self.done: list[Recovery] = []
        """Recoveries that this process has completed."""
        self.placements = PlacementHistory()
        self._placed_since: int | None = None
        """Iteration after which each rank has been on its present node and device, as survivors have reported; or None.

        The newest recovery sets this value.
        """
        self.clean_at: int | None = None
        """Newest iteration whose snapshots a recovery uses, because later ones may be corrupted; None for any."""
        self._memory: MemorySource | None = None
        """Source from which the current recovery reads snapshots in host memory; None if no recovery uses one."""
        self._saving, self._records = saving, records
        self._windows, self._disk, self._reports = saving.windows, saving.disk, saving.reports

    def recover(self, until: int, lost: frozenset[int] | None = None) -> Recovery:
        """Recover ``state@until``: prepare the recovery, and execute it.

        Args:
            until: iteration whose state is recovered.
            lost: pipeline stages that have lost their state; None for all stages. The other stages keep their state,
                feed the lost stages from their logs, and wait.

        Raises:
            RecoveryError: the state is unrecoverable, or the recovered state differs from the lost one.
        """
        return self._carry_out(self.prepare(until, lost))

    def prepare(
        self, until: int, lost: frozenset[int] | None, lost_ranks: Collection[int] = (), mark: Mark | None = None
    ) -> Prepared:
        """Plan the recovery of ``state@until``, and fetch the snapshots that it needs.

        Args:
            until: iteration whose state is recovered.
            lost: pipeline stages of the ranks without state; None for all stages.
            lost_ranks: ranks without state; other ranks of the same stages may have kept their state.
            mark: mark of the commit point, with the iteration whose state is live on this rank; None if this rank has
                no state.

        Raises:
            RecoveryError: the state is unrecoverable. Every rank raises it.
        """
        if self.clean_at is not None:
            try:
                return self._prepare(until, lost, lost_ranks, mark)
            except RecoveryError:  # raised on every rank
                self._reports.log_once(
                    f"no rank has snapshots that restore a state up to iteration {self.clean_at}, the newest that "
                    "an audit has found clean; the job goes back to newer snapshots"
                )
                self.clean_at = None
        return self._prepare(until, lost, lost_ranks, mark)

    def _prepare(
        self, until: int, lost: frozenset[int] | None, lost_ranks: Collection[int], mark: Mark | None
    ) -> Prepared:
        parts = self._saving.parts
        self._release()  # an interrupted recovery may have left snapshots open
        topology, memory = parts.topology, MemorySource(parts.checkpointer, self._disk.durable_snapshots)
        self._memory = memory
        sources: dict[Source, SnapshotSource] = {Source.MEMORY: memory, Source.PEER: memory, Source.PARITY: memory}
        stores = parts.checkpointer.replicator.stores
        handed_over = {store.source: store.handed_over for store in stores if store.handed_over is not None}
        if self.clean_at is not None:
            mark, handed_over = None, {}
        live_replicas = LiveReplicas(parts.binding, topology, mark, handed_over)
        sources[Source.REPLICA] = live_replicas
        if self.clean_at is not None:
            sources = {kind: UpTo(self.clean_at, source) for kind, source in sources.items()}
        scope = None if lost is None or self._windows.strategy.rolls_back_all else self._scope(parts, lost)
        outcomes = {} if self.recomputes else self._records.known(until)
        report = Report(
            topology.rank, topology.stage, (), logged=self._logged(parts, scope),
            outcomes=tuple(sorted(outcomes)), replica=topology.replica,
            stands_for=live_replicas.stands_for(until, lost_ranks) if self.may_take_over else {},
            arithmetic=arithmetic(), is_repeatable=is_repeatable(),
            placed_since=self.placements.unchanged_since(placement()),
        )  # fmt: skip
        parts.checkpointer.capturer.settle()
        if self._windows.strategy.only_to_disk:
            return self._prepare_from_disk(parts, report, memory={}, until=until, cause=None)
        try:
            may_redo = self._saving.may_redo
            transport = topology.channels.fetches
            return self._alike(
                prepare(
                    report,
                    sources,
                    until=until,
                    transport=transport,
                    scope=scope,
                    lost_ranks=lost_ranks,
                    outcomes=outcomes,
                    may_redo=may_redo,
                )
            )
        except RecoveryError as cause:  # raised on every rank
            return self._prepare_from_disk(parts, report, memory=sources, until=until, cause=cause)

    def note_placement(self, iteration: int) -> None:
        """Record that all iterations after ``iteration`` run with each rank on its present node and device."""
        self.placements.note(iteration, placement(), self._placed_since)

    def _release(self) -> None:
        if self._memory is not None:
            self._memory.release()
            self._memory = None

    @property
    def may_take_over(self) -> bool:
        """True if lost ranks may take their newest state from live replicas, or from ranks to which they handed it.

        They may not do so if the strategy rolls all ranks back or loses updates, or if peers keep parity. Parity needs
        the snapshots of all ranks of a group, but a rank that takes its newest state from elsewhere has no snapshots.
        """
        strategy = self._windows.strategy
        return not (strategy.rolls_back_all or self.may_differ or self._saving.parts.topology.groups)

    def execute(self, prepared: Prepared, *, is_reported: bool = True) -> Recovery:
        """Execute a prepared recovery, and return its summary. Called inside the training loop.

        Args:
            prepared: result of :meth:`prepare` on this rank.
            is_reported: True to log a line with the summary; False if the caller reports the recovery.
        """
        records = (snapshot.record()["iteration"] for snapshot in prepared.snapshots.values())
        self._records.take({record["iteration"]: record for record in records if record} | dict(prepared.outcomes))
        return self._carry_out(prepared, is_reported=is_reported)

    def check_kept(self, until: int, prepared: Prepared | None) -> SurvivorChecks:
        """Compare the state that survivors kept with its recorded digests.

        See :func:`moevement_core.rebuild.survivors.check_kept`.

        Args:
            until: iteration whose state is live on every rank.
            prepared: the recovery that this rank has executed; None if no rank lost its state.
        """
        return check_kept(
            self._saving.parts, until, is_kept=prepared is None or prepared.own_plan is None,
            replicas_are_known=prepared is not None,
        )  # fmt: skip

    def replaying(self) -> AbstractContextManager[None]:
        """Return a context for a replay. Token counters pause in it, except in a recovery that loses updates."""
        return self._replaying()

    @contextmanager
    def _replaying(self) -> Iterator[None]:
        self._windows.pause(True)
        try:
            yield
        finally:
            self.interrupted()

    def interrupted(self) -> None:
        """Resume the token counters after a replay, or after an exception that interrupted a replay."""
        self._windows.pause(False)

    def _carry_out(self, prepared: Prepared, *, is_reported: bool = True) -> Recovery:
        lost, recapture = self._go_back(prepared)
        self._placed_since = prepared.placed_since
        with self.replaying():
            done, last_record = execute(self._saving.parts, prepared, lost, recapture)
        if recapture is not None:
            self._records.reexecuted(last_record)
        self._release()
        loaded = [plan for plan in prepared.plans if any(fetch.source is not Source.REPLICA for fetch in plan.fetches)]
        if runs := [run for plan in loaded for run in plan.runs.values()]:
            lifetime = self._saving.checkpointer.lifetime
            lifetime.restored(min(run.first for run in runs), max(run.last for run in runs))
        self.done.append(done)
        if is_reported:  # otherwise the report on the failure contains the sentence
            self._reports.log_once(done.sentence())
        self._reports.event(done)
        return done

    def _go_back(self, prepared: Prepared) -> tuple[LostTokens, Recapture | None]:
        """Prepare this rank's stage for iterations whose results differ from those of their first execution.

        This is so if the rank loses updates, or if the first results were corrupted. Snapshots and decisions from then
        on are discarded.

        Returns:
            The tokens whose updates the stage loses, and the capture of new snapshots; None if iterations have the same
            results, or if this rank keeps its state.
        """
        strategy = self._windows.strategy
        if prepared.own_plan is not None and self.clean_at is not None:
            self._disk.remove_after(self.clean_at)
            if not isinstance(strategy, LosesUpdates):
                self._windows.drop_counts()
                return LostTokens(), self._discard_after(self.clean_at)
        if prepared.own_plan is None or not isinstance(strategy, LosesUpdates):
            return LostTokens(), None
        run = prepared.own_plan.runs[self._saving.topology.stage]
        records = {at: snapshot.record() for at, snapshot in prepared.snapshots.items()}
        learned = {
            at: record["learned"] if record.get("strategy") == strategy.name else None for at, record in records.items()
        }
        if learned[run.last] is None:  # another strategy wrote these windows on disk
            if not run.is_stale:
                return LostTokens(), None
            raise RecoveryError(
                f"--moevement-strategy {strategy.name}: the strategy {records[run.last].get('strategy')} wrote this "
                "window, in which experts are from different iterations. Only the strategy that wrote the window can "
                "count the lost tokens: give that strategy"
            )
        lost = self._windows.roll_back(run, learned)
        return lost, self._discard_after(prepared.own_plan.iterations.start - 1)

    def _discard_after(self, iteration: int) -> Recapture:
        self._saving.discard_after(iteration)
        return Recapture(iteration, self._saving.recapture)

    def _prepare_from_disk(
        self,
        parts: RankParts,
        report: Report,
        memory: Mapping[Source, SnapshotSource],
        until: int,
        cause: RecoveryError | None,
    ) -> Prepared:
        """Plan to roll all stages back to a window on disk, and fetch the snapshots of the window.

        All stages replay, so the ranks compute the outcome of each step (such as the gradient norm) by reductions. A
        rank that used a recorded outcome would not take part in the reduction, and the others would wait for it. The
        returned plan therefore has no recorded outcomes.

        Args:
            parts: objects of this rank that a recovery uses.
            report: report of this rank to all ranks.
            memory: sources of snapshots that the plan may use in addition to files.
            until: iteration whose state is recovered.
            cause: error why no plan from memory and peers is possible; None if the strategy uses the disk alone.

        Raises:
            RecoveryError: neither memory nor the disk has the snapshots that the recovery needs.
        """
        if self.clean_at is None:
            on_disk = self._disk.windows_reaching(until)
        else:  # Dense checkpoints of later iterations may hold wrong results.
            on_disk = self._disk.windows_reaching(min(until, self.clean_at), beyond_dense=False)
        if not on_disk.windows:
            raise cause or RecoveryError(f"no checkpoint that leads to iteration {until} is durable on all ranks yet")
        report = replace(report, outcomes=())
        prepared = prepare(report, {**memory, Source.FILE: on_disk}, until, parts.topology.channels.fetches)
        assert prepared.own_plan is not None
        first, counts = prepared.own_plan.first, prepared.own_plan.sources()
        name = next((window.name for window in on_disk.windows if window.first <= first <= window.last), "a window")
        text = f"{name} on disk and replay iterations {prepared.own_plan.begins + 1} to {until}"
        if cause is None:
            text = f"all ranks go back to {text}"
            self._reports.log_once(text)
            self._reports.event(RecoveredFromDisk(text, name, until))
        else:
            text = (
                f"memory and peers cannot restore iteration {until} ({cause}). All ranks fall back to {text}; "
                f"{counts[Source.FILE]} snapshots come from files"
            )
            self._reports.warn(text, RecoveredFromDisk(text, name, until))
        return replace(prepared, outcomes={})

    def _alike(self, prepared: Prepared) -> Prepared:
        """Return ``prepared``, but without recorded outcomes of steps if :attr:`recomputes` is True."""
        return replace(prepared, outcomes={}) if self.recomputes else prepared

    @property
    def recomputes(self) -> bool:
        """True if recorded outcomes of steps do not count, because a replay may give, or should give, other results."""
        return self.may_differ or self.clean_at is not None

    @property
    def may_differ(self) -> bool:
        """True if a replay may give other results than the first execution, because the strategy loses updates."""
        return isinstance(self._windows.strategy, LosesUpdates)

    def _logged(self, parts: RankParts, scope: Scope | None) -> tuple[int, ...]:
        """Return the iterations in this rank's boundary log; if a stage will replay from it, only undamaged ones."""
        log = parts.binding.boundary_log
        if log is None:
            return ()
        if scope is None or parts.topology.stage not in scope.feeding:
            return tuple(log.iterations)
        flips.at_log(parts.topology.rank, log)
        damaged = log.damaged(log.iterations)
        if damaged:
            what = f"data that iterations {', '.join(map(str, damaged))} sent is damaged in host memory"
            damage.report("the digests of a boundary log, checked before use", what, "no stage replays from this data")
        return tuple(iteration for iteration in log.iterations if iteration not in damaged)

    def _scope(self, parts: RankParts, lost: frozenset[int]) -> Scope | None:
        """Return the scope of a recovery of stages ``lost``. If all stages roll back, log why, and return None."""
        if reason := tie_of_stages(parts.binding):
            if parts.topology.rank == 0:
                self._reports.report(f"all stages roll back: {reason}")
            return None
        pipeline = parts.topology.pipeline
        replaying = frozenset().union(*segments(pipeline, lost))  # stages with tied embeddings replay together
        return Scope(pipeline, lost, iterations_left_out(parts.binding), parts.topology.owners_of(replaying))
