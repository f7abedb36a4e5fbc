"""Object store with faults, for tests: one in this process's memory, and one in a folder that processes share."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, override

import fsspec
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem

PLAN_ENV = "FAULTY_STORE_PLAN"
"""Variable with the path of a JSON file with the faults of ``faultyfile://``."""


@dataclass
class Faults:
    """Faults of the store in memory."""

    failing_writes: int = 0
    """Number of the next writes that fail."""
    torn_writes: int = 0
    """Number of the next writes of which the store keeps half, and reports success."""
    write_s: float = 0.0
    """Seconds that each write takes."""
    unlisted: set[str] = field(default_factory=set)
    """Ends of names that lists leave out."""
    unseen: int = 0
    """Number of the next questions for one object that the store answers as if it had no such object."""
    is_unreachable: bool = False
    requests: Counter[str] = field(default_factory=Counter)
    """Number of requests by kind."""


class StoreUnreachable(Exception):
    """Error of a kind that only the library of a store knows."""


class _Torn(MemoryFile):
    @override
    def write(self, data: Any) -> int:
        super().write(bytes(data)[: len(data) // 2])
        return len(data)


class FaultyFileSystem(MemoryFileSystem):
    """Memory of this process as an object store, ``faulty://bucket/...``."""

    protocol = "faulty"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    faults: ClassVar[Faults] = Faults()

    @classmethod
    @override
    def _strip_protocol(cls, path: Any) -> Any:
        return super()._strip_protocol(path.removeprefix("faulty://") if isinstance(path, str) else path)

    def _count(self, kind: str) -> None:
        self.faults.requests[kind] += 1
        if self.faults.is_unreachable:
            raise StoreUnreachable("no route to faulty://me:sesame@bucket?sig=abc\nwith a second line")

    @override
    def _open(self, path: str, mode: str = "rb", *args: Any, **kwargs: Any) -> Any:
        if mode != "wb":
            return super()._open(path, mode, *args, **kwargs)
        self._count("write")
        time.sleep(self.faults.write_s)
        if self.faults.failing_writes:
            self.faults.failing_writes -= 1
            raise StoreUnreachable("503 Slow Down")
        if self.faults.torn_writes:
            self.faults.torn_writes -= 1
            torn = _Torn(self, self._strip_protocol(path))
            torn.commit()
            return torn
        return super()._open(path, mode, *args, **kwargs)

    @override
    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> Any:
        self._count("list")
        entries = super().ls(path, detail=True, **kwargs)
        return [entry for entry in entries if not entry["name"].endswith(tuple(self.faults.unlisted))]

    @override
    def info(self, path: str, **kwargs: Any) -> Any:
        self._count("info")
        if self.faults.unseen:
            self.faults.unseen -= 1
            raise FileNotFoundError(path)
        return super().info(path, **kwargs)

    @override
    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> Any:
        self._count("read")
        return super().cat_file(path, start, end, **kwargs)

    @override
    def cp_file(self, path1: str, path2: str, **kwargs: Any) -> None:
        self._count("copy")
        super().cp_file(path1, path2, **kwargs)

    @override
    def rm(self, path: Any, recursive: bool = False, maxdepth: int | None = None) -> None:
        self._count("delete")
        super().rm(path, recursive, maxdepth)


class FaultyFolder(LocalFileSystem):
    """Folder as an object store, ``faultyfile:///...``; writes fail between two iterations that the plan names.

    The plan is read at each write, so that a test decides while a job runs.
    """

    protocol = ("faultyfile", "file")

    @classmethod
    @override
    def _strip_protocol(cls, path: Any) -> Any:
        return super()._strip_protocol(path.removeprefix("faultyfile://") if isinstance(path, str) else path)

    @override
    def _open(self, path: str, mode: str = "rb", *args: Any, **kwargs: Any) -> Any:
        if mode == "wb":
            plan = json.loads(Path(os.environ[PLAN_ENV]).read_text())
            time.sleep(plan.get("write_s", 0.0))
            if any(part in path for part in plan.get("failing", ())):
                raise StoreUnreachable("503 Slow Down")
        return super()._open(path, mode, *args, **kwargs)


def register() -> None:
    """Make the stores known to fsspec in this process."""
    fsspec.register_implementation("faulty", FaultyFileSystem, clobber=True)
    fsspec.register_implementation("faultyfile", FaultyFolder, clobber=True)
