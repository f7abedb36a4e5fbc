"""Folder as a place for windows, on a disk or on a file system that hosts share."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, override

from moevement_core.errors import SnapshotError
from moevement_core.snapshot.snapshot import Snapshot
from moevement_core.storage.files import (
    is_snapshot_file,
    owner_and_iteration,
    read_header,
    read_record,
    read_snapshot,
    write_snapshot,
)
from moevement_core.storage.manifest import (
    MARKER,
    Manifest,
    make_window_folder,
    manifests_and_refused,
    own_windows,
    remove_window,
    sync_folder,
)
from moevement_core.storage.store import Report, StoredSnapshot, WindowStore
from moevement_core.util import damage
from moevement_core.util.lock import FolderLock, acquire, other_holder


@dataclass(frozen=True)
class FolderStore(WindowStore):
    """Folder that holds windows; ``docs/file_format.md`` describes its files."""

    path: Path
    is_asked_by_all = True

    @override
    def __str__(self) -> str:
        return str(self.path)

    @override
    def manifests_and_refused(self) -> tuple[list[Manifest], dict[str, str]]:
        return manifests_and_refused(self.path)

    @override
    def own_windows(self) -> dict[str, bool]:
        return {name: (self.path / f"{name}.json").exists() for name in own_windows(self.path)}

    @override
    def begin(self, window: str) -> None:
        make_window_folder(self.path, window)

    @override
    def write(self, window: str, snapshot: Snapshot, is_wanted: Callable[[], bool]) -> None:
        write_snapshot(self.path / window, snapshot, is_wanted)

    @override
    def share(self, before: str, window: str, file: str) -> bool:
        try:
            os.link(self.path / before / file, self.path / window / file)
        except OSError:  # the disk has no links, or the previous window was deleted
            return False
        return True

    @override
    def finish(self, window: str, files: Sequence[str]) -> None:
        sync_folder(self.path / window)

    @override
    def commit(self, manifest: Manifest) -> None:
        manifest.write(self.path)

    @override
    def discard(self, window: str, files: Sequence[str]) -> None:
        folder = self.path / window
        for name in files:
            (folder / name).unlink(missing_ok=True)
        if [path.name for path in folder.iterdir()] == [MARKER]:
            (folder / MARKER).unlink(missing_ok=True)
        with suppress(OSError):  # the folder stays as long as it holds files of other ranks
            folder.rmdir()

    @override
    def remove(self, window: str) -> None:
        remove_window(self.path, window)

    @override
    def stored(self, window: str, owner: int, is_also_wanted: Callable[[int], bool] | None) -> list[StoredSnapshot]:
        folder, stored = self.path / window, []
        for name in sorted(os.listdir(folder)) if folder.is_dir() else ():
            named = owner_and_iteration(name)
            if named is None or not (named[0] == owner or (is_also_wanted is not None and is_also_wanted(named[0]))):
                continue
            try:
                header = read_header(folder / name)
            except SnapshotError as error:
                damage.report(
                    "the digest of a file's header", str(error).partition(";")[0], "ranks plan without the file"
                )
                continue
            if (header.rank, header.iteration) == named:
                entry = StoredSnapshot(
                    owner=header.rank, iteration=header.iteration, state=header.state, schedule=header.schedule,
                    contents=header.contents,
                )  # fmt: skip
                stored.append(entry)
        return stored

    @override
    def read(self, window: str, file: str) -> Snapshot:
        return read_snapshot(self.path / window / file)

    @override
    def record(self, window: str, file: str) -> Any:
        return read_record(self.path / window / file)

    @override
    def sizes(self, window: str) -> dict[str, int]:
        files = [path for path in (self.path / window).glob("*") if is_snapshot_file(path.name)]
        return {path.name: path.stat().st_size for path in files}

    @override
    def written_at(self, window: str) -> float | None:
        return os.stat(self.path / f"{window}.json").st_mtime

    @override
    def lock(self, job: str, flag: str, *, may_wait: bool, report: Report) -> FolderLock | None:
        return acquire(self.path, job, flag, may_wait=may_wait, report=report)

    @override
    def other_holder(self, job: str) -> str | None:
        return other_holder(self.path, job)
