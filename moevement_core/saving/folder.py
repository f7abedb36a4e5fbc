"""Place for windows: folder or object store of each rank, the ranks that share it, and the job that owns it."""

from __future__ import annotations

import errno
import functools
import os
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
from moevement_core.storage.folder_store import FolderStore
from moevement_core.storage.locations import NODE, is_url
from moevement_core.storage.object_store import ObjectStore
from moevement_core.storage.places import store_at
from moevement_core.storage.store import WindowStore
from moevement_core.util.bounded import within
from moevement_core.util.file_modes import make_folder
from moevement_core.util.lock import STALE_S, FolderLock

_READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)
_MARK = ".seen-by-"
"""Beginning of the names of mark files."""


@dataclass(frozen=True)
class _Message:
    """Message of a rank to all others about its folder. It has one fact; the other fields keep their defaults."""

    leads: str = ""
    """Text whose meaning depends on the exchange. In the first exchange, it is equal on ranks of a node that see the
    same folder. In the second, it is the name of this rank's mark file, and empty unless the rank is a leader."""
    sees: int = -1
    """Rank of the lowest leader whose mark file this leader sees."""
    listing: str = ""
    """Digest of the folder's path and file names. Ranks compare it if any rank cannot write to its folder."""


@dataclass(frozen=True)
class SharedFolder:
    """Folder or object store that this rank uses, and the ranks that share it."""

    store: WindowStore
    members: tuple[int, ...]
    """Ranks that see the same files."""

    @property
    def is_first(self) -> bool:
        """True on the first rank that shares the folder; that rank locks the folder and writes the manifests."""
        return dist.get_rank() == self.members[0]

    @property
    def is_shared_by_all(self) -> bool:
        """True if the whole job has one folder, so that every rank sees every file."""
        return len(self.members) == dist.get_world_size()

    @property
    def asks_for_windows(self) -> bool:
        """True if this rank asks the place for its list of windows, and tells the others."""
        return self.store.is_asked_by_all or self.is_first


def _folder(template: str, node: str) -> Path:
    return Path(template.replace(NODE, node)).resolve()


START_PATIENCE_S = 60.0
"""Seconds that the disk may take to answer when a job starts."""
RECOVERY_PATIENCE_S = 2.0
"""Seconds that the disk may take to answer while the job runs. Training waits meanwhile, so the limit is short."""


def find_folder(flag: str, template: str, node: str, patience_s: float, *, is_written: bool = True) -> SharedFolder:
    """Make the folder, and find the ranks that share it. Every rank calls it.

    Ranks of a node that see the same folder have a leader, the lowest of them. Each leader leaves a mark file in its
    folder during the call, and looks for the mark files of other leaders. Leaders that see the same mark file share a
    folder. So the disk answers a few questions of each node, whatever the number of ranks.

    An object store is shared by all ranks, and gets no request here (see ``store_check.py``).

    A folder that the job only reads may be on a read-only mount, where ranks cannot leave a mark file. There, ranks
    that see the same files share a folder.

    Args:
        flag: flag that sets the folder, for messages.
        template: path of the folder, which may contain :data:`NODE`.
        node: node of this rank.
        patience_s: seconds to wait for each answer from the disk.
        is_written: True if this job writes to the folder.

    Raises:
        ConfigError: a rank cannot make or write the folder, or its disk does not answer. Every rank raises it.
    """
    if is_url(template):
        return SharedFolder(ObjectStore(template), tuple(range(dist.get_world_size())))
    folder = Path(template)
    message, complaint = _Message(), None
    try:
        folder, identity = within(patience_s, lambda: _make_folder(template, node))
        message = _Message(leads=identity)
    except OSError as error:
        complaint = f"{flag} {template}: {error.strerror}; give a folder that every rank can write"
        if not is_written and error.errno in _READ_ONLY:
            folder = _folder(template, node)
            complaint, message = within(patience_s, lambda: _listed(flag, folder))
    findings = _tell_or_refuse(complaint, message)
    if any(finding.listing for finding in findings):
        if not message.listing:
            complaint, message = within(patience_s, lambda: _listed(flag, folder))
        listings = [finding.listing for finding in _tell_or_refuse(complaint, message)]
        same = tuple(rank for rank, listing in enumerate(listings) if listing == message.listing)
        return SharedFolder(FolderStore(folder), same)
    sharers = _sharers(flag, folder, [finding.leads for finding in findings], patience_s)
    return SharedFolder(FolderStore(folder), sharers)


def _sharers(flag: str, folder: Path, identities: Sequence[str], patience_s: float) -> tuple[int, ...]:
    """Return the ranks that share this rank's folder, found by mark files in it. Every rank calls the function.

    Args:
        flag: flag that sets the folder, for messages.
        folder: folder of this rank.
        identities: for each rank, a text that is equal on ranks of a node that see the same folder.
        patience_s: seconds to wait for each answer from the disk.

    Raises:
        ConfigError: a leader cannot write or read its folder. Every rank raises it.
    """
    leader_of = [identities.index(identity) for identity in identities]
    rank = dist.get_rank()
    is_leader = leader_of[rank] == rank
    mark = folder / f"{_MARK}{uuid.uuid4().hex}"
    complaint, is_made, first = None, False, -1
    try:
        if is_leader:
            try:
                within(patience_s, mark.touch)
                is_made = True
            except OSError as error:
                complaint = f"{flag} {folder}: {error.strerror}; give a folder that every rank can write"
        messages = _tell_or_refuse(complaint, _Message(leads=mark.name if is_leader else ""))
        leaders = {message.leads: number for number, message in enumerate(messages) if message.leads}
        if is_leader:
            try:
                first = within(patience_s, lambda: _first_seen(folder, leaders, rank))
            except OSError as error:
                complaint = f"{flag} {folder}: {error.strerror}; give a folder that every rank can read"
        firsts = [finding.sees for finding in _tell_or_refuse(complaint, _Message(sees=first))]
    finally:
        if is_made:
            with suppress(OSError):
                within(patience_s, mark.unlink)
    own = firsts[leader_of[rank]]
    return tuple(number for number, leader in enumerate(leader_of) if firsts[leader] == own)


def _first_seen(folder: Path, leaders: dict[str, int], own: int) -> int:
    """Return the lowest leader whose mark file is in ``folder``.

    Args:
        folder: folder of this rank, which is a leader.
        leaders: ranks of all leaders by the names of their mark files, the lowest rank first.
        own: this rank. It counts even if the disk does not list its mark file, as a network disk may at first.
    """
    lowest = next(iter(leaders))
    # Usually all nodes share a folder, and one question is enough. If not, few leaders see this folder.
    if (folder / lowest).exists():
        return leaders[lowest]
    return min([own, *(leaders[path.name] for path in folder.glob(f"{_MARK}*") if path.name in leaders)])


def _listed(flag: str, folder: Path) -> tuple[str | None, _Message]:
    """Return an error text (None if the folder can be read), and a digest of the folder's path and file names."""
    try:
        names = sorted(str(path.relative_to(folder)) for path in folder.glob("window_*/*")) if folder.is_dir() else None
    except OSError as error:
        return f"{flag} {folder}: {error.strerror}; give a folder that every rank can read", _Message()
    if names is None:
        return f"{flag} {folder}: no such folder, and it cannot be made; give one that every rank can read", _Message()
    return None, _Message(listing=xxhash.xxh3_128_hexdigest("\n".join([str(folder), *names]).encode()))


def _make_folder(template: str, node: str) -> tuple[Path, str]:
    """Make the folder, and return it with a text that is equal on ranks of the node that see the same folder."""
    folder = _folder(template, node)
    make_folder(folder)
    if not os.access(folder, os.W_OK):  # A leader would find this out, but leaders are not known yet.
        reason = errno.EROFS if os.statvfs(folder).f_flag & os.ST_RDONLY else errno.EACCES
        raise OSError(reason, os.strerror(reason))
    status = folder.stat()
    return folder, f"{node} {status.st_dev}:{status.st_ino}"


def _tell_or_refuse(complaint: str | None, local: _Message) -> list[_Message]:
    """Exchange what each rank found out about its folder, and return the messages of all ranks. Collective.

    Args:
        complaint: error text of this rank; None without an error.
        local: what this rank found out.

    Raises:
        ConfigError: a rank has an error text; the message is the first of these texts. Every rank raises it.
    """
    findings = all_gather_objects((complaint, local), tuple[str | None, _Message])
    if refusal := next((text for text, _ in findings if text), None):
        raise ConfigError(refusal)
    return [message for _, message in findings]


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
            :func:`~moevement_core.util.lock.acquire`.

    Returns:
        Lock on the first rank of a folder; None on all other ranks.

    Raises:
        FolderInUse: another job uses a folder. Every rank raises it.
        ConfigError: a rank cannot write the lock. Every rank raises it.
    """
    lock: FolderLock | None = None
    complaint: ConfigError | None = None
    try:
        if place.is_first and held is not None and place.store == FolderStore(held.folder) and held.lost is None:
            lock = held
        elif place.is_first:
            taking = functools.partial(place.store.lock, job, flag, may_wait=may_wait, report=log.info)
            lock = within(patience_s + (2 * STALE_S if may_wait else 0.0), taking)
    except FolderInUse as error:
        complaint = error
    except OSError as error:
        complaint = ConfigError(f"{flag} {place.store}: {error.strerror}; give a folder that every rank can write")
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
    same = load is not None and store_at(load.replace(NODE, node)) == place.store
    conflict, complaint = None, None
    if not same and place.is_first:
        try:
            window = next(iter(within(START_PATIENCE_S, place.store.manifests)), None)
            conflict = f"{place.store}/{window.name}" if window is not None else None
        except OSError as error:
            complaint = f"--moevement-persist-dir {place.store}: {error.strerror}; give a place that ranks can read"
    reports = all_gather_objects((complaint, conflict), tuple[str | None, str | None])
    if refusal := next((text for text, _ in reports if text), None):
        raise ConfigError(refusal)
    if conflicts := [name for _, name in reports if name]:
        raise ConfigError(
            f"--moevement-persist-dir: {conflicts[0]} is a window of another job; give --moevement-load with the same "
            "place to continue from that window, or give an empty place"
        )
