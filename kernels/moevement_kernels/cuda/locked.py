"""Lock between the processes of a node. A process waits for the lock in short steps."""

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
    """Hold the exclusive lock of ``path``, a file that is created if it is missing.

    A blocking flock is one C call, during which the process can neither handle a restart's exception nor send a
    heartbeat. Short attempts with pauses allow both.

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
