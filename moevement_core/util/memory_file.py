"""Files in memory that a process shares with its descendants, independent of folders and disks.

A file in a temporary folder has two risks. If the disk is full, SIGBUS ends a process that writes to a mapped page
without disk space. Cleaners of temporary folders remove files that look old. A file in memory has neither risk. The
system frees it when no process has it open or mapped any more.
"""

from __future__ import annotations

import os


class MemoryFile:
    """Anonymous file in memory (memfd_create(2)) that other processes of the same user open by ``path``.

    Args:
        name: name under which the system lists the file among the open files of the process.
        content: initial content.

    Raises:
        OSError: this process has too many open files, or the host is out of memory.
    """

    def __init__(self, name: str, content: bytes = b"") -> None:
        self.descriptor = os.memfd_create(name, os.MFD_CLOEXEC)
        self.path = f"/proc/{os.getpid()}/fd/{self.descriptor}"
        """Path by which this process and its descendants open the file; valid until this process ends or closes it."""
        with open(self.descriptor, "wb", closefd=False) as file:
            file.write(content)

    def close(self) -> None:
        """Close the descriptor; other processes that have opened or mapped the file can still use it."""
        os.close(self.descriptor)
