"""Which process a process id stands for: ids are used again, and mean nothing on another machine."""

from __future__ import annotations

import os
import socket
import uuid
from pathlib import Path


def machine_id() -> str:
    """Return the boot and the process namespace in which this process's ids mean something."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return f"{socket.gethostname()} {uuid.getnode()}"


def start_of(pid: int) -> str | None:
    """Return when a process of this machine was started, in ticks since boot; None if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    state, started = fields[0], fields[19]
    return None if state in "ZX" else started


def is_gone(machine: str, pid: int, started: str) -> bool:
    """Return whether a process is known to have ended; False where that cannot be known from here."""
    return machine == machine_id() and start_of(pid) != started
