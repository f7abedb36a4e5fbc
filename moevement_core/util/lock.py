"""Lock of a folder, so that one job at a time writes to it, even if several hosts share the folder.

The lock is a file with owner, host and heartbeat that its holder creates (``O_EXCL``) and rewrites every few seconds.
No process compares clocks of different hosts. A process that wants a locked folder is an observer: it measures, by its
own host's clock, how long the file stays the same. If the file changes, the holder is alive, and :func:`acquire`
refuses the folder. The observer takes the lock over if the file stays the same for :data:`STALE_S`, or if the holder
ran on this host and has ended. For that it renames the old file and creates a new one. Of several observers, only one
can rename the file.

The owner of a lock is the *job*. If another process of the same job asks for the lock, it has taken over the rank of
the holder, so it takes over the lock at once. The former holder notices that at its next heartbeat and stops writing.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType

from moevement_core.errors import FolderInUse
from moevement_core.util.file_modes import file_mode, make_folder
from moevement_core.util.process_identity import is_gone, machine_id, start_of
from moevement_core.util.regular_files import read_regular

LOCK = ".moevement-lock"
BEAT_S = 2.0
"""Seconds between heartbeats."""
STALE_S = 15.0
"""Seconds without a heartbeat after which an observer takes the holder for dead."""
_LOOK_S = 0.1
_SETTLE_S = 0.2
"""Seconds that an observer waits after a takeover before it relies on its new file. Within this time, another observer
that has read the old file may rename the new file by mistake."""
_RELEASE_S = 5.0
_BYTES = 512
"""Size of the lock file in bytes. It is constant, so that a heartbeat overwrites the whole file in one write."""

Report = Callable[[str], None]


@dataclass(frozen=True)
class Holder:
    """Holder of a lock, as the lock file names it."""

    job: str
    token: str
    """Random text that identifies this acquisition of the lock."""
    host: str
    machine: str
    """Identifier of the boot and the process namespace in which ``pid`` is valid."""
    pid: int
    started: str
    """Start time of the process, in kernel ticks since boot. A later process with the same id has another start time.
    """
    since: float
    """Time of the acquisition, in seconds since the epoch by the holder's clock."""
    beat: int = 0
    """Number of heartbeats so far. Because of it, each heartbeat changes the file, which observers notice."""

    @staticmethod
    def of_this_process(job: str) -> Holder:
        """Return the holder of a new acquisition by this process."""
        pid = os.getpid()
        return Holder(
            job,
            token=uuid.uuid4().hex,
            host=socket.gethostname(),
            machine=machine_id(),
            pid=pid,
            started=start_of(pid) or "",
            since=round(time.time(), 3),
        )

    @property
    def has_ended(self) -> bool:
        """True if the holder's process has certainly ended; False if it is alive, or if it ran on another machine."""
        return is_gone(self.machine, self.pid, self.started)

    def sentence(self) -> str:
        """Return text that names the job, process and host that hold the lock, and since when."""
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        return f"job {self.job} (pid {self.pid} on {self.host}, since {since})"

    def encode(self) -> bytes:
        """Return the content of the lock file."""
        return json.dumps(asdict(self)).encode().ljust(_BYTES - 1) + b"\n"

    @staticmethod
    def decode(data: bytes) -> Holder | None:
        """Return the holder that :meth:`encode` encoded; None if ``data`` is empty or not from a lock file."""
        try:
            return Holder(**json.loads(data))
        except (ValueError, TypeError):
            return None


class FolderLock:
    """Lock that this process holds, with a thread that writes its heartbeats. :func:`acquire` returns the object.

    Callers use the object as a context manager, or call :meth:`release`.
    """

    def __init__(self, folder: Path, descriptor: int, own: Holder, report: Report, beat_s: float) -> None:
        self.folder = folder
        self.lost: str | None = None
        """Text that names the new holder, once another process has taken the lock; None before."""
        self._descriptor, self._mine, self._report, self._beat_s = descriptor, own, report, beat_s
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._keep_fresh, name="moevement-lock", daemon=True)
        self._thread.start()

    def release(self) -> None:
        """Release the folder for other jobs. This takes a few seconds at most, however slow the disk is."""
        self._ending.set()
        self._thread.join(_RELEASE_S)

    def __enter__(self) -> FolderLock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    # On the lock's thread

    def _keep_fresh(self) -> None:
        while not self._ending.wait(self._beat_s) and self.lost is None:
            with suppress(OSError):  # the disk may be unreachable for a while; a later heartbeat reaches it
                self._beat()
        with suppress(OSError):
            if self.lost is None and self._holder_now() == self._mine.token:
                (self.folder / LOCK).unlink()
        with suppress(OSError):
            os.close(self._descriptor)

    def _beat(self) -> None:
        if (data := _read(self.folder / LOCK)) is None:
            self._create_again()
            return
        holder = Holder.decode(data)
        if holder is not None and holder.token != self._mine.token:
            self.lost = holder.sentence()
            if holder.job != self._mine.job:
                self._report(f"{self.folder} was taken over by {self.lost}; this job writes nothing there any more")
            return
        self._mine = replace(self._mine, beat=self._mine.beat + 1)
        _write(self._descriptor, self._mine)

    def _create_again(self) -> None:
        """Create the lock file again after another program deleted it, or after the folder was gone for a while."""
        if (descriptor := _create(self.folder / LOCK, self._mine)) is not None:
            os.close(self._descriptor)
            self._descriptor = descriptor

    def _holder_now(self) -> str | None:
        holder = Holder.decode(_read(self.folder / LOCK) or b"")
        return holder.token if holder is not None else None


def acquire(
    folder: Path,
    job: str,
    flag: str,
    *,
    may_wait: bool = True,
    report: Report = print,
    beat_s: float = BEAT_S,
    stale_s: float = STALE_S,
) -> FolderLock:
    """Lock ``folder`` for ``job`` and return the lock.

    Args:
        folder: folder, which is created if it is missing.
        job: identifier of the job, the same in all its processes and different in other jobs.
        flag: flag by which the user named the folder, for messages.
        may_wait: True to watch the lock for up to ``stale_s`` seconds if its holder may be dead; False to refuse the
            folder at once.
        report: callback that receives a sentence when the function begins to watch, and later if another job takes the
            lock over.
        beat_s: seconds between heartbeats.
        stale_s: seconds without a heartbeat after which a holder counts as dead.

    Raises:
        FolderInUse: another job holds the lock.
        OSError: this process cannot make, read or write the folder.
    """
    make_folder(folder)
    path, own = folder / LOCK, Holder.of_this_process(job)
    watched, since = None, time.monotonic()
    while True:
        if (descriptor := _create(path, own)) is not None:
            if watched is None or _is_settled(path, own):
                return FolderLock(folder, descriptor, own=own, report=report, beat_s=beat_s)
            os.close(descriptor)
        if (content := _read(path)) is None:
            continue  # the holder has just released the lock
        holder = Holder.decode(content)
        if holder is not None and (holder.job == job or holder.has_ended):
            _put_aside(path, lambda data, token=holder.token: _token(data) == token)  # type: ignore[misc]
        elif watched is None and may_wait:
            watched, since = content, time.monotonic()
            if holder is not None:
                report(f"{flag} {folder}: locked by {holder.sentence()}; checking whether that process is alive")
        elif content != watched:
            owner = holder.sentence() if holder is not None else "a job that is only just starting"
            raise FolderInUse(
                f"{flag} {folder}: in use by {owner}; wait for that job or end it, or give another folder"
            )
        elif time.monotonic() - since > stale_s:
            _put_aside(path, lambda data, stale=content: data == stale)  # type: ignore[misc]
        else:
            time.sleep(_LOOK_S)


def other_holder(folder: Path, job: str) -> str | None:
    """Return text that names the holder of ``folder`` if another job than ``job`` holds it; None otherwise.

    The function reads the lock file, and so may wait long for the disk.

    Raises:
        OSError: the folder cannot be read.
    """
    holder = Holder.decode(_read(folder / LOCK) or b"")
    return holder.sentence() if holder is not None and holder.job != job else None


def _create(path: Path, holder: Holder) -> int | None:
    """Return a descriptor of the new lock file; None if the file exists."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, file_mode().bits)
    except FileExistsError:
        return None
    _write(descriptor, holder)
    return descriptor


def _write(descriptor: int, holder: Holder) -> None:
    os.pwrite(descriptor, holder.encode(), 0)
    os.fsync(descriptor)  # other hosts of a shared file system see the content only after fsync


def _read(path: Path) -> bytes | None:
    """Return the bytes of a lock file; None if it is missing.

    The function opens the file each time, because NFS asks the server for changes only when a file is opened.
    """
    try:
        return read_regular(path)
    except FileNotFoundError:
        return None


def _token(data: bytes) -> str | None:
    holder = Holder.decode(data)
    return holder.token if holder is not None else None


def _put_aside(path: Path, is_it: Callable[[bytes], bool]) -> None:
    """Remove the lock file of a holder that has ended.

    The function first renames the file, and then reads it. If another process has just created the file,
    the function puts it back.

    Args:
        path: lock file.
        is_it: function that returns True for the content of the file to remove.
    """
    aside = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
    try:
        os.rename(path, aside)
    except FileNotFoundError:
        return  # another observer was quicker
    try:
        if not is_it(_read(aside) or b""):
            with suppress(OSError):  # if this fails, the new holder notices the loss at the next heartbeat
                os.link(aside, path)
    finally:
        aside.unlink(missing_ok=True)


def _is_settled(path: Path, holder: Holder) -> bool:
    time.sleep(_SETTLE_S)
    return _token(_read(path) or b"") == holder.token
