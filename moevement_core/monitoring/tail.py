"""A file of JSON lines that grows while it is read."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from moevement_core.errors import RunRecordError
from moevement_core.regular_files import open_regular


@dataclass(frozen=True)
class News:
    """What a file holds that had not been read."""

    lines: list[dict[str, Any]] = field(default_factory=list)
    is_rewritten: bool = False
    """Whether another file is in its place, of which these are all lines: what was read before counts no more."""


class Tail:
    """Reads whole lines, each of them once.

    The writer replaces the file as a whole when a run resumes (iterations that it does again leave it), and appends
    else. A line whose end is missing is left for the next time.

    Args:
        path: of the file; it need not be there yet.
        complaint_of: what is wrong with a line, in words; None if nothing is.
    """

    def __init__(self, path: Path, complaint_of: Callable[[dict[str, Any]], str | None] = lambda fields: None) -> None:
        self._path, self._complaint_of = path, complaint_of
        self._inode, self._offset = 0, 0

    def read(self) -> News:
        """Returns what is new.

        Raises:
            RunRecordError: a whole line is no JSON object, or not one of its kind.
        """
        try:
            file = open_regular(self._path)
        except FileNotFoundError:
            return News()
        except OSError as error:
            raise RunRecordError(f"{self._path}: {error.strerror}; needs a file that can be read") from None
        with file:
            inode, size = _identity(file)
            is_rewritten = self._offset > 0 and (inode != self._inode or size < self._offset)
            if is_rewritten:
                self._offset = 0
            self._inode = inode
            file.seek(self._offset)
            whole, _, _ = file.read().rpartition(b"\n")
            lines = [self._parse(line) for line in whole.splitlines()]
            self._offset += len(whole) + 1 if whole else 0
        return News(lines, is_rewritten)

    def _parse(self, line: bytes) -> dict[str, Any]:
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError):
            fields = None
        if not isinstance(fields, dict):
            raise RunRecordError(f"{self._path}: {line[:60]!r} is no JSON object; the file was damaged after writing")
        if (complaint := self._complaint_of(fields)) is not None:
            raise RunRecordError(f"{self._path}: {complaint}")
        return fields


def _identity(file: BinaryIO) -> tuple[int, int]:
    """Inode and size."""
    status = os.fstat(file.fileno())
    return status.st_ino, status.st_size
