"""Reading of files from untrusted folders. Pipes, sockets and devices are refused, because a read may wait forever."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

MOST_BYTES = 1 << 30
"""Most bytes that :func:`read_regular` reads by default."""


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading, without a buffer.

    Raises:
        OSError: the file is missing or unreadable, or is not a regular file.
    """
    # Without O_NONBLOCK, open() of a pipe waits until another process opens it for writing.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        raise OSError(errno.EINVAL, "it is a pipe, a socket or a device, not a regular file", str(path))
    return os.fdopen(descriptor, "rb", buffering=0)


def read_regular(path: Path, most: int = MOST_BYTES) -> bytes:
    """Return the content of a regular file.

    Raises:
        OSError: :func:`open_regular` raised it, or the file is longer than ``most`` bytes.
    """
    with open_regular(path) as file:
        if (size := os.fstat(file.fileno()).st_size) > most:
            raise OSError(errno.EFBIG, f"{size:,} bytes, more than any valid file has", str(path))
        return file.readall()  # type: ignore[attr-defined]
