"""Files that somebody else may have put there: a pipe, a socket or a device is refused, and never waited for."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

MOST_BYTES = 1 << 30
"""Most bytes of a file that is read as a whole."""


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading, without a buffer.

    Raises:
        OSError: there is none that can be read, or it is something else than a file.
    """
    # Without O_NONBLOCK a pipe is waited for until somebody writes to it.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        raise OSError(errno.EINVAL, "no regular file, but a pipe, a socket or a device", str(path))
    return os.fdopen(descriptor, "rb", buffering=0)


def read_regular(path: Path, most: int = MOST_BYTES) -> bytes:
    """Return the content of a file.

    Raises:
        OSError: as :func:`open_regular`, or it is longer than ``most`` bytes.
    """
    with open_regular(path) as file:
        if (size := os.fstat(file.fileno()).st_size) > most:
            raise OSError(errno.EFBIG, f"{size:,} bytes, which no such file has", str(path))
        return file.readall()  # type: ignore[attr-defined]
