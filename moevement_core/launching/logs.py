"""Limits on the log files of a job's processes: the size of a file, and the number of ended processes with files.

A process writes to its log file directly, so the launcher has to rotate the file while the process has it open. The
launcher copies the content to another file and truncates the log file, to which the process goes on appending. Output
that arrives between the copy and the truncation may be lost.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from moevement_core.util.file_modes import opener

MOST_BYTES = 64 << 20
"""Size in bytes at which a log file is rotated; the rotated file ``NAME.1`` has about the same size."""
KEPT_ENDED = 64
"""Number of ended processes whose log files are kept. If more have ended, the files of the earliest are deleted."""
EVERY_S = 5.0
"""Seconds between two checks of the log files."""


class LogFolder:
    """Log files of the processes of one launcher.

    Args:
        folder: folder of the files.
        most_bytes: approximate limit on the size of a file, in bytes.
        kept_ended: number of ended processes whose files are kept.
    """

    def __init__(self, folder: Path, most_bytes: int = MOST_BYTES, kept_ended: int = KEPT_ENDED) -> None:
        self._folder, self._most_bytes, self._kept_ended = folder, most_bytes, kept_ended
        self._due_s = time.monotonic() + EVERY_S

    def look(self, running: Collection[str]) -> None:
        """Enforce the limits if the last check was :data:`EVERY_S` seconds ago; the launcher calls this in its loop.

        Args:
            running: labels of the processes that run.
        """
        if time.monotonic() >= self._due_s:
            self._due_s = time.monotonic() + EVERY_S
            self.keep_to_bounds(running)

    def keep_to_bounds(self, running: Collection[str]) -> None:
        """Rotate log files that are too large. Delete log files of ended processes, except those that ended last.

        Args:
            running: labels of the processes that run.
        """
        with suppress(OSError):  # The disk may be full or the folder removed; the next check tries again.
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
