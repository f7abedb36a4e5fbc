"""Interface of the places that hold windows: a folder (``folder_store.py``) or an object store (``object_store.py``).

In each place the presence of a manifest is the commit of its window, and the manifest is written last.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from moevement_core.snapshot.snapshot import Snapshot
from moevement_core.storage.manifest import Manifest, is_of_job
from moevement_core.util.lock import FolderLock

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class StoredSnapshot:
    """Snapshot in a window, as far as a plan needs it."""

    owner: int
    """Rank that took the snapshot."""
    iteration: int
    state: int
    """Iteration whose state the snapshot holds."""
    schedule: str
    contents: str
    """State of each operator, in the form of :attr:`Header.contents`."""


class WindowStore(ABC):
    """Place that holds windows. ``str`` gives its name for messages; equal objects are the same place.

    Methods wait for the place, so the training thread calls none of them while it trains. They raise ``OSError`` if the
    place does not work, whatever error its library raises.
    """

    is_asked_by_all: bool
    """True if each rank may ask for the list of windows; False if only the first rank does, because requests cost."""

    @abstractmethod
    def manifests_and_refused(self) -> tuple[list[Manifest], dict[str, str]]:
        """Return the readable manifests, the newest first, and the error of each unreadable one by the window's name.

        Raises:
            OSError: the place does not list its windows.
        """

    @abstractmethod
    def own_windows(self) -> Mapping[str, bool]:
        """Return the windows that are provably this project's: True by name for those with a manifest.

        Raises:
            OSError: the place does not list its windows.
        """

    @abstractmethod
    def begin(self, window: str) -> None:
        """Make room for the files of ``window``. Each rank calls it before it writes.

        Raises:
            OSError: the place cannot be written.
        """

    @abstractmethod
    def write(self, window: str, snapshot: Snapshot, is_wanted: Callable[[], bool]) -> None:
        """Write a snapshot, and return when it is durable.

        Args:
            window: name of the window.
            snapshot: snapshot, whose buffer must stay unchanged until this method returns.
            is_wanted: function that returns False once the file is no longer needed.

        Raises:
            OSError: the place is full or cannot be written.
        """

    @abstractmethod
    def share(self, before: str, window: str, file: str) -> bool:
        """Let ``window`` have a file of the window ``before`` without sending the bytes again.

        Returns:
            False if the caller has to write the file.
        """

    @abstractmethod
    def finish(self, window: str, files: Sequence[str]) -> None:
        """Make all files that this rank has written or shared durable, with their names.

        Args:
            window: name of the window.
            files: names of the files.

        Raises:
            OSError: the place cannot be written.
        """

    @abstractmethod
    def commit(self, manifest: Manifest) -> None:
        """Write the manifest of a window whose files are durable on all ranks.

        Raises:
            OSError: the place cannot be written.
        """

    @abstractmethod
    def discard(self, window: str, files: Sequence[str]) -> None:
        """Delete the files of this rank in a window without a manifest.

        Raises:
            OSError: the place cannot be written.
        """

    @abstractmethod
    def remove(self, window: str) -> None:
        """Delete a window that :meth:`own_windows` has returned: first the manifest, then its files.

        Raises:
            OSError: the place cannot be written.
        """

    @abstractmethod
    def stored(self, window: str, owner: int, is_also_wanted: Callable[[int], bool] | None) -> list[StoredSnapshot]:
        """Return the snapshots in a window that this rank reports and whose descriptions are undamaged.

        Args:
            window: name of the window.
            owner: rank whose snapshots are returned.
            is_also_wanted: function that returns True for other owners whose snapshots are returned too; None for none.

        Raises:
            OSError: the place does not answer.
        """

    @abstractmethod
    def read(self, window: str, file: str) -> Snapshot:
        """Return a snapshot. Its tensors are unchecked; the caller calls :meth:`Snapshot.check`.

        Raises:
            SnapshotError: the file is missing, cut off, damaged or of another version.
        """

    @abstractmethod
    def record(self, window: str, file: str) -> Any:
        """Return the boundary record of a snapshot, unchecked.

        Raises:
            SnapshotError: the file is missing, cut off, damaged or of another version.
        """

    @abstractmethod
    def sizes(self, window: str) -> dict[str, int]:
        """Return the bytes of each snapshot file of a window, by name.

        Raises:
            OSError: the place does not list the files.
        """

    @abstractmethod
    def written_at(self, window: str) -> float | None:
        """Return when the window's manifest was written, in seconds since the epoch; None if the place does not say.

        Only for people: nothing that a job does depends on it.

        Raises:
            FileNotFoundError: the window has been deleted meanwhile.
        """

    @abstractmethod
    def lock(self, job: str, flag: str, *, may_wait: bool, report: Report) -> FolderLock | None:
        """Lock the place for a job; None if the place has no locks.

        Args:
            job: name of the job.
            flag: flag that names the place, for messages.
            may_wait: True to wait until the present holder proves to be alive or dead.
            report: callback that receives sentences about the lock.

        Raises:
            FolderInUse: another job holds the lock.
            OSError: the place cannot be written.
        """

    @abstractmethod
    def other_holder(self, job: str) -> str | None:
        """Return text that names another job than ``job`` that has locked the place; None without one.

        Raises:
            OSError: the place does not answer.
        """

    def manifests(self) -> list[Manifest]:
        """Return all readable manifests, the newest first.

        Raises:
            OSError: the place does not list its windows.
        """
        return self.manifests_and_refused()[0]


def remove_windows(store: WindowStore, job: str, newest: str, kept: Collection[str], replaced: Collection[str]) -> None:
    """Delete windows that the job no longer needs, finished or not. A window that cannot be deleted stays.

    Args:
        store: place with the windows.
        job: name under which the job writes windows now. Windows of this name that are older than ``newest`` are
            deleted.
        newest: name of the newest window of the job that is durable on every rank.
        kept: names of windows that stay.
        replaced: names of further windows to delete, which an earlier start of the job or another job wrote.

    Raises:
        OSError: the place does not list its windows.
    """
    for name in set(store.own_windows()) - set(kept):
        if name in replaced or (name.endswith(f"_{job}") and name < newest):
            with suppress(OSError):
                store.remove(name)


def remove_unfinished(store: WindowStore, start: str, but: str) -> None:
    """Delete the unfinished windows that failures of a job left behind.

    Args:
        store: place with the windows.
        start: name of any start of the job. Unfinished windows of all starts of that job are deleted.
        but: name of the window that is being written, which stays.

    Raises:
        OSError: the place does not list its windows.
    """
    for name, is_finished in store.own_windows().items():
        if is_of_job(name, start) and name != but and not is_finished:
            with suppress(OSError):
                store.remove(name)
