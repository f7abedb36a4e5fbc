"""The output of a job's processes in files, bounded: in the size of each, and in how many of ended processes are kept.

Processes write to their files themselves, so a file is rotated under its writer: what is in it is copied and the file
is made empty. Its writer appends, and goes on at its new beginning. What is written in the very moment between the two
may be missing.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from moevement_core.file_modes import opener

MOST_BYTES = 64 << 20
"""Of a file; as much again is in the one before it, ``NAME.1``."""
KEPT_ENDED = 64
"""Processes that have ended whose output is kept: those that ended last."""
EVERY_S = 5.0


class LogFolder:
    """The files of one launcher.

    Args:
        folder: where they are.
        most_bytes: of a file, about.
        kept_ended: processes.
    """

    def __init__(self, folder: Path, most_bytes: int = MOST_BYTES, kept_ended: int = KEPT_ENDED) -> None:
        self._folder, self._most_bytes, self._kept_ended = folder, most_bytes, kept_ended
        self._due_s = time.monotonic() + EVERY_S

    def look(self, running: Collection[str]) -> None:
        """Keep to the bounds; does nothing most of the time.

        Args:
            running: labels of the processes that run.
        """
        if time.monotonic() >= self._due_s:
            self._due_s = time.monotonic() + EVERY_S
            self.keep_to_bounds(running)

    def keep_to_bounds(self, running: Collection[str]) -> None:
        """Rotate what has grown too large, and let go of what ended long ago."""
        with suppress(OSError):  # a disk without room, a folder that was removed: tried again
            for path in self._folder.glob("*.[oe]*"):
                if path.suffix in (".out", ".err") and path.stat().st_size > self._most_bytes:
                    _rotate(path)
            ended = {path.name.partition(".")[0] for path in self._folder.glob("*_*.*")} - set(running)
            newest_first = sorted(ended, key=self._ended_at, reverse=True)
            for label in newest_first[self._kept_ended :]:
                for path in self._folder.glob(f"{label}.*"):
                    path.unlink(missing_ok=True)

    def _ended_at(self, label: str) -> tuple[float, int]:
        written = max((path.stat().st_mtime for path in self._folder.glob(f"{label}.*")), default=0.0)
        number = label.rpartition("_")[2]
        return written, int(number) if number.isdecimal() else 0


def _rotate(path: Path) -> None:
    before = path.with_name(f"{path.name}.1")
    with path.open("rb") as source, open(before, "wb", opener=opener) as target:
        shutil.copyfileobj(source, target, 1 << 20)
    os.truncate(path, 0)
