"""Lock between the processes of a node. A process that waits for the lock can still handle a restart."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

STEP_S = 0.1
"""Seconds between two attempts to get the lock."""


@contextmanager
def locked(path: Path, limit_s: float) -> Iterator[None]:
    """Hold the exclusive lock on the file ``path`` while the context lasts; create the file if it is missing.

    The function tries to get the lock again and again, with short pauses. A single blocking call of ``flock`` would
    prevent the process from handling the exception of a restart and from sending heartbeats.

    Args:
        path: lock file; the process that holds the lock writes its process id into the file.
        limit_s: seconds to wait for the lock.

    Raises:
        TimeoutError: another process still holds the lock after ``limit_s`` seconds.
    """
    deadline = time.monotonic() + limit_s
    with path.open("a+") as file:
        while not _acquires(file):
            if time.monotonic() >= deadline:
                file.seek(0)
                raise TimeoutError(
                    f"process {file.read().strip() or 'unknown'} has held {path} for more than {limit_s:g} s; end this "
                    "process if it hangs, or set TORCH_EXTENSIONS_DIR to another folder"
                )
            time.sleep(STEP_S)
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def _acquires(file: TextIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
