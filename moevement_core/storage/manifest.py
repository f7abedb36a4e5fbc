"""Manifest that makes a window on disk loadable. A job writes the manifest when all files of all ranks are durable.

The manifest ``window_<iteration>_<job>.json`` is beside the folder ``window_<iteration>_<job>``. The name has the
iteration whose state the window restores. If each node has a directory of windows, each directory has an equal
manifest.

Users may keep other files in the directory, under any name. This module deletes a window only if the name has exactly
the form above and the window provably belongs to this project. The proof is the manifest or, before there is a
manifest, the marker inside the window's folder. In that folder, the module deletes only files that this project writes.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from moevement_core.errors import SnapshotError
from moevement_core.storage.files import is_snapshot_file
from moevement_core.util.file_modes import make_folder, opener
from moevement_core.util.regular_files import read_regular

VERSION = 2
_UNSEALED = 1
"""Version of manifests without a digest, which this program still reads."""
_MOST_BYTES = 64 << 20
_MOST_SNAPSHOTS = 1 << 20
MARKER = ".moevement-window"
"""Name of the file that marks a window's folder as this project's. Ranks write it before the first snapshot."""
DATA_SETTINGS = "data"
"""Name of the setting that holds all settings of the training data, by name.

These settings determine which samples training reads. A job may load a window of a job with other settings of the data.
If the replay then reaches another state than the window records, the error lists the differences.
"""
SKIPPED = "iterations_to_skip"
"""Name of the setting with the iterations that a job leaves out."""
BY_ITERATION = (SKIPPED,)
"""Names of settings that are lists of iterations. A job that loads a window compares its own list with the window's
list, but only for the iterations that it will replay.
"""
KEPT = 2
"""Number of windows that stay on disk if no flag says otherwise.

Nodes with their own folders each write a manifest of the newest window. If a node dies before it has done so, the job
can load only the second newest window.
"""
_NAME = re.compile(r"window_(?P<reaches>\d{7,})_(?P<job>[0-9a-f]{4,}(?:\.\d+)?)")


@dataclass(frozen=True)
class Manifest:
    """Manifest of one window of a job."""

    job: str
    """Name under which the job writes windows: the job's name, with ``.N`` appended after the N-th restart."""
    first: int
    """First snapshot of the window, the same on every rank."""
    last: int
    """Last snapshot of the window. The snapshots up to this one contain the whole state of every rank."""
    reaches: int
    """Iteration whose dense state the window restores."""
    progress: Mapping[str, int]
    """Iteration and consumed samples of the restored state."""
    settings: Mapping[str, Any]
    """Settings of the job that wrote the window. A job that loads the window needs equal settings.

    Only the settings of the training data may differ (:data:`DATA_SETTINGS`).
    """
    arithmetic: tuple[str, ...] = ()
    """Processor and libraries of each rank that wrote the window, as :func:`moevement_core.util.arithmetic.arithmetic`
    describes them; one entry if all ranks had the same, empty if unknown.
    """
    is_sealed: bool = field(default=True, compare=False)
    """True if the file has a digest of these fields; files of version 1 have none."""

    @property
    def name(self) -> str:
        """Name of the window's folder."""
        return f"window_{self.reaches:07d}_{self.job}"

    def other_settings(self, settings: Mapping[str, Any]) -> list[str]:
        """Return a text for each setting, except those of the data, in which a job differs from this window."""
        names = [name for name in settings if name in self.settings and name != DATA_SETTINGS]
        return _differences(
            {name: self._replayed(name, settings[name]) for name in names},
            {name: self._replayed(name, self.settings[name]) for name in names},
        )

    def other_data(self, settings: Mapping[str, Any]) -> list[str]:
        """Return a text for each setting of the data in which a job differs from this window."""
        return _differences(settings.get(DATA_SETTINGS) or {}, self.settings.get(DATA_SETTINGS) or {})

    def _replayed(self, name: str, value: Any) -> Any:
        if name not in BY_ITERATION or not isinstance(value, list):
            return value
        return sorted({iteration for iteration in value if self.first < iteration <= self.reaches})

    def write(self, directory: Path) -> None:
        """Write the manifest. Called when the window's files are durable on all ranks.

        The file gets its final name last, so that no job reads a manifest that is cut off.
        """
        path = directory / f"{self.name}.json"
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        with open(partial, "wb", opener=opener) as file:
            file.write(self.encode())
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
        sync_folder(directory)

    def encode(self) -> bytes:
        """Return the content of the manifest's file; the inverse of :func:`decode_manifest`."""
        content = {name: value for name, value in asdict(self).items() if name != "is_sealed"}
        return json.dumps({"version": VERSION, "digest": _digest(content), **content}, indent=2).encode()


def _differences(now: Mapping[str, Any], then: Mapping[str, Any]) -> list[str]:
    return [
        f"--{name.replace('_', '-')} {value}, but {then[name]} in the window"
        for name, value in now.items()
        if name in then and then[name] != value
    ]


def read_manifest(path: Path) -> Manifest:
    """Return the manifest that :meth:`Manifest.write` wrote.

    Raises:
        SnapshotError: the file is no manifest that this program reads, or was changed after it was written.
    """
    try:
        data = read_regular(path, _MOST_BYTES)
    except OSError as error:
        raise SnapshotError(f"{path}: {error.strerror}") from None
    return decode_manifest(data, str(path))


def decode_manifest(data: bytes, path: str) -> Manifest:
    """Return the manifest in the content of a file.

    Args:
        data: content of the file.
        path: path or URL of the file, for messages and to compare the name of the window.

    Raises:
        SnapshotError: the content is no manifest that this program reads, or was changed after it was written.
    """
    try:
        content = json.loads(data)
        version = content.pop("version")
        if version not in (_UNSEALED, VERSION):
            raise SnapshotError(
                f"{path}: the version is {str(version)[:20]}; this program reads versions {_UNSEALED} and {VERSION}"
            )
        if version == VERSION and content.pop("digest") != _digest(content):
            raise SnapshotError(f"{path}: the file was changed or damaged after it was written; use another window")
        if isinstance(content.get("arithmetic"), list):
            content["arithmetic"] = tuple(content["arithmetic"])
        manifest = Manifest(**content, is_sealed=version == VERSION)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise SnapshotError(f"{path}: the file is no manifest of a window ({error})") from None
    _check(path, manifest)
    return manifest


def _digest(content: Mapping[str, Any]) -> str:
    """Return the XXH3-128 digest of the fields, which detects accidental changes.

    The digest does not depend on the order of the fields or on blanks between them.
    """
    return xxhash.xxh3_128_hexdigest(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())


def _check(path: str, manifest: Manifest) -> None:
    """Refuse a manifest with impossible values. A manifest of version 1 may have some, because it has no digest.

    Raises:
        SnapshotError: a value is impossible.
    """
    numbers = (manifest.first, manifest.last, manifest.reaches)
    if not all(isinstance(number, int) and not isinstance(number, bool) for number in numbers):
        raise SnapshotError(f"{path}: 'first', 'last' and 'reaches' are {numbers}; all three must be whole numbers")
    if not 0 <= manifest.first <= manifest.last or manifest.last - manifest.first > _MOST_SNAPSHOTS:
        raise SnapshotError(
            f"{path}: 'first' is {manifest.first} and 'last' is {manifest.last}; this range is no window"
        )
    if not isinstance(manifest.progress, dict) or not all(
        isinstance(number, int) and number >= 0 for number in manifest.progress.values()
    ):
        raise SnapshotError(
            f"{path}: 'progress' is {str(manifest.progress)[:60]}; needs a mapping of names to numbers of 0 or more"
        )
    if not isinstance(manifest.settings, dict):
        raise SnapshotError(
            f"{path}: 'settings' is {str(manifest.settings)[:60]}; needs a mapping from names of settings to values"
        )
    if not isinstance(manifest.arithmetic, tuple) or not all(isinstance(name, str) for name in manifest.arithmetic):
        raise SnapshotError(f"{path}: 'arithmetic' is {str(manifest.arithmetic)[:60]}; needs a list of names")
    if path.rpartition("/")[2] != f"{manifest.name}.json":
        raise SnapshotError(
            f"{path}: the file is the manifest of {manifest.name[:60]}; rename it to the name of that window"
        )


def manifests(directory: Path) -> list[Manifest]:
    """Return all readable manifests in ``directory``, the newest first."""
    return manifests_and_refused(directory)[0]


def manifests_and_refused(directory: Path) -> tuple[list[Manifest], dict[str, str]]:
    """Return the readable manifests in ``directory``, the newest first, and the error of each unreadable one.

    The errors are texts, by name of the window.
    """
    readable, refused = [], dict[str, str]()
    for path in directory.glob("window_*.json"):
        try:
            readable.append(read_manifest(path))
        except SnapshotError as error:
            if _NAME.fullmatch(path.stem):
                refused[path.stem] = str(error)
    return newest_first(readable), refused


def newest_first(windows: Iterable[Manifest]) -> list[Manifest]:
    """Return manifests in order of the iteration that they restore, the newest first."""
    return sorted(windows, key=lambda manifest: (manifest.reaches, manifest.job), reverse=True)


def is_window_name(name: str) -> bool:
    """Return True if ``name`` has the form of a window's name."""
    return _NAME.fullmatch(name) is not None


def reach_of(name: str) -> int:
    """Return the iteration whose state the window ``name`` restores."""
    return int(name.split("_")[1])


def make_window_folder(directory: Path, name: str) -> Path:
    """Make the folder of a window, mark it as this project's, and return it; called by each rank that writes there.

    Raises:
        OSError: this process cannot make or write the folder.
    """
    folder = directory / name
    make_folder(folder)
    marker = folder / MARKER
    if not marker.exists():
        with open(marker, "w", encoding="utf-8", opener=opener) as file:
            file.write(f"{name}: snapshots of moevement; docs/file_format.md\n")
    return folder


def own_windows(directory: Path) -> Iterator[str]:
    """Yield the names of all windows in ``directory`` that are provably this project's, finished or not."""
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
    """Delete the window ``name``, which :func:`own_windows` has yielded.

    The function deletes the manifest first, so that no job loads a partly deleted window. If the folder holds foreign
    files, the folder and these files stay.
    """
    (directory / f"{name}.json").unlink(missing_ok=True)
    folder = directory / name
    if folder.is_symlink() or not folder.is_dir():
        return
    for path in folder.iterdir():
        if is_snapshot_file(path.name):
            path.unlink(missing_ok=True)
    rest = {path.name for path in folder.iterdir()}
    if rest <= {MARKER}:  # the marker is deleted last, so that a later call can finish an interrupted deletion
        (folder / MARKER).unlink(missing_ok=True)
        with suppress(OSError):
            folder.rmdir()


@dataclass(frozen=True)
class Kept:
    """Rule for the windows of a job that stay on disk."""

    count: int = KEPT
    """Number of newest windows that stay."""
    every: int | None = None
    """Number of iterations of which the first window stays as well; None to keep no such windows."""

    @property
    def has_history(self) -> bool:
        """True if windows stay to which a user may go back, also those from before the last start of the job."""
        return self.count > KEPT or self.every is not None

    def of(self, names: Collection[str]) -> set[str]:
        """Return those of the windows ``names`` that stay. A second call with the result returns the same windows."""
        oldest_first = sorted(names, key=lambda name: (reach_of(name), name))
        kept = set(oldest_first[-self.count :])
        if self.every is not None:
            first_of = {reach_of(name) // self.every: name for name in reversed(oldest_first)}
            kept |= set(first_of.values())
        return kept


def is_of_job(name: str, start: str) -> bool:
    """Return True if the window ``name`` was written by the same job as ``start``, in this or another start."""
    return name.rpartition("_")[2].split(".")[0] == start.split(".")[0]


def sync_folder(folder: Path) -> None:
    """Make new names and renames of files in ``folder`` durable; fsync of a file covers only its content."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
