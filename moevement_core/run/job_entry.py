"""Content of ``job.json`` in a run directory: the launch and the end of the newest job."""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from moevement_core.util.process_identity import is_gone, machine_id, start_of
from moevement_core.util.versions import versions


@dataclass(frozen=True)
class JobEntry:
    """Launch and end of a job, as the launching process records them.

    The launching process is the launcher, or the coordinator of a job on several hosts.
    """

    command: str
    """Command line of the launching process, quoted for a shell; empty if a program has called the launcher."""
    began_at: float
    """Time of the launch, in seconds since the epoch."""
    host: str
    pid: int
    """Process id of the launching process, which lives as long as the job."""
    machine: str
    """Identifier of the host's current boot and of the process namespace; ``pid`` is valid only there."""
    started: str
    """Start time of the launching process, in kernel ticks since boot."""
    hardware: str
    """Number of cores, processor and GPUs of ``host``, in words."""
    ranks: int
    spares: int | None
    """Number of spares that the launching process starts. None if the first failure ends the job (no ``--spares``), or
    if another process starts the spares."""
    versions: Mapping[str, str]
    """Version of each package on which computed results depend, by the name of the package."""
    ended_at: float | None = None
    """Time at which the job ended, in seconds since the epoch; None while it runs, or if its launcher was killed."""
    code: int | None = None
    """Exit code of the job; None while it runs."""
    reason: str = ""
    """Text that says why the job ended before its last iteration; empty if it did not."""
    address: str = ""
    """Address of the coordinator of a job on several hosts, ``HOST:PORT``; empty for a job on one host."""
    standby: str = ""
    """Address of the process that takes over when the coordinator is lost; empty if there is none now."""

    @staticmethod
    def of_this_process(command: str, ranks: int, spares: int | None) -> JobEntry:
        """Return the entry of a job that this process launches now."""
        pid = os.getpid()
        return JobEntry(
            command, began_at=round(time.time(), 3), host=socket.gethostname(), pid=pid, machine=machine_id(),
            started=start_of(pid) or "", hardware=_hardware(), ranks=ranks, spares=spares, versions=versions(),
        )  # fmt: skip

    @property
    def is_abandoned(self) -> bool:
        """True if the launching process has certainly ended, but has not recorded the end of the job.

        On another machine than that of the launching process, the value is always False.
        """
        return self.ended_at is None and is_gone(self.machine, self.pid, self.started)


def _hardware() -> str:
    """Return a description of this host's cores, processor and GPUs, without importing torch."""
    parts = [f"{len(os.sched_getaffinity(0))} cores", *_first_of("/proc/cpuinfo", "model name")]
    gpus = [
        name for path in Path("/proc/driver/nvidia/gpus").glob("*/information") for name in _first_of(path, "Model")
    ]
    return ", ".join([*parts, *(f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus))])


def _first_of(path: Path | str, field: str) -> list[str]:
    """Return the first value of ``field`` in a file with lines like ``field: value``, as a list of one element.

    The list is empty if the file or the field is missing.
    """
    try:
        text = Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return [match[1].strip() for match in [re.search(rf"^{field}\s*:(.*)$", text, re.MULTILINE)] if match]
