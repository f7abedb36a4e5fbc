"""Writer of windows to disk while training runs, one window after the other.

When a window is durable or has failed, the ranks begin to write the newest persisted window. All ranks agree on which
window they write, and on whether it is durable on every rank or has failed on some rank. If it is durable, the first
rank of each folder writes the manifest, and deletes all older windows except the previous one.

The file of a snapshot may leave out experts whose state an older file holds (``Header.on_disk``). In this case ranks
write the first window whole. In every later window they link those files of the previous window that hold the newest
state of some operator.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from moevement_core.errors import FolderInUse
from moevement_core.policy.schedule import Saved
from moevement_core.snapshot.agreement import Writing
from moevement_core.snapshot.snapshot import Snapshot, SnapshotLease, contents_of
from moevement_core.storage.files import file_name
from moevement_core.storage.manifest import Kept, Manifest, is_of_job
from moevement_core.storage.store import WindowStore, remove_unfinished, remove_windows
from moevement_core.util.iterations import is_newer

Report = Callable[[str], None]
_Identity = tuple[int, int, str]
"""Rank, iteration and schedule of a snapshot."""


@dataclass(slots=True, eq=False)
class _Window:
    """Window that ranks are writing."""

    manifest: Manifest
    files: dict[_Identity, str]
    """Files that this rank writes for the window. The values say what state a file holds of each operator.

    Values have the form of :attr:`Header.contents`.
    """
    older: dict[_Identity, str]
    """Files of the previous window to which this window has links, in the form of :attr:`files`."""
    writing: Writing = Writing.BUSY
    """Progress of this rank with the window."""
    leased: Sequence[SnapshotLease] = ()
    """Snapshots that stay in memory until the ranks know whether the window is durable on every rank."""


@dataclass(frozen=True, slots=True)
class Folder:
    """Place in which this rank writes."""

    store: WindowStore
    writes_manifest: bool
    """True if this rank is the first of the ranks that write to the folder."""


class WindowWriter:
    """Writer of windows of one rank. Only the training thread calls it.

    Only :meth:`finish` and :meth:`close` wait for the disk. A background thread reads and writes files.

    Args:
        folder: place to write to.
        job: name under which the job writes windows, the same on all ranks.
        settings: settings for the manifest.
        arithmetic: arithmetic of the ranks for the manifest.
        lease: function that returns the snapshots of a window, given its first and last iteration. Each stays in memory
            until the writer releases it. They are this rank's own snapshots, and copies of other ranks' snapshots if
            each node has its own folder. The function returns None if a snapshot is missing.
        progress_of: function that returns iteration and consumed samples of the state that a snapshot holds.
        report: callback that receives one sentence for each problem.
        taken_over: function that returns the name of another job that has taken over the folder, or None. It may wait
            for the disk.
        left_behind: writers of earlier generations. While a stalled disk blocks one of them, this writer begins no
            window. Otherwise more and more stalled writers would keep snapshots in memory.
        kept: rule for the windows that stay on disk; None for the default rule.
        began_at: iteration from which this start of the job began. Later windows of earlier starts, or of other jobs in
            the folder, are of a history that the job has left.
        leaves_out: True if files may leave out operators that older files hold.
        keep: function that takes over the snapshots of each window once the window is durable on every rank, so that
            they stay in memory. The writer's thread calls it. Strategies need it if files leave out operators, because
            a recovery then prefers the whole snapshots in memory. None to release snapshots when files are written.
    """

    def __init__(
        self,
        folder: Folder,
        job: str,
        settings: dict[str, Any],
        arithmetic: tuple[str, ...],
        lease: Callable[[int, int], Sequence[SnapshotLease] | None],
        progress_of: Callable[[Snapshot], Mapping[str, int]],
        report: Report,
        taken_over: Callable[[], str | None] = lambda: None,
        left_behind: Sequence[WindowWriter] = (),
        kept: Kept | None = None,
        began_at: int = 0,
        *,
        leaves_out: bool = False,
        keep: Callable[[Sequence[SnapshotLease]], None] | None = None,
    ) -> None:
        self._keep, self._kept, self._began_at = keep, kept or Kept(), began_at
        self.newest: int | None = None
        """Iteration whose state the newest window on disk restores; None without a window."""
        self.written_bytes = 0
        self.write_s = 0.0
        self.failed = 0
        """Number of windows that some rank could not write."""
        self._folder, self._job = folder, job
        self._settings, self._arithmetic = settings, arithmetic
        self._lend, self._progress_of, self._report = lease, progress_of, report
        self._taken_over, self._left_behind, self._leaves_out = taken_over, left_behind, leaves_out
        self._abandoned = False
        self._not_written = 0
        """Number of windows that this rank could not write since the last window that all ranks wrote.

        A window that only this rank wrote does not reset the number: ranks that share a full disk may fail in turn.
        """
        self._found: frozenset[str] = frozenset()
        """Names of windows from before the job's start or last restart. They are deleted when a new window is durable.
        """
        self._window: _Window | None = None
        """Window that the job is writing now; None if there is none."""
        self._last_begun: int | None = None
        """First snapshot of the newest window that the job has begun to write; None before the first."""
        self._last_written: tuple[str | None, dict[_Identity, str]] = (None, {})
        """Name of the window that this rank wrote last, and the state that each of its files holds."""
        self._durable: _Window | None = None
        """Newest window that is durable on every rank."""
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._jobs.put(self._look_around)
        self._thread = threading.Thread(target=self._work, name="moevement-disk", daemon=True)
        self._thread.start()

    @property
    def writing(self) -> Writing:
        """Progress of this rank with the window that the job is writing; the rank reports it to all ranks."""
        return self._window.writing if self._window else Writing.NOTHING

    def learn(self, writing: Writing) -> None:
        """Finish the window if it has failed on some rank or is durable on all ranks.

        Args:
            writing: least progress of all ranks with the window.
        """
        if self._window is not None and writing in (Writing.FAILED, Writing.DURABLE):
            self._conclude(self._window, writing)

    def begin(self, first: int, last: int) -> None:
        """Begin to write a window that is persisted on every rank. Do nothing while another window is being written.

        Args:
            first: first snapshot of the window.
            last: last snapshot of the window.
        """
        if self._window is not None or not is_newer(first, self._last_begun):
            return
        self._last_begun = first
        is_stalled = any(writer.is_alive for writer in self._left_behind)
        leased = None if is_stalled else self._lend(first, last)
        reaches, progress = last, {}
        if leased is not None:
            newest = next(lease.snapshot for lease in leased if lease.snapshot.iteration == last)
            reaches, progress = newest.header.state, dict(self._progress_of(newest))
        before = self._durable
        # A header names the part of the snapshot to write. Until a window is durable, ranks write whole snapshots.
        is_whole = before is None or not self._leaves_out
        files = {_identity(lease.snapshot): _written(lease.snapshot, is_whole=is_whole) for lease in leased or ()}
        older: dict[_Identity, str] = {}
        if before is not None and not is_whole:
            # If a snapshot belongs to both windows, its file in the last window may hold more of it.
            files = {name: _more_complete(content, before.files.get(name)) for name, content in files.items()}
            older = _still_needed(files, before.files | before.older)
            first = min(first, before.manifest.first)
        manifest = Manifest(
            job=self._job,
            first=first,
            last=last,
            reaches=reaches,
            progress=progress,
            settings=self._settings,
            arithmetic=self._arithmetic,
        )
        window = self._window = _Window(manifest, files, older)
        if leased is None:
            self._fail(window, "the disk blocks an older window" if is_stalled else "one of its snapshots is missing")
        else:
            self._jobs.put(lambda: self._write(window, leased))

    def finish(self, agree: Callable[[Writing], Writing], timeout_s: float) -> None:
        """Finish the window that is being written, so that another window may begin; every rank calls this method.

        Args:
            agree: function that takes this rank's progress and returns the least progress of all ranks.
            timeout_s: seconds to wait for the disk.
        """
        deadline = time.monotonic() + timeout_s
        while self.writing is Writing.BUSY and time.monotonic() < deadline:
            time.sleep(0.01)
        self.learn(agree(self.writing))

    def close(self, agree: Callable[[Writing], Writing], timeout_s: float) -> None:
        """Finish the window that is being written, and end the thread; every rank calls this method.

        Args:
            agree: function that takes this rank's progress and returns the least progress of all ranks.
            timeout_s: seconds to wait for the disk.
        """
        self.finish(agree, timeout_s)
        self._jobs.put(None)
        self._thread.join(timeout_s)

    def abandon(self) -> None:
        """Give up the window that is being written, after a failure and without waiting for the disk.

        This rank writes no further file and no manifest for the window. When the job writes the next window, it deletes
        the files of the abandoned one. Snapshots stay in memory until the present write ends. If all ranks have already
        agreed that the window is durable, it still gets its manifest.
        """
        if (window := self._window) is not None:
            self._jobs.put(lambda: _release(window))
        self._abandoned, self._window = True, None
        self._jobs.put(None)

    @property
    def is_alive(self) -> bool:
        """True if the writer's thread works, or waits for work."""
        return self._thread.is_alive()

    def _conclude(self, window: _Window, writing: Writing) -> None:
        """Finish ``window``, which all ranks have begun, with the result that all ranks agreed on."""
        self._window = None
        if writing is Writing.FAILED:
            self.failed += 1
            self._jobs.put(lambda: self._discard(window))
            return
        self._durable = window
        self._jobs.put(lambda: self._hand_over(window))
        if self._not_written:
            self._report(f"windows are written to disk again; {self._not_written} earlier windows could not be written")
            self._not_written = 0
        if self._folder.writes_manifest:
            self._jobs.put(lambda: self._commit(window.manifest))
        else:
            self.newest = window.manifest.reaches

    # On the writer's thread

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()

    def _look_around(self) -> None:
        if self._looks:
            with suppress(OSError):
                self._found = frozenset(self._windows_of_others())

    @property
    def _looks(self) -> bool:
        """True if this rank watches whether other jobs write to the place."""
        return self._folder.writes_manifest or self._folder.store.is_asked_by_all

    def _windows_of_others(self) -> set[str]:
        return {name for name in self._folder.store.own_windows() if not name.endswith(f"_{self._job}")}

    def _refuse_if_taken_over(self) -> None:
        """Refuse to write if another job uses the folder. Two jobs in one folder would delete each other's windows.

        Raises:
            FolderInUse: another job has the folder now, or has begun to write to it.
        """
        if (other := self._taken_over()) is not None:
            raise FolderInUse(f"the folder was taken over by {other}; this job no longer writes or deletes files there")
        new = self._windows_of_others() - self._found if self._looks else ()
        if others := [name for name in new if not is_of_job(name, self._job)]:
            raise FolderInUse(f"another job writes to the folder ({min(others)}), so this job no longer writes there")

    def _write(self, window: _Window, leased: Sequence[SnapshotLease]) -> None:
        store, name, began_s = self._folder.store, window.manifest.name, time.perf_counter()
        try:
            self._refuse_if_taken_over()
            if self._folder.writes_manifest:
                remove_unfinished(store, self._job, but=name)
            store.begin(name)
            for lease in leased:
                if self._abandoned:
                    return
                if self._is_linked(name, _identity(lease.snapshot), window.files):
                    continue
                is_whole = window.files[_identity(lease.snapshot)] == lease.snapshot.header.contents
                snapshot = lease.snapshot if is_whole else lease.snapshot.for_disk()
                store.write(name, snapshot, lambda: not self._abandoned)
                self.written_bytes += snapshot.header.payload_bytes
            for identity in window.older:
                self._bring(identity, name)
            store.finish(name, _file_names(window))
            self._last_written = name, window.files
        except Exception as error:  # training continues after any error; the log must name it
            if not self._abandoned:
                self._fail(window, f"{store}/{name}: {getattr(error, 'strerror', None) or error}")
        else:
            self.write_s += time.perf_counter() - began_s
            window.leased = leased
            window.writing = Writing.DURABLE
        finally:
            if self._keep is None or not window.leased:
                window.leased = leased
                _release(window)

    def _bring(self, identity: _Identity, window: str) -> None:
        """Share a file of the newest durable window with ``window``; if the place cannot share it, copy the file."""
        assert self._durable is not None
        store, before, name = self._folder.store, self._durable.manifest.name, file_name(*identity[:2])
        if not store.share(before, window, name):
            store.write(window, store.read(before, name), lambda: not self._abandoned)

    def _is_linked(self, window: str, identity: _Identity, wanted: Mapping[_Identity, str]) -> bool:
        """Share the previous window's file of a snapshot, if that file holds what the new window needs.

        Windows that overlap share the files of their common snapshots in this way, by hard links or by copies that an
        object store makes. In a place with neither, each window has its own files.

        Args:
            window: name of the new window.
            identity: snapshot.
            wanted: state that each file of the new window is to hold.

        Returns:
            False if the caller has to write the file.
        """
        before, written = self._last_written
        if before is None or written.get(identity) != wanted[identity]:
            return False
        return self._folder.store.share(before, window, file_name(*identity[:2]))

    def _commit(self, manifest: Manifest) -> None:
        try:
            self._refuse_if_taken_over()
            self._folder.store.commit(manifest)
            self.newest = manifest.reaches
            kept = self._kept.of(self._finished())
            remove_windows(self._folder.store, self._job, manifest.name, kept, replaced=self._found)
        except OSError as error:
            self._report(
                f"the manifest of the window that restores iteration {manifest.reaches} cannot be written: "
                f"{error.strerror}"
            )
        except FolderInUse as error:
            self._report(
                f"the manifest of the window that restores iteration {manifest.reaches} is not written: {error}"
            )

    def _finished(self) -> set[str]:
        """Return the names of the finished windows in the folder that may stay.

        These are the windows of this start of the job. If the user wants older windows, those from before the start are
        among them, as far as they belong to the history of the job.
        """
        return {
            manifest.name
            for manifest in self._folder.store.manifests()
            if manifest.job == self._job or (self._kept.has_history and manifest.reaches <= self._began_at)
        }

    def _hand_over(self, window: _Window) -> None:
        if self._keep is None or self._abandoned:  # After a failure, a recovery may be reading the kept snapshots.
            _release(window)
            return
        leased, window.leased = window.leased, ()
        self._keep(leased)

    def _discard(self, window: _Window) -> None:
        """Delete this rank's files of a window that failed on some rank, so that a full disk does not stay full."""
        _release(window)
        with suppress(OSError):
            self._folder.store.discard(window.manifest.name, _file_names(window))

    def _fail(self, window: _Window, why: str) -> None:
        window.writing = Writing.FAILED
        self._not_written += 1
        if not self._not_written & (self._not_written - 1):  # only the 1st, 2nd, 4th, 8th ... failure is reported
            first, so_far = window.manifest.first, f" ({self._not_written} so far)" if self._not_written > 1 else ""
            self._report(
                f"the window from iteration {first} on is not on disk{so_far}: {why}; ranks will write the next window"
            )


def _release(window: _Window) -> None:
    leased, window.leased = window.leased, ()
    for lease in leased:
        lease.release()


def _file_names(window: _Window) -> list[str]:
    return [file_name(rank, iteration) for rank, iteration, _ in (*window.files, *window.older)]


def _identity(snapshot: Snapshot) -> _Identity:
    return snapshot.header.rank, snapshot.iteration, snapshot.header.schedule


def _written(snapshot: Snapshot, *, is_whole: bool) -> str:
    """Return what state of each operator the file of ``snapshot`` holds, in the form of ``Header.contents``.

    Args:
        snapshot: snapshot to write.
        is_whole: True if the file holds the whole snapshot. False if it holds the part ``Header.on_disk``; the result
            is then the same on all ranks of the stage.
    """
    header = snapshot.header
    if is_whole or header.on_disk is None:
        return header.contents
    return header.on_disk.of_stage or header.on_disk.contents


def _more_complete(content: str, before: str | None) -> str:
    """Return ``content`` or ``before``, whichever holds full state of more operators.

    Args:
        content: state that the schedule asks to write to the file of a snapshot.
        before: state in the previous window's file of that snapshot; None if the previous window has no such file.
    """
    if before is None:
        return content
    full = str(int(Saved.FULL))
    return before if before.count(full) > content.count(full) else content


def _still_needed(files: Mapping[_Identity, str], before: Mapping[_Identity, str]) -> dict[_Identity, str]:
    """Return the older files without which the new window would lack the full state of an operator.

    A file is needed if it holds the newest full state of some operator, among all files of its rank.

    Args:
        files: files of the new window, each with the state that it holds.
        before: older files, each with the state that it holds.
    """
    needed = {}
    for rank in {rank for rank, *_ in files}:
        newest = np.zeros(0, dtype=np.bool_)
        everything = {**before, **files}
        for identity in sorted(
            (identity_ for identity_ in everything if identity_[0] == rank), key=lambda identity_: -identity_[1]
        ):
            is_full = contents_of(everything[identity]) == Saved.FULL
            newest = newest if newest.size else np.zeros_like(is_full)
            if identity not in files and (is_full & ~newest).any():
                needed[identity] = everything[identity]
            if identity in files or identity in needed:
                newest |= is_full
    return needed
