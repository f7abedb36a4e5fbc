"""Content of ``job.json`` in a run directory: how its newest job was launched, and how it ended."""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from moevement_core.process_identity import is_gone, machine_id, start_of
from moevement_core.versions import versions


@dataclass(frozen=True)
class JobEntry:
    """Job as the process that launched it knows it: the launcher, or the coordinator of several hosts."""

    command: str
    """The command line, quoted for a shell; empty where the job was launched by a program."""
    began_at: float
    """Time of the launch, in seconds since the epoch."""
    host: str
    pid: int
    """The id of the process that launched it, which lives as long as the job."""
    machine: str
    """The boot and the process namespace in which ``pid`` means something."""
    started: str
    """Start of that process by its kernel's count."""
    hardware: str
    """Cores, processor and GPUs of ``host``, in words."""
    ranks: int
    spares: int | None
    """Processes beyond the ranks; None where the first failure ends the job, or other hosts count them."""
    versions: Mapping[str, str]
    """Version of each package that results depend on."""
    ended_at: float | None = None
    """Time of the end, in seconds since the epoch; None while it runs, and if its launcher was killed."""
    code: int | None = None
    """Exit code of the job; None while it runs."""
    reason: str = ""
    """Why it ended before its last iteration, in words."""

    @staticmethod
    def of_this_process(command: str, ranks: int, spares: int | None) -> JobEntry:
        """Return the entry of a job that this process launches now."""
        pid = os.getpid()
        return JobEntry(
            command, round(time.time(), 3), socket.gethostname(), pid, machine_id(), start_of(pid) or "", _hardware(),
            ranks, spares, versions(),
        )  # fmt: skip

    @property
    def is_abandoned(self) -> bool:
        """Return whether the process that launched it is gone without a report; False where that cannot be known from
        here.
        """
        return self.ended_at is None and is_gone(self.machine, self.pid, self.started)


def _hardware() -> str:
    """Return what this host computes with, read without importing torch."""
    parts = [f"{len(os.sched_getaffinity(0))} cores", *_first_of("/proc/cpuinfo", "model name")]
    gpus = [
        name for path in Path("/proc/driver/nvidia/gpus").glob("*/information") for name in _first_of(path, "Model")
    ]
    return ", ".join([*parts, *(f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus))])


def _first_of(path: Path | str, field: str) -> list[str]:
    """Return the first value of a field of a file with lines like ``field: value``; nothing if there is none."""
    try:
        text = Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return [match[1].strip() for match in [re.search(rf"^{field}\s*:(.*)$", text, re.MULTILINE)] if match]
