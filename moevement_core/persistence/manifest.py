"""What makes a window on disk loadable: one manifest for the whole job, written when every file of every rank is there.

``window_<iteration>_<job>.json`` beside the folder ``window_<iteration>_<job>``; the iteration is the one whose state
the window gives. Where nodes have folders of their own, each gets the same manifest.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from moevement_core.errors import SnapshotError

VERSION = 1


@dataclass(frozen=True)
class Manifest:
    """A window of a job."""

    job: str
    """A name that only this start of the job has."""
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
        with partial.open("w", encoding="utf-8") as file:
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
        try:
            found.append(read_manifest(path))
        except SnapshotError:
            continue
    return sorted(found, key=lambda manifest: (manifest.reaches, manifest.job), reverse=True)


def remove_windows(directory: Path, job: str, oldest: str) -> None:
    """Delete windows of other jobs and those older than ``oldest``, finished or not; manifests go first."""

    def is_old(name: str) -> bool:
        return not name.endswith(f"_{job}") or name < oldest

    for path in directory.glob("window_*.json"):
        if is_old(path.stem):
            path.unlink(missing_ok=True)
    for folder in directory.glob("window_*"):
        if folder.is_dir() and is_old(folder.name):
            shutil.rmtree(folder, ignore_errors=True)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
