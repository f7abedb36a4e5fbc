"""Files in memory that a process shares with those it starts: no folder has to be there, and no disk can fill.

A file system that fills ends whoever writes to a mapping of a hole in it (SIGBUS), and cleaners of temporary folders
remove files that look old. Such a file has neither; it is there as long as the process that made it.
"""

from __future__ import annotations

import os


class MemoryFile:
    """Anonymous file in memory (memfd_create(2)); for one process, which others of its user may open by ``path``.

    Args:
        name: shown by the system where it lists what a process has open.
        content: what it holds at first.

    Raises:
        OSError: this process has too many open files, or no memory is left.
    """

    def __init__(self, name: str, content: bytes = b"") -> None:
        self.descriptor = os.memfd_create(name, os.MFD_CLOEXEC)
        self.path = f"/proc/{os.getpid()}/fd/{self.descriptor}"
        """Path under which this process and its descendants open it; valid while this process lives and has it open."""
        with open(self.descriptor, "wb", closefd=False) as file:
            file.write(content)

    def close(self) -> None:
        """Give it back; who has opened or mapped it keeps it."""
        os.close(self.descriptor)
