"""Windows of a job on disk: writing, retries while the folder is unusable, and the windows that a recovery can use.

A job does not start without a usable folder. If the folder becomes unusable later, training continues, and the ranks
report the problem. They try the folder again after the next failure, and when windows begin, at growing intervals.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from moevement_core import log
from moevement_core.comms.exchange import all_gather_objects, from_rank_zero
from moevement_core.engine.checkpointer import Checkpointer
from moevement_core.errors import ConfigError
from moevement_core.replication.peer_store import PeerStore
from moevement_core.run.events import WindowsNotOnDisk, WindowsOnDiskAgain
from moevement_core.saving.folder import (
    RECOVERY_PATIENCE_S,
    START_PATIENCE_S,
    SharedFolder,
    find_folder,
    lock_folder,
    refuse_foreign_windows,
)
from moevement_core.saving.identity import JobNames
from moevement_core.saving.reports import Reports
from moevement_core.saving.window_files import JobWindows, windows_of_all
from moevement_core.snapshot.agreement import Writing
from moevement_core.snapshot.snapshot import Snapshot, SnapshotLease
from moevement_core.storage.folder_store import FolderStore
from moevement_core.storage.manifest import is_of_job
from moevement_core.storage.writer import Folder, WindowWriter
from moevement_core.topology.topology import Topology
from moevement_core.trainer.capabilities import SupportsDenseCheckpoints
from moevement_core.trainer.config import SessionConfig
from moevement_core.trainer.equal_bits import arithmetic_of_all
from moevement_core.trainer.interface import BindingInterface
from moevement_core.util.bounded import within
from moevement_core.util.iterations import is_newer
from moevement_core.util.lock import FolderLock

MOST_READ = 4
"""Largest number of windows that a recovery considers; a user may keep many more on disk."""
TIMEOUT_S = 600.0
"""Longest time in seconds that the job waits at its end for the window that is being written."""


class WindowsOnDisk:
    """Windows on disk of one rank. Collective: all ranks create an instance and call each method in the same order.

    Args:
        binding: binding of this rank.
        names: names that identify the job and the state of its windows on disk.
        config: flags of the job.
        topology: topology of this generation. Each later generation sets :attr:`topology` anew.
        checkpointer: checkpointer whose windows are written.
        reports: reports to the people who run the job.
        job_name: name of the job's start, which windows carry; empty until the folder is first used.
        began_at: iteration from which this start of the job began.
    """

    def __init__(
        self,
        binding: BindingInterface,
        names: JobNames,
        config: SessionConfig,
        topology: Topology,
        checkpointer: Checkpointer,
        reports: Reports,
        job_name: str,
        began_at: int,
    ) -> None:
        self._began_at = began_at
        self.topology, self.job_name = topology, job_name
        self._binding, self._names, self._config = binding, names, config
        self._checkpointer, self._reports = checkpointer, reports
        self._writer: WindowWriter | None = None
        self._left_behind: list[WindowWriter] = []
        """Writers of earlier generations that a stalled disk still blocks."""
        self._place: SharedFolder | None = None
        """Folder of this rank; None while the folder of any rank is unusable."""
        self._lock: FolderLock | None = None
        """Lock of the folder, on the first rank that shares the folder; None on other ranks."""
        self._kept: Sequence[SnapshotLease] = ()
        """Snapshots of this rank in the newest window that is durable on every rank.

        They stay in memory only if their files leave out operators.
        """
        self._misses = self._wait = self._failed = 0
        """Numbers of consecutive failed tries of the folder, windows until the next try, and windows not written."""
        self._is_missing = False

    @property
    def newest(self) -> int | None:
        """Iteration whose state the newest window on disk restores; None without a window."""
        return None if self._writer is None else self._writer.newest

    @property
    def written_bytes(self) -> int:
        """Bytes written since this rank last began to write to the folder."""
        return self._writer.written_bytes if self._writer is not None else 0

    @property
    def durable_snapshots(self) -> dict[int, Snapshot]:
        """Snapshots of this rank in the newest durable window, by iteration, as far as they are still in memory.

        They stay in memory if their files leave out operators (MoC-System, section 5.1). Otherwise the result is empty.
        """
        return {lease.snapshot.iteration: lease.snapshot for lease in self._kept}

    def start(self) -> None:
        """Begin to write windows to the folder, from the next iteration on; do nothing if no flag names a folder.

        Raises:
            ConfigError: the job starts, and the folder is unusable or another job uses it. Every rank raises it.
        """
        if self._config.disk.persist_dir is None:
            return
        is_start = not self.job_name and not self._names.is_restart
        try:
            place = self._take_folder(self._config.disk.persist_dir, is_start)
        except ConfigError as error:
            if is_start:
                raise
            self._go_without(str(error))
            return
        self.job_name, self._place = self.job_name or self._names.start, place
        if self._is_missing:
            text = f"windows are written to {place.store} again"
            self._reports.log_once(text)
            self._reports.event(WindowsOnDiskAgain(text))
        self._is_missing, self._misses = False, 0
        self._writer = self._make_writer(place)
        self._checkpointer.write_to(self._writer, self._binding.iteration)

    def retry_folder(self) -> None:
        """Try an unusable folder again. Called at the beginning of each window.

        After each failed try, more windows pass before the next try, at most 64. Other calls only count these windows.
        """
        if self._config.disk.persist_dir is None or self._writer is not None:
            return
        self._wait -= 1
        if self._wait <= 0:
            self.start()

    def interrupted(self) -> None:
        """Abandon writing after a failure, without waiting for the disk. Called before ranks meet again."""
        if self._writer is not None:
            self._writer.abandon()
            self._left_behind = [writer for writer in (*self._left_behind, self._writer) if writer.is_alive]
            self._writer = None
        self._misses = 0  # replacements begin with 0, and all ranks have to try at the same windows

    def watch(self) -> None:
        """Report the number of windows that could not be written. All ranks have agreed on the number."""
        failed = self._writer.failed if self._writer is not None else 0
        if failed > self._failed and failed & (failed - 1) == 0:  # the 1st, 2nd, 4th, 8th ...
            text = (
                f"{failed} windows could not be written to --moevement-persist-dir; the logs of the ranks concerned "
                "have the reasons. The job tries to write the next window"
            )
            self._reports.warn(text, WindowsNotOnDisk(text, failed))
        self._failed = failed

    def windows_reaching(self, until: int, *, beyond_dense: bool = True) -> JobWindows:
        """Return the windows of this start of the job that reach at most ``until``.

        A recovery calls it if snapshots in memory are not enough. No other method reads windows.

        Args:
            until: newest iteration that a window may restore.
            beyond_dense: True for windows only that reach beyond the newest dense checkpoint.
        """
        if self._place is None:
            return JobWindows(SharedFolder(FolderStore(Path()), ()), ())
        newest_dense = None
        if beyond_dense and isinstance(self._binding, SupportsDenseCheckpoints):
            newest_dense = from_rank_zero(self._binding.newest_checkpoint, int | None)
        try:
            readable = windows_of_all(self._place)
        except ConfigError as error:  # raised on every rank
            if self.topology.rank == 0:
                log.warning(f"the windows on disk cannot be used: {error}")
            readable = []
        windows = [
            manifest
            for manifest in readable
            if manifest.job == self.job_name and manifest.reaches <= until and is_newer(manifest.reaches, newest_dense)
        ]
        return JobWindows(self._place, windows[:MOST_READ])

    def restorable(self) -> list[int]:
        """Return the iterations that the windows of this job in this rank's folder restore. Waits for no other rank."""
        if self._place is None:
            return []
        store = self._place.store
        try:
            readable = within(RECOVERY_PATIENCE_S, store.manifests)
        except OSError as error:
            log.warning(f"{store}: the windows cannot be listed: {error.strerror}")
            return []
        return [each.reaches for each in readable if is_of_job(each.name, self._names.name)]

    def close(self) -> tuple[int | None, int, int, float]:
        """Write the windows that are persisted by now, and stop. Every rank calls it when all snapshots were sent.

        Returns:
            Iteration that the newest window restores (None without a window), number of windows that could not be
            written, and bytes and seconds of writing.
        """
        writer = self._writer
        if writer is not None:
            writer.finish(_least, TIMEOUT_S)
            self._checkpointer.agree_at_end(self._binding.iteration)
            writer.close(_least, TIMEOUT_S)
        self._keep(())
        if self._lock is not None:
            self._lock.release()
        return (writer.newest, writer.failed, writer.written_bytes, writer.write_s) if writer else (None, 0, 0, 0.0)

    def _take_folder(self, template: str, is_start: bool) -> SharedFolder:
        """Find the folder and lock it for the job.

        Raises:
            ConfigError: a rank cannot use or lock its folder. Every rank raises it.
        """
        flag, node = "--moevement-persist-dir", self._config.copies.node_of(self.topology.rank)
        patience_s = START_PATIENCE_S if is_start else RECOVERY_PATIENCE_S
        place = find_folder(flag, template, node, patience_s)
        self._lock = lock_folder(
            flag, place, job=self._names.name, held=self._lock, patience_s=patience_s, may_wait=is_start
        )
        if is_start:
            refuse_foreign_windows(place, self._config.disk.load, node)
        return place

    def _go_without(self, why: str) -> None:
        """Continue training without writing windows, and report the reason."""
        self.job_name = self.job_name or self._names.start
        self._writer = self._place = None
        self._keep(())
        self._checkpointer.write_to(None, self._binding.iteration)
        self._misses += 1
        self._is_missing = True
        if self._misses == 1:
            text = (
                f"no windows are written to disk for now: {why}. Training continues; the folder is tried again "
                "after the next failure and when later windows begin"
            )
            self._reports.warn(text, WindowsNotOnDisk(text))
        # The next tries come 1, 2, 4, 8, ... windows later, because each takes seconds if the disk does not answer.
        self._wait = 1 << min(self._misses - 1, 6)

    def _keep(self, leased: Sequence[SnapshotLease]) -> None:
        """Keep this rank's own snapshots of a durable window in memory, and release those of the window before it."""
        before, own = self._kept, [lease for lease in leased if self._is_worth_keeping(lease.snapshot)]
        self._kept = own
        for lease in (*before, *(lease for lease in leased if lease not in own)):
            lease.release()

    def _is_worth_keeping(self, snapshot: Snapshot) -> bool:
        """Return True if a snapshot is this rank's own, and its file lacks operators."""
        header = snapshot.header
        return header.rank == self.topology.rank and header.on_disk is not None and bool(header.on_disk.without)

    def forget_after(self, iteration: int) -> None:
        """Release the kept snapshots of iterations after ``iteration``, to which the job has rolled back."""
        later = [lease for lease in self._kept if lease.snapshot.iteration > iteration]
        self._kept = [lease for lease in self._kept if lease not in later]
        for lease in later:
            lease.release()

    def remove_after(self, iteration: int) -> None:
        """Remove windows of this start of the job with snapshots after ``iteration``, which hold wrong results."""
        if self._place is None or not self._place.is_first:
            return
        store = self._place.store
        with suppress(OSError):  # the next windows of the job replace those that stay
            for manifest in store.manifests():
                if manifest.job == self.job_name and manifest.last > iteration:
                    self._reports.report(f"{manifest.name} in {store} is removed, because it may hold wrong results")
                    store.remove(manifest.name)

    def _make_writer(self, place: SharedFolder) -> WindowWriter:
        """Return a writer of windows to ``place``. Every rank calls it."""
        current = [store for store in self._checkpointer.replicator.stores if store.source in self.topology.sources]
        elsewhere = [] if place.is_shared_by_all or self.topology.groups else current
        lock, job = self._lock, self._names.name
        return WindowWriter(
            folder=Folder(place.store, place.is_first),
            job=self.job_name,
            settings=self._binding.settings(),
            arithmetic=arithmetic_of_all(),
            lease=lambda first, last: self._lease(first, last, elsewhere),
            progress_of=lambda snapshot: snapshot.record()["boundary"]["progress"],
            report=self._reports.report,
            taken_over=lambda: (lock.lost if lock is not None else None) or place.store.other_holder(job),
            left_behind=self._left_behind,
            kept=self._config.disk.kept,
            began_at=self._began_at,
            leaves_out=(leaves_out := self._config.strategy.persisted is not None),
            keep=self._keep if leaves_out else None,
        )

    def _lease(self, first: int, last: int, stores: Sequence[PeerStore]) -> list[SnapshotLease] | None:
        """Return leases of snapshots ``first`` to ``last``, of this rank and of ``stores``.

        Returns:
            None if a snapshot is missing, or if the persisted run of this stage ends after ``last``, as it does right
            after a reorder.
        """
        checkpointer = self._checkpointer
        if is_newer(checkpointer.lifetime.last_needed, last):
            return None
        taken = [iteration for iteration in range(first, last + 1) if checkpointer.history.takes(iteration)]
        leased: list[SnapshotLease | None] = [checkpointer.own.lease(iteration) for iteration in taken]
        leased += [store.lease(iteration) for store in stores for iteration in taken]
        whole = [lease for lease in leased if lease is not None]
        if len(whole) == len(leased):
            return whole
        for lease in whole:
            lease.release()
        return None


def _least(writing: Writing) -> Writing:
    """Return the smallest progress of any rank in writing the window. Every rank calls it with its own progress."""
    return Writing(min(all_gather_objects(writing, Writing)))
