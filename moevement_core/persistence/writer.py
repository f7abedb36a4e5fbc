"""Writes windows to disk beside training, one after the other: the newest that is persisted when the last is done.

Every rank decides the same, from what all ranks agreed on: which window is written, and whether it is durable
everywhere, or will never be. Then whoever is the first rank of a folder writes the manifest, and deletes what is older
than the window before.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moevement_core.persistence.files import write_snapshot
from moevement_core.persistence.manifest import Manifest, remove_windows, sync_folder
from moevement_core.snapshot.agreement import NONE, Agreed, Standing
from moevement_core.snapshot.snapshot import Lent, Snapshot

Report = Callable[[str], None]
KEPT = 2
"""Windows on disk: the newest, and the one before in case a node dies while manifests are renamed."""


@dataclass(slots=True, eq=False)
class _Window:
    """One that is being written."""

    manifest: Manifest
    standing: Standing = Standing.PERSISTED
    """On this rank: DURABLE once its files are, NEVER if they will not be."""


@dataclass(frozen=True, slots=True)
class Folder:
    """Where this rank writes."""

    path: Path
    writes_manifest: bool
    """Whether it is the first of the ranks that write there."""


class WindowWriter:
    """One rank's writer. All methods are for the training thread, and none of them waits for the disk but the last.

    Args:
        folder: where.
        job: a name of this start of the job, the same on all ranks.
        settings: for the manifest.
        lend: the snapshots of this rank that belong to a window, from its first to its last: own ones, then copies
            that this rank's folder must hold; nothing if one is missing.
        progress_of: iteration and consumed samples of the state that a snapshot holds.
        report: told, in words, what goes wrong.
    """

    def __init__(
        self,
        folder: Folder,
        job: str,
        settings: dict[str, Any],
        lend: Callable[[int, int], Sequence[Lent] | None],
        progress_of: Callable[[Snapshot], Mapping[str, int]],
        report: Report,
    ) -> None:
        self.newest = NONE
        """The iteration whose state the newest window on disk gives."""
        self.written_bytes = 0
        self.write_s = 0.0
        self.failed = 0
        """Windows that could not be written on some rank."""
        self._folder, self._job, self._settings = folder, job, settings
        self._lend, self._progress_of, self._report = lend, progress_of, report
        self._window: _Window | None = None
        """The one that the job is writing now."""
        self._last_begun = NONE
        self._on_disk: list[str] = []
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="moevement-disk", daemon=True)
        self._thread.start()

    def standing(self) -> dict[int, Standing]:
        """Where the window stands that is being written, to be told to all ranks."""
        return {} if self._window is None else {self._window.manifest.first: self._window.standing}

    def learn(self, agreed: Agreed) -> None:
        """Take in what all ranks said about the window that is being written."""
        if self._window is not None:
            self._conclude(self._window, agreed.standing.get(self._window.manifest.first, Standing.NEVER))

    def begin(self, first: int, last: int) -> None:
        """A window is persisted everywhere: write it, unless another one is being written."""
        if self._window is not None or first <= self._last_begun:
            return
        self._last_begun = first
        lent = self._lend(first, last)
        reaches, progress = last, {}
        if lent is not None:
            newest = next(one.snapshot for one in lent if one.snapshot.iteration == last)
            reaches, progress = newest.header.state, dict(self._progress_of(newest))
        window = self._window = _Window(Manifest(self._job, first, last, reaches, progress, self._settings))
        if lent is None:
            self._fail(window, "a snapshot of it is gone")
        else:
            self._jobs.put(lambda: self._write(window, lent))

    def close(self, agree: Callable[[Standing], Standing], timeout_s: float) -> None:
        """Finish the window that is being written; every rank calls it.

        Args:
            agree: the smallest of all ranks' answers.
        """
        deadline = time.monotonic() + timeout_s
        window = self._window
        while window and window.standing is Standing.PERSISTED and time.monotonic() < deadline:
            time.sleep(0.01)
        agreed = agree(window.standing if window else Standing.DURABLE)
        if window:
            self._conclude(window, Standing.NEVER if agreed is Standing.PERSISTED else agreed)
        self._jobs.put(None)
        self._thread.join(timeout_s)

    def _conclude(self, window: _Window, standing: Standing) -> None:
        """What all ranks say about ``window``, which they all have begun."""
        manifest = window.manifest
        if standing is Standing.DURABLE:
            self.newest = manifest.reaches
            self._on_disk = [*self._on_disk, manifest.name][-KEPT:]
            kept = set(self._on_disk)
            if self._folder.writes_manifest:
                self._jobs.put(lambda: self._commit(manifest, kept))
            self._window = None
        elif standing is Standing.NEVER:
            self.failed += 1
            self._window = None

    # On the writer's thread

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()

    def _write(self, window: _Window, lent: Sequence[Lent]) -> None:
        folder = self._folder.path / window.manifest.name
        began_s, failure = time.perf_counter(), None
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            failure = f"{folder}: {error.strerror}"
        for one in lent:
            try:
                if failure is None:
                    write_snapshot(folder, one.snapshot)
                    self.written_bytes += one.snapshot.header.payload_bytes
            except OSError as error:
                failure = f"{folder}: {error.strerror}"
            finally:
                one.give_back()
        if failure is not None:
            self._fail(window, failure)
            return
        sync_folder(folder)
        self.write_s += time.perf_counter() - began_s
        window.standing = Standing.DURABLE

    def _commit(self, manifest: Manifest, keep: set[str]) -> None:
        try:
            manifest.write(self._folder.path)
            remove_windows(self._folder.path, self._job, min(keep))
        except OSError as error:
            self._report(f"the manifest of iteration {manifest.reaches} cannot be written: {error.strerror}")

    def _fail(self, window: _Window, why: str) -> None:
        self._report(f"the window from iteration {window.manifest.first} on is not on disk: {why}; the next is tried")
        window.standing = Standing.NEVER
