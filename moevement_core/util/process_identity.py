"""Identity of a process. The process id alone is not enough: a system reuses ids, and other machines use them too."""

from __future__ import annotations

import os
import socket
import uuid
from pathlib import Path


def machine_id() -> str:
    """Return an identifier of this boot of the machine and of the process namespace, in which process ids are valid."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return f"{socket.gethostname()} {uuid.getnode()}"


def start_of(pid: int) -> str | None:
    """Return the start time of a process of this machine, in ticks since boot; None if the process has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    state, started = fields[0], fields[19]
    return None if state in "ZX" else started


def is_gone(machine: str, pid: int, started: str) -> bool:
    """Return True if a process has certainly ended; False if it is alive, or if it ran on another machine.

    Args:
        machine: identifier of the machine of the process (:func:`machine_id`).
        pid: id of the process on that machine.
        started: start time of the process (:func:`start_of`).
    """
    return machine == machine_id() and start_of(pid) != started
