"""Object store as a place for windows, reached through fsspec: ``s3://bucket/job``, ``gs://bucket/job`` and others.

The names of objects are those of files in a folder, and there is one more object in each window for each rank: its
*index*, which lists the rank's snapshots. A rank writes its snapshots, then its index. When all ranks have done so, the
first rank writes the manifest. Nothing depends on renames, locks, times or links, and the job is correct if a list of
objects lacks new ones.

Requests of a rank for a window of W snapshots: W + 1 objects written and asked for their size. The first rank also asks
five times for the list of windows, and deletes an old window: a list and a deletion for each 1,000 objects. To load a
window, a rank reads its index and its snapshots, and asks for no list.
"""

from __future__ import annotations

import errno
import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, override

import torch
import xxhash

from moevement_core import log
from moevement_core.errors import SnapshotError
from moevement_core.snapshot.buffer import Buffer
from moevement_core.snapshot.snapshot import BOUNDARY, Header, Snapshot, numpy_bytes
from moevement_core.storage.files import (
    FRONT_BYTES,
    decode_header,
    encode_front,
    file_name,
    front_bytes,
    header_digest,
    is_snapshot_file,
    owner_and_iteration,
    payload_at,
)
from moevement_core.storage.locations import described
from moevement_core.storage.manifest import Manifest, decode_manifest, is_window_name, newest_first
from moevement_core.storage.store import Report, StoredSnapshot, WindowStore
from moevement_core.util import damage
from moevement_core.util.file_modes import file_mode, make_folder
from moevement_core.util.lock import FolderLock

ATTEMPTS = 3
"""Number of times that a request is made before it counts as failed."""
PAUSE_S = 1.0
"""Seconds before the second attempt; each later pause is four times as long."""
_READ_BYTES = 64 << 20
"""Bytes of one request for a part of a snapshot."""
_INDEX_VERSION = 1
_REMEMBERED = 8
"""Number of windows whose snapshots an object describes in memory."""
_FINAL = (FileNotFoundError, PermissionError)
"""Errors that another attempt does not change."""


@dataclass(frozen=True, slots=True)
class _Entry:
    """Description of a snapshot in an index."""

    stored: StoredSnapshot
    nbytes: int
    """Bytes of the object."""
    header: str
    """Digest of the header, which holds the digests of all tensors."""


class ObjectStore(WindowStore):
    """Object store that holds windows. Two objects with the same URL are equal.

    Args:
        url: URL of the windows, checked by :func:`check_location`.
    """

    is_asked_by_all = False

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._manifests: dict[str, Manifest] = {}
        """Manifests that this object has read or written, by name of the window. A manifest never changes."""
        self._known: dict[str, dict[str, _Entry]] = {}
        """Descriptions of snapshots that this object has written, or read from an index, by window and name."""

    @override
    def __str__(self) -> str:
        return self.url

    @override
    def __eq__(self, other: object) -> bool:
        return isinstance(other, ObjectStore) and other.url == self.url

    @override
    def __hash__(self) -> int:
        return hash(self.url)

    @override
    def manifests_and_refused(self) -> tuple[list[Manifest], dict[str, str]]:
        readable, refused, _ = self._windows()
        return readable, refused

    @override
    def own_windows(self) -> dict[str, bool]:
        """Return the windows of this project: True by name for those with a manifest.

        A window without a manifest is this project's if its name has the right form, because :meth:`remove` deletes
        only objects whose names have the right form too.
        """
        readable, _, unfinished = self._windows()
        return {manifest.name: True for manifest in readable} | dict.fromkeys(unfinished, False)

    @override
    def begin(self, window: str) -> None:
        pass  # an object needs no folder

    @override
    def write(self, window: str, snapshot: Snapshot, is_wanted: Callable[[], bool]) -> None:
        front, pieces = encode_front(snapshot)
        parts = [memoryview(front), *(memoryview(numpy_bytes(piece).data) for piece in pieces)]
        name = file_name(snapshot.header.rank, snapshot.iteration)
        self._put(f"{window}/{name}", parts, is_wanted)
        entry = _Entry(_stored(snapshot.header), sum(part.nbytes for part in parts), header_digest(front))
        self._remember(window, {name: entry})

    @override
    def share(self, before: str, window: str, file: str) -> bool:
        """Let the store copy an object of the window ``before``; its bytes do not travel to this host and back."""
        source, target = f"{before}/{file}", f"{window}/{file}"
        try:
            entry = self._entry(before, file)
            self._ask(f"copy {source}", lambda fs: fs.cp_file(self._path(source), self._path(target)))
            is_whole = self._size(target) == entry.nbytes
        except (OSError, NotImplementedError, SnapshotError):  # the caller writes the object
            return False
        if is_whole:
            self._remember(window, {file: entry})
        return is_whole

    @override
    def finish(self, window: str, files: Sequence[str]) -> None:
        """Write an index for each rank whose snapshots this process has written or shared."""
        known = {name: self._known[window][name] for name in files}
        for owner in {entry.stored.owner for entry in known.values()}:
            entries = [
                {**asdict(entry.stored), "bytes": entry.nbytes, "header": entry.header}
                for entry in known.values()
                if entry.stored.owner == owner
            ]
            content = {"version": _INDEX_VERSION, "digest": _digest(entries), "files": entries}
            self._put(f"{window}/{_index(owner)}", [memoryview(json.dumps(content).encode())])

    @override
    def commit(self, manifest: Manifest) -> None:
        self._put(f"{manifest.name}.json", [memoryview(manifest.encode())])
        self._manifests[manifest.name] = manifest

    @override
    def discard(self, window: str, files: Sequence[str]) -> None:
        owners = {named[0] for name in files if (named := owner_and_iteration(name)) is not None}
        self._delete([f"{window}/{name}" for name in (*files, *map(_index, owners))])

    @override
    def remove(self, window: str) -> None:
        self._manifests.pop(window, None)
        self._delete([f"{window}.json"])
        self._delete([f"{window}/{name}" for name in self._objects(window) if _is_own(name)])

    @override
    def stored(self, window: str, owner: int, is_also_wanted: Callable[[int], bool] | None) -> list[StoredSnapshot]:
        owners = [owner]
        if is_also_wanted is not None:
            listed = {other for name in self._objects(window) if (other := _owner_of_index(name)) is not None}
            owners += sorted(other for other in listed if other != owner and is_also_wanted(other))
        stored = []
        for rank in owners:
            try:
                stored += [entry.stored for entry in self._read_index(window, rank).values()]
            except SnapshotError as error:
                damage.report("the digest of a window's index", str(error), "ranks plan without its snapshots")
        return stored

    @override
    def read(self, window: str, file: str) -> Snapshot:
        header, start = self._header(window, file)
        buffer = torch.empty(header.payload_bytes, dtype=torch.uint8)
        self._fill(buffer, f"{window}/{file}", start=start, at=0)
        return Snapshot(header, Buffer(buffer))

    @override
    def record(self, window: str, file: str) -> Any:
        header, start = self._header(window, file)
        buffer = torch.empty(header.payload_bytes, dtype=torch.uint8)
        for entry in header.entries:
            if entry.operator == BOUNDARY:  # only the record's bytes are read
                part = buffer[entry.offset : entry.offset + entry.nbytes]
                self._fill(part, f"{window}/{file}", start=start, at=entry.offset)
        return Snapshot(header, Buffer(buffer)).record()

    def _fill(self, part: torch.Tensor, key: str, start: int, at: int) -> None:
        """Read bytes of a payload.

        Args:
            part: memory to fill, uint8.
            key: name of the object.
            start: offset of the payload in the object.
            at: offset of the bytes in the payload.

        Raises:
            SnapshotError: the object is missing or cut off.
        """
        view = memoryview(part.numpy().data)
        for offset in range(0, len(view), _READ_BYTES):
            piece, first = view[offset : offset + _READ_BYTES], start + at + offset
            try:
                got = self._get(key, first, first + len(piece))
            except OSError as error:
                raise SnapshotError(f"{self._failure(key, error)}; another copy is needed") from None
            if len(got) < len(piece):
                raise SnapshotError(
                    f"{self._name(key)}: the object ends after {first + len(got)} bytes; it was cut off"
                )
            piece[:] = got

    @override
    def sizes(self, window: str) -> dict[str, int]:
        return {name: size for name, size in self._objects(window).items() if is_snapshot_file(name)}

    @override
    def written_at(self, window: str) -> float | None:
        try:
            return float(self._ask("time", lambda fs: fs.modified(self._path(f"{window}.json"))).timestamp())
        except NotImplementedError:
            return None

    @override
    def lock(self, job: str, flag: str, *, may_wait: bool, report: Report) -> FolderLock | None:
        return None

    @override
    def other_holder(self, job: str) -> str | None:
        return None

    def probe(self, name: str) -> None:
        """Write a small object, to find out at the start whether the store works. The first rank calls it.

        Args:
            name: name of the object.

        Raises:
            OSError: the store cannot be reached or written.
        """
        self._put(name, [memoryview(name.encode())])

    def find_probe(self, name: str) -> None:
        """Read the object that :meth:`probe` has written. Every rank calls it.

        Raises:
            OSError: the store cannot be reached, or this rank does not see what the first rank has written there.
        """
        if self._get(name) != name.encode():
            raise OSError(errno.EIO, "this rank reads other bytes than the first rank has written")

    def end_probe(self, name: str) -> None:
        """Delete the object that :meth:`probe` has written, as far as the store permits it."""
        with suppress(OSError):
            self._delete([name])

    def _windows(self) -> tuple[list[Manifest], dict[str, str], list[str]]:
        """Return the readable manifests, the errors of others by name, and the names of windows without a manifest.

        The list may lack a manifest that exists. So each window of which the list has any object is asked for its
        manifest, unless this object knows the manifest already.
        """
        readable, refused, unfinished = list[Manifest](), dict[str, str](), list[str]()
        names = {name.removesuffix(".json") for name in self._objects("")}
        for name in sorted(filter(is_window_name, names)):
            key = f"{name}.json"
            try:
                if name not in self._manifests:
                    self._manifests[name] = decode_manifest(self._get(key), self._name(key))
                readable.append(self._manifests[name])
            except FileNotFoundError:
                unfinished.append(name)
            except SnapshotError as error:
                refused[name] = str(error)
            except OSError as error:
                refused[name] = self._failure(key, error)
        return newest_first(readable), refused, unfinished

    def _entry(self, window: str, file: str) -> _Entry:
        """Return the description of a snapshot.

        Raises:
            SnapshotError: neither this object nor an index knows the snapshot.
        """
        if file not in self._known.get(window, {}) and (named := owner_and_iteration(file)) is not None:
            self._read_index(window, named[0])
        if (entry := self._known.get(window, {}).get(file)) is None:
            raise SnapshotError(f"{self._name(window)}/{file}: no index lists the object")
        return entry

    def _remember(self, window: str, entries: Mapping[str, _Entry]) -> None:
        self._known.setdefault(window, {}).update(entries)
        for name in list(self._known)[:-_REMEMBERED]:
            del self._known[name]

    def _read_index(self, window: str, owner: int) -> dict[str, _Entry]:
        """Return the descriptions in the index of a rank, by name of the object.

        Raises:
            SnapshotError: the index is missing or damaged.
        """
        key = f"{window}/{_index(owner)}"
        try:
            content = json.loads(self._get(key))
            if content["version"] != _INDEX_VERSION or content["digest"] != _digest(content["files"]):
                raise SnapshotError(f"{self._name(key)}: the index is damaged or of another version")
            entries = dict[str, _Entry]()
            for fields in content["files"]:
                nbytes, header = fields.pop("bytes"), fields.pop("header")
                stored = StoredSnapshot(**fields)
                entries[file_name(owner, stored.iteration)] = _Entry(stored, nbytes, header)
        except OSError as error:
            raise SnapshotError(self._failure(key, error)) from None
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise SnapshotError(f"{self._name(key)}: the object is no index ({type(error).__name__})") from None
        self._remember(window, entries)
        return entries

    def _header(self, window: str, file: str) -> tuple[Header, int]:
        """Return the header of a snapshot, and the offset of its tensors.

        Raises:
            SnapshotError: the object is missing, damaged, of another version, or not the object that the index lists.
        """
        key, entry = f"{window}/{file}", self._entry(window, file)
        try:
            front = self._get(key, 0, FRONT_BYTES)
            if len(front) < (needed := front_bytes(front, self._name(key))):
                front += self._get(key, len(front), needed)
        except OSError as error:
            raise SnapshotError(f"{self._failure(key, error)}; another copy is needed") from None
        if header_digest(front) != entry.header:
            raise SnapshotError(f"{self._name(key)}: the object was replaced after its index was written")
        header = decode_header(front[:needed], self._name(key))
        if payload_at(needed) + header.payload_bytes != entry.nbytes:
            raise SnapshotError(f"{self._name(key)}: the index has {entry.nbytes} bytes, which the header contradicts")
        return header, payload_at(needed)

    # Requests

    @cached_property
    def _fs_and_root(self) -> tuple[Any, str]:
        from fsspec.core import url_to_fs

        fs, root = url_to_fs(self.url, use_listings_cache=False, skip_instance_cache=True)
        return fs, root.rstrip("/")

    def _path(self, key: str) -> str:
        root = self._fs_and_root[1]
        return f"{root}/{key}" if key else root

    def _name(self, key: str) -> str:
        return f"{self.url}/{key}"

    def _failure(self, key: str, error: BaseException) -> str:
        return f"{self._name(key)}: {described(error)}"

    def _ask[T](self, what: str, request: Callable[[Any], T], is_wanted: Callable[[], bool] = lambda: True) -> T:
        """Make a request, up to :data:`ATTEMPTS` times, and return its result.

        Raises:
            FileNotFoundError: there is no such object.
            NotImplementedError: the store has no such request.
            OSError: the request failed; the error names the reason without credentials.
        """
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return request(self._fs_and_root[0])
            except (FileNotFoundError, NotImplementedError):
                raise
            except Exception as error:  # each library of a store has errors of its own
                reason = described(error)
                if attempt == ATTEMPTS or isinstance(error, _FINAL) or not is_wanted():
                    number = error.errno if isinstance(error, OSError) and error.errno else errno.EIO
                    raise OSError(number, f"{reason} (attempt {attempt} of {ATTEMPTS})") from None
                log.warning(f"{self.url}: {what}: {reason}; the request is made again ({attempt} of {ATTEMPTS} failed)")
                time.sleep(PAUSE_S * 4 ** (attempt - 1))
        raise AssertionError("the loop returns or raises")

    def _put(self, key: str, parts: Sequence[memoryview], is_wanted: Callable[[], bool] = lambda: True) -> None:
        """Write an object, and check its size. An attempt that fails may leave a part of the object behind."""
        nbytes = sum(part.nbytes for part in parts)

        def request(fs: Any) -> None:
            path = self._path(key)
            self._make_private_folder(fs, path)
            with closing(fs.open(path, "wb")) as file:
                for part in parts:
                    file.write(part)
            self._make_private(fs, path)
            fs.invalidate_cache()
            try:
                size = fs.info(path)["size"]
            except FileNotFoundError:
                raise OSError(errno.EIO, "the store does not have the object right after it was written") from None
            if size != nbytes:
                raise OSError(errno.EIO, f"{nbytes} bytes were sent, and the store has {size}")

        try:
            self._ask(f"write {key}", request, is_wanted)
        except FileNotFoundError as error:
            raise OSError(errno.EIO, described(error)) from None

    def _make_private_folder(self, fs: Any, path: str) -> None:
        """Make the folder of an object, if the store is a folder of this host; its mode is that of the job's files."""
        if _is_local(fs):
            make_folder(Path(path).parent)

    def _make_private(self, fs: Any, path: str) -> None:
        if _is_local(fs):
            Path(path).chmod(Path(path).stat().st_mode & file_mode().bits)

    def _get(self, key: str, start: int | None = None, end: int | None = None) -> bytes:
        return self._ask(f"read {key}", lambda fs: bytes(fs.cat_file(self._path(key), start=start, end=end)))

    def _size(self, key: str) -> int | None:
        def request(fs: Any) -> int:
            fs.invalidate_cache()
            return int(fs.info(self._path(key))["size"])

        try:
            return self._ask(f"size of {key}", request)
        except FileNotFoundError:
            return None

    def _objects(self, folder: str) -> dict[str, int]:
        """Return the names of objects and folders right below a folder, with their bytes."""

        def request(fs: Any) -> list[Mapping[str, Any]]:
            fs.invalidate_cache()
            return list(fs.ls(self._path(folder), detail=True))

        try:
            entries = self._ask(f"list {folder or 'windows'}", request)
        except FileNotFoundError:  # there is no object below it
            return {}
        return {str(entry["name"]).rstrip("/").rpartition("/")[2]: int(entry.get("size") or 0) for entry in entries}

    def _delete(self, keys: Sequence[str]) -> None:
        def request(fs: Any) -> None:
            try:
                fs.rm([self._path(key) for key in keys])
            except FileNotFoundError:  # some stores stop at the first missing object
                for key in keys:
                    with suppress(FileNotFoundError):
                        fs.rm_file(self._path(key))
            if _is_local(fs):
                for folder in {Path(self._path(key)).parent for key in keys} - {Path(self._path(""))}:
                    with suppress(OSError):
                        folder.rmdir()

        if keys:
            self._ask(f"delete {len(keys)} objects", request)


def _is_local(fs: Any) -> bool:
    return "file" in ((fs.protocol,) if isinstance(fs.protocol, str) else fs.protocol)


def _index(owner: int) -> str:
    return f"rank_{owner:05d}.json"


def _owner_of_index(name: str) -> int | None:
    number = name.removeprefix("rank_").removesuffix(".json")
    return int(number) if number.isdigit() and name == _index(int(number)) else None


def _is_own(name: str) -> bool:
    """Return True if an object in a window has a name that this module gives."""
    return owner_and_iteration(name) is not None or _owner_of_index(name) is not None


def _digest(entries: Any) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(entries, sort_keys=True, separators=(",", ":")).encode())


def _stored(header: Header) -> StoredSnapshot:
    return StoredSnapshot(
        owner=header.rank, iteration=header.iteration, state=header.state, schedule=header.schedule,
        contents=header.contents,
    )  # fmt: skip
