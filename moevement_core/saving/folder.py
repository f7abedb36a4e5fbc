"""Folder for windows on disk: its path on each rank, the ranks that share it, and the job that owns it."""

from __future__ import annotations

import errno
import functools
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
import xxhash

from moevement_core import log
from moevement_core.comms.exchange import all_gather_objects
from moevement_core.errors import ConfigError, FolderInUse
from moevement_core.storage.manifest import manifests
from moevement_core.util.bounded import within
from moevement_core.util.file_modes import make_folder
from moevement_core.util.lock import STALE_S, FolderLock, acquire

_READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)
_Told = tuple[str, str]
"""Name of a rank's mark file, and a digest of the names of the files in its folder.

The digest replaces the mark file on a rank that cannot write to its folder. On other ranks, it is empty.
"""
NODE = "{node}"
"""Placeholder for this rank's node in a folder's name."""


@dataclass(frozen=True)
class SharedFolder:
    """Folder that this rank uses, and the ranks that share the folder."""

    path: Path
    members: tuple[int, ...]
    """Ranks that see the same folder."""

    @property
    def is_first(self) -> bool:
        """True on the first rank that shares the folder; that rank locks the folder and writes the manifests."""
        return dist.get_rank() == self.members[0]

    @property
    def is_shared_by_all(self) -> bool:
        """True if the whole job has one folder, so that every rank sees every file."""
        return len(self.members) == dist.get_world_size()


def _folder(template: str, node: str) -> Path:
    return Path(template.replace(NODE, node)).resolve()


START_PATIENCE_S = 60.0
"""Seconds that the disk may take to answer when a job starts."""
RECOVERY_PATIENCE_S = 2.0
"""Seconds that the disk may take to answer while the job runs. Training waits meanwhile, so the limit is short."""


def find_folder(flag: str, template: str, node: str, patience_s: float, *, is_written: bool = True) -> SharedFolder:
    """Make the folder, and find the ranks that share it. Every rank calls it.

    Each rank leaves a mark file in its folder during the call. Ranks that see each other's mark files share a folder. A
    folder that the job only reads may be on a read-only mount, where ranks cannot leave a mark file. There, ranks that
    see the same files share a folder.

    Args:
        flag: flag that sets the folder, for messages.
        template: path of the folder, which may contain :data:`NODE`.
        node: node of this rank.
        patience_s: seconds to wait for each answer from the disk.
        is_written: True if this job writes to the folder.

    Raises:
        ConfigError: a rank cannot make or write the folder, or its disk does not answer. Every rank raises it.
    """
    mark = f".seen-by-{uuid.uuid4().hex}"
    folder, is_made = Path(template), False
    complaint, seen, listed = None, list[int](), ""
    try:
        try:
            folder, is_made = within(patience_s, lambda: _make_folder(template, node, mark)), True
        except OSError as error:
            complaint = f"{flag} {template}: {error.strerror}; give a folder that every rank can write"
            if not is_written and error.errno in _READ_ONLY:
                folder = _folder(template, node)
                complaint, listed = within(patience_s, lambda: _listed(flag, folder))
        findings = [others for _, others in _tell_or_refuse((complaint, (mark, listed)))]
        try:
            if any(other for _, other in findings):
                local = listed or within(patience_s, lambda: _listed(flag, folder))[1]
                listings = [listing for _, listing in _tell_or_refuse((None, (mark, local)))]
                seen = [number for number, (_, listing) in enumerate(listings) if listing == local]
            else:
                seen = within(patience_s, lambda: _which_are_there(folder, [name for name, _ in findings]))
        except OSError as error:
            complaint = f"{flag} {folder}: {error.strerror}; give a folder that every rank can read"
        _tell_or_refuse((complaint, (mark, "")))
    finally:
        if is_made:
            with suppress(OSError):
                within(patience_s, (folder / mark).unlink)
    return SharedFolder(folder, tuple(seen))


def _listed(flag: str, folder: Path) -> tuple[str | None, str]:
    """Return an error text (None if the folder can be read), and a digest of the folder's path and file names."""
    try:
        names = sorted(str(path.relative_to(folder)) for path in folder.glob("window_*/*")) if folder.is_dir() else None
    except OSError as error:
        return f"{flag} {folder}: {error.strerror}; give a folder that every rank can read", ""
    if names is None:
        return f"{flag} {folder}: no such folder, and it cannot be made; give one that every rank can read", ""
    return None, xxhash.xxh3_128_hexdigest("\n".join([str(folder), *names]).encode())


def _which_are_there(folder: Path, names: Sequence[str]) -> list[int]:
    return [number for number, name in enumerate(names) if (folder / name).exists()]


def _make_folder(template: str, node: str, mark: str) -> Path:
    folder = _folder(template, node)
    make_folder(folder)
    (folder / mark).touch()
    return folder


def _tell_or_refuse(local: tuple[str | None, _Told]) -> list[tuple[str | None, _Told]]:
    """Exchange what each rank found out about its folder, and return it for all ranks. Collective.

    Args:
        local: error text of this rank (None without an error), and its mark file and digest.

    Returns:
        The same pair of every rank, in the order of ranks.

    Raises:
        ConfigError: a rank has an error text; the message is the first of these texts. Every rank raises it.
    """
    findings = all_gather_objects(local, tuple[str | None, _Told])
    if complaint := next((text for text, _ in findings if text), None):
        raise ConfigError(complaint)
    return findings


def lock_folder(
    flag: str, place: SharedFolder, job: str, held: FolderLock | None, patience_s: float, *, may_wait: bool
) -> FolderLock | None:
    """Lock the folders of all ranks for this job. Every rank calls it; the first rank that shares a folder locks it.

    Args:
        flag: flag that sets the folder, for messages.
        place: folder of this rank.
        job: name of the job.
        held: lock that this rank holds already; None if it holds none.
        patience_s: seconds to wait for the disk.
        may_wait: True to wait, if another job holds the lock, until that job proves to be alive or dead; see
            :func:`acquire`.

    Returns:
        Lock on the first rank of a folder; None on all other ranks.

    Raises:
        FolderInUse: another job uses a folder. Every rank raises it.
        ConfigError: a rank cannot write the lock. Every rank raises it.
    """
    lock: FolderLock | None = None
    complaint: ConfigError | None = None
    try:
        if place.is_first and held is not None and held.folder == place.path and held.lost is None:
            lock = held
        elif place.is_first:
            taking = functools.partial(acquire, place.path, job, flag, may_wait=may_wait, report=log.info)
            lock = within(patience_s + (2 * STALE_S if may_wait else 0.0), taking)
    except FolderInUse as error:
        complaint = error
    except OSError as error:
        complaint = ConfigError(f"{flag} {place.path}: {error.strerror}; give a folder that every rank can write")
    refusal = (isinstance(complaint, FolderInUse), str(complaint)) if complaint is not None else None
    if refused := next(
        (refusal_ for refusal_ in all_gather_objects(refusal, tuple[bool, str] | None) if refusal_), None
    ):
        is_in_use, text = refused
        raise (FolderInUse if is_in_use else ConfigError)(text)
    return lock


def refuse_foreign_windows(place: SharedFolder, load: str | None, node: str) -> None:
    """Refuse to overwrite windows of another job, unless the user asked to load from their folder. Every rank calls it.

    Args:
        place: folder that this job writes to.
        load: value of ``--moevement-load``, even if the job found no window there; None without the flag.
        node: node of this rank.

    Raises:
        ConfigError: a folder holds windows that this job was not asked to load. Every rank raises it.
    """
    same = load is not None and _folder(load, node) == place.path
    manifest = None if same else next(iter(manifests(place.path)), None)
    conflicts = [
        name for name in all_gather_objects(f"{place.path}/{manifest.name}" if manifest else None, str | None) if name
    ]
    if conflicts:
        raise ConfigError(
            f"--moevement-persist-dir: {conflicts[0]} is a window of another job; give --moevement-load with the same "
            "folder to continue from that window, or give an empty folder"
        )
