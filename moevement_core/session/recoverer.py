"""This rank's part of bringing a state back, whatever is in live memory."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace

from moevement_core import damage
from moevement_core.arithmetic import arithmetic, is_repeatable
from moevement_core.errors import RecoveryError
from moevement_core.events import RecoveredFromDisk
from moevement_core.policy.partial_experts import LostTokens
from moevement_core.recovery.outcome import Recovery
from moevement_core.recovery.places import Source
from moevement_core.recovery.plan import Report
from moevement_core.session import flips
from moevement_core.session.carry_out import carry_out
from moevement_core.session.commit import Mark
from moevement_core.session.equal_bits import PlacementHistory, placement
from moevement_core.session.kept import Kept, check_kept
from moevement_core.session.parts import Parts
from moevement_core.session.prepare import Prepared, Scope, prepare
from moevement_core.session.saving import Saving
from moevement_core.session.sources import MemorySource, SnapshotSource
from moevement_core.session.step_records import StepRecords
from moevement_core.session.topology import Topology
from moevement_core.session.twins import Twins
from moevement_core.snapshot.agreement import NONE


class Recoverer:
    """Runs this rank's part of a recovery. Collective: all ranks call each method in the same order.

    Args:
        saving: what is saved of this rank; its strategy says how far the job rolls back, and counts what it runs.
        records: what came of recent steps.
    """

    def __init__(self, saving: Saving, records: StepRecords) -> None:
        self.done: list[Recovery] = []
        """Every recovery of this process."""
        self.placements = PlacementHistory()
        self._placed_since = NONE
        """First iteration that survivors computed under the current placement, as of the newest recovery."""
        self._memory: MemorySource | None = None
        """Snapshots in memory of the recovery that is under way."""
        self._saving, self._records = saving, records
        self._windows, self._disk, self._reports = saving.windows, saving.disk, saving.reports

    def recover(self, until: int, lost: frozenset[int] | None = None) -> Recovery:
        """Bring ``state@until`` back.

        Args:
            until: the iteration.
            lost: the pipeline stages whose state is gone; the others keep theirs, feed them, and wait. None: all.

        Raises:
            RecoveryError: there is no way back, or what was recovered is not what was lost.
        """
        return self._carry_out(self.prepare(until, lost))

    def prepare(
        self, until: int, lost: frozenset[int] | None, lost_ranks: Collection[int] = (), mark: Mark | None = None
    ) -> Prepared:
        """Plan the way back to ``state@until`` and fetch what it needs.

        Args:
            until: the iteration.
            lost: the pipeline stages of ranks whose state is gone; None: all.
            lost_ranks: those ranks, if others have kept theirs.
            mark: of the iteration whose state is live here.

        Raises:
            RecoveryError: there is no way back. On every rank alike.
        """
        parts = self._saving.parts
        self._release()  # what a recovery had opened that was interrupted
        topology, memory = parts.topology, MemorySource(parts.checkpointer)
        self._memory = memory
        sources: dict[Source, SnapshotSource] = {Source.MEMORY: memory, Source.PEER: memory, Source.PARITY: memory}
        twins = Twins(parts.binding, topology, mark)
        sources[Source.REPLICA] = twins
        scope = None if lost is None or self._windows.strategy.rolls_back_all else self._scope(parts, lost)
        report = Report(
            topology.rank, topology.stage, (), logged=self._logged(parts, scope),
            outcomes=self._records.known(until), replica=topology.replica,
            stands_for=twins.stands_for(until, lost_ranks) if self._may_take_over(topology) else {},
            arithmetic=arithmetic(), is_repeatable=is_repeatable(),
            placed_since=self.placements.unchanged_since(placement()),
        )  # fmt: skip
        parts.checkpointer.capturer.settle()
        if self._windows.strategy.to_disk_alone:
            return self._prepare_from_disk(parts, report, {}, until, None)
        try:
            may_redo = self._saving.may_redo
            transport = topology.channels.fetches
            return self._alike(prepare(report, sources, until, transport, scope, lost_ranks, may_redo=may_redo))
        except RecoveryError as gone:  # on every rank alike
            return self._prepare_from_disk(parts, report, sources, until, gone)

    def note_placement(self, iteration: int) -> None:
        """Note that iterations after ``iteration`` are computed where the ranks are now."""
        self.placements.note(iteration, placement(), self._placed_since)

    def _release(self) -> None:
        if self._memory is not None:
            self._memory.release()
            self._memory = None

    def _may_take_over(self, topology: Topology) -> bool:
        """Return whether failed ranks take state from live ones. False where the strategy rolls all ranks back, and
        with parity, because others' snapshots follow from those that the failed rank would then lack.
        """
        strategy = self._windows.strategy
        return not (strategy.rolls_back_all or strategy.loses_updates or topology.groups)

    def carry_out(self, prepared: Prepared, *, is_reported: bool = True) -> Recovery:
        """Replay what :meth:`prepare` has prepared; called inside the training loop.

        Args:
            prepared: by every rank.
            is_reported: whether a line of the log says what came of it.
        """
        records = (snapshot.record()["iteration"] for snapshot in prepared.snapshots.values())
        self._records.take({record["iteration"]: record for record in records if record} | dict(prepared.outcomes))
        return self._carry_out(prepared, is_reported=is_reported)

    def check_kept(self, until: int, prepared: Prepared | None) -> Kept:
        """Compare what ranks kept with what is known of it. See :func:`moevement_core.session.kept.check_kept`.

        Args:
            until: the iteration whose state is live on every rank.
            prepared: what was replayed; None if no rank lost its state.
        """
        return check_kept(
            self._saving.parts, until, is_kept=prepared is None or prepared.mine is None,
            replicas_are_known=prepared is not None,
        )  # fmt: skip

    def replaying(self) -> AbstractContextManager[None]:
        """A context in which iterations are no progress: they are neither captured nor counted."""
        return self._replaying()

    @contextmanager
    def _replaying(self) -> Iterator[None]:
        self._windows.pause(True)
        try:
            yield
        finally:
            self.interrupted()

    def interrupted(self) -> None:
        """Iterations are progress again."""
        self._windows.pause(False)

    def _carry_out(self, prepared: Prepared, *, is_reported: bool = True) -> Recovery:
        lost, self._placed_since = self._go_back(prepared), prepared.placed_since
        with self.replaying():
            done, came_of = carry_out(
                self._saving.parts, prepared, lost or LostTokens(), None if lost is None else self._saving.take_again
            )
        if lost is not None:
            self._records.ran_again(came_of)
        self._release()
        self.done.append(done)
        if is_reported:  # else it is reported with everything around it
            self._reports.say_once(done.sentence())
        self._reports.event(done)
        return done

    def _go_back(self, prepared: Prepared) -> LostTokens | None:
        """Roll back to a lossy restore point: discard later decisions and snapshots. Return the tokens lost on this
        stage, or None if the strategy is lossless.
        """
        if prepared.mine is None or not self._windows.strategy.loses_updates:
            return None
        run, strategy = prepared.mine.runs[self._saving.topology.stage], self._windows.strategy
        records = {at: snapshot.record() for at, snapshot in prepared.snapshots.items()}
        learned = {
            at: record["learned"] if record.get("strategy") == strategy.name else None for at, record in records.items()
        }
        if learned[run.last] is None:  # windows on disk that another strategy wrote
            if not run.is_stale:
                return None
            raise RecoveryError(
                f"--moevement-strategy {strategy.name}: snapshots of {records[run.last].get('strategy')} leave experts "
                "to older ones, and how many tokens those lack it alone can tell; give that strategy"
            )
        lost = self._windows.go_back(run, learned)
        self._saving.went_back_to(prepared.mine.iterations.start - 1)
        return lost

    def _prepare_from_disk(
        self,
        parts: Parts,
        report: Report,
        memory: Mapping[Source, SnapshotSource],
        until: int,
        gone: RecoveryError | None,
    ) -> Prepared:
        """Roll all stages back to a window on disk, from which they replay.

        What single ranks remember of steps is left out: with all stages replaying every step is worked out again, by
        all ranks or by none.

        Args:
            parts: of this rank.
            report: what it has.
            memory: where snapshots are that may be used beside files.
            until: the iteration to reach.
            gone: why memory and peers were not enough; None: they are not asked.

        Raises:
            RecoveryError: there is no way back from disk either.
        """
        on_disk = self._disk.that_lead_to(until)
        if not on_disk.windows:
            raise gone or RecoveryError(f"no checkpoint that leads to iteration {until} is durable on all ranks yet")
        prepared = prepare(report, {**memory, Source.FILE: on_disk}, until, parts.topology.channels.fetches)
        assert prepared.mine is not None
        first, counts = prepared.mine.first, prepared.mine.sources()
        name = next((window.name for window in on_disk.windows if window.first <= first <= window.last), "a window")
        text = f"{name} on disk and replay iterations {prepared.mine.begins + 1} to {until}"
        if gone is None:
            text = f"all ranks go back to {text}"
            self._reports.say_once(text)
            self._reports.event(RecoveredFromDisk(text, name, until))
        else:
            text = (
                f"memory and peers cannot bring iteration {until} back ({gone}). All ranks fall back to {text}; "
                f"{counts[Source.FILE]} snapshots come from files"
            )
            self._reports.warn(text, RecoveredFromDisk(text, name, until))
        return replace(prepared, outcomes={})

    def _alike(self, prepared: Prepared) -> Prepared:
        """Return what is prepared, without recorded outcomes if updates may be lost: iterations then differ."""
        return replace(prepared, outcomes={}) if self.may_differ else prepared

    @property
    def may_differ(self) -> bool:
        """True if executing iterations again may have another outcome."""
        return self._windows.strategy.loses_updates

    def _logged(self, parts: Parts, scope: Scope | None) -> tuple[int, ...]:
        """Iterations whose log is whole; if this stage is to feed others, every byte of it is checked."""
        log = parts.binding.boundary_log
        if log is None:
            return ()
        if scope is None or parts.topology.stage not in scope.feeding:
            return tuple(log.iterations)
        flips.at_log(parts.topology.rank, log)
        damaged = log.damaged(log.iterations)
        if damaged:
            what = f"what iterations {', '.join(map(str, damaged))} sent is damaged in host memory"
            damage.report("the digests of a boundary log that is to be fed", what, "it is not fed")
        return tuple(iteration for iteration in log.iterations if iteration not in damaged)

    def _scope(self, parts: Parts, lost: frozenset[int]) -> Scope | None:
        """Return the scope of the lost stages; None, with the reason reported, if all stages roll back."""
        if reason := parts.binding.stages_are_tied_by():
            if parts.topology.rank == 0:
                self._reports.report(f"all stages roll back: {reason}")
            return None
        return Scope(parts.topology.pipeline, lost, parts.binding.iterations_left_out())
