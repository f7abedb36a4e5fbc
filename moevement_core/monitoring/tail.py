"""Reader of a file of JSON lines that grows between reads."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from moevement_core.errors import RunRecordError
from moevement_core.util.regular_files import open_regular


@dataclass(frozen=True)
class News:
    """Result of one read: the lines of the file that no earlier read has returned."""

    lines: list[dict[str, Any]] = field(default_factory=list)
    is_rewritten: bool = False
    """True if a new file has replaced the old one. Then lines from earlier reads are invalid, and ``lines`` has all
    lines of the new file."""


class Tail:
    """Reader of a growing file that returns each complete line once, and leaves an unfinished line for the next read.

    A run that resumes replaces the whole file, to drop the iterations that it will execute again. Otherwise a run only
    appends lines.

    Args:
        path: path of the file, which need not exist yet.
        complaint_of: function that returns a description of the error in a line; None if the line is valid.
    """

    def __init__(self, path: Path, complaint_of: Callable[[dict[str, Any]], str | None] = lambda fields: None) -> None:
        self._path, self._complaint_of = path, complaint_of
        self._inode, self._offset = 0, 0

    def read(self) -> News:
        """Return the lines that are new since the last call.

        Raises:
            RunRecordError: the file cannot be read, or a complete line is not a JSON object of the expected kind.
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
    """Return the inode and the size in bytes of an open file."""
    status = os.fstat(file.fileno())
    return status.st_ino, status.st_size
