"""What makes a window on disk loadable: one manifest for the whole job, written when every file of every rank is there.

``window_<iteration>_<job>.json`` beside the folder ``window_<iteration>_<job>``; the iteration is the one whose state
the window gives. Where nodes have folders of their own, each gets the same manifest.

The folder may hold files of other people, under any name. A window is deleted only if its name is exactly one of ours
and it is provably ours: by its manifest, or, before it has one, by the marker inside the folder. Of a window only the
files that this project writes are deleted; whatever else somebody put there stays.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from moevement_core.errors import SnapshotError
from moevement_core.file_modes import make_folder, opener
from moevement_core.persistence.files import is_snapshot_file

VERSION = 1
MARKER = ".moevement-window"
"""In the folder of every window, from before its first snapshot on: says that the folder is this project's."""
_NAME = re.compile(r"window_(?P<reaches>\d{7,})_(?P<job>[0-9a-f]{4,}(?:\.\d+)?)")


@dataclass(frozen=True)
class Manifest:
    """A window of a job."""

    job: str
    """A name that only this start of the job has: the job's, and for its second start and later ones ``.N``."""
    first: int
    """Its first snapshot; of every rank."""
    last: int
    """Its last one, with which the state is dense on every rank."""
    reaches: int
    """The iteration whose dense state it gives."""
    progress: Mapping[str, int]
    """Iteration and consumed samples then."""
    settings: Mapping[str, Any]
    """What another job must have in common with this one to load it."""

    @property
    def name(self) -> str:
        """Of its folder."""
        return f"window_{self.reaches:07d}_{self.job}"

    def write(self, directory: Path) -> None:
        """Rename it into place; its files are durable by then."""
        path = directory / f"{self.name}.json"
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        with open(partial, "w", encoding="utf-8", opener=opener) as file:
            json.dump({"version": VERSION, **asdict(self)}, file, indent=2)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
        sync_folder(directory)


def read_manifest(path: Path) -> Manifest:
    """The inverse of :meth:`Manifest.write`.

    Raises:
        SnapshotError: it is no manifest of this version.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if found.pop("version") != VERSION:
            raise SnapshotError(f"{path}: a manifest of another version; this program reads version {VERSION}")
        return Manifest(**found)
    except OSError as error:
        raise SnapshotError(f"{path}: {error.strerror}") from None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise SnapshotError(f"{path}: no manifest of a window ({error})") from None


def manifests(directory: Path) -> list[Manifest]:
    """All readable ones in ``directory``, the newest first."""
    found = []
    for path in directory.glob("window_*.json"):
        with suppress(SnapshotError):
            found.append(read_manifest(path))
    return sorted(found, key=lambda manifest: (manifest.reaches, manifest.job), reverse=True)


def make_window_folder(directory: Path, name: str) -> Path:
    """Make the folder of a window and mark it as ours; returns it. Every rank that writes there calls it.

    Raises:
        OSError: it cannot be made or written.
    """
    folder = directory / name
    make_folder(folder)
    marker = folder / MARKER
    if not marker.exists():
        with open(marker, "w", encoding="utf-8", opener=opener) as file:
            file.write(f"{name}: snapshots of moevement; docs/file_format.md\n")
    return folder


def own_windows(directory: Path) -> Iterator[str]:
    """The names of all windows in ``directory`` that are provably this project's, finished or not."""
    for path in directory.glob("window_*"):
        name = path.name.removesuffix(".json")
        if not _NAME.fullmatch(name) or path.is_symlink():
            continue
        if path.name != name:
            with suppress(SnapshotError):
                if read_manifest(path).name == name:
                    yield name
        elif (path / MARKER).is_file() and not (directory / f"{name}.json").exists():
            yield name


def remove_window(directory: Path, name: str) -> None:
    """Delete a window that :func:`own_windows` has named; its manifest goes first, so that no half of it is loadable.

    A folder in which somebody else has put something stays, with that in it.
    """
    (directory / f"{name}.json").unlink(missing_ok=True)
    folder = directory / name
    if folder.is_symlink() or not folder.is_dir():
        return
    for path in folder.iterdir():
        if is_snapshot_file(path.name):
            path.unlink(missing_ok=True)
    rest = {path.name for path in folder.iterdir()}
    if rest <= {MARKER}:  # last, so that a deletion that is cut off can be finished
        (folder / MARKER).unlink(missing_ok=True)
        with suppress(OSError):
            folder.rmdir()


def remove_windows(directory: Path, job: str, oldest: str, replaced: Collection[str]) -> None:
    """Delete windows that are needed no more, finished or not.

    Args:
        directory: where.
        job: of its own windows those older than ``oldest`` go.
        oldest: the name of one.
        replaced: windows of others that go, too.
    """
    for name in set(own_windows(directory)):
        if name in replaced or (name.endswith(f"_{job}") and name < oldest):
            with suppress(OSError):
                remove_window(directory, name)


def remove_unfinished(directory: Path, start: str, but: str) -> None:
    """Delete what failures have left of windows of a job that will never be finished.

    Args:
        directory: where.
        start: of the job.
        but: the name of the window that is being written.
    """
    for name in set(own_windows(directory)):
        if is_of_job(name, start) and name != but and not (directory / f"{name}.json").exists():
            with suppress(OSError):
                remove_window(directory, name)


def is_of_job(name: str, start: str) -> bool:
    """Whether the window ``name`` was written by ``start`` or another start of the same job."""
    return name.rpartition("_")[2].split(".")[0] == start.split(".")[0]


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
