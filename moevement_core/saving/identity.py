"""Names of a job and of its starts, which identify the owner of folders and windows.

All processes of a job know the job's name, even processes that join later. The name stays the same through failures and
restarts. A *start* is the first beginning of a job, or a restart after the job lost all state. Each start has a name of
its own. Windows on disk carry the name of the start that wrote them.
"""

from __future__ import annotations

import uuid
from contextlib import closing
from dataclasses import dataclass
from itertools import count

from moevement_core.comms.exchange import from_rank_zero
from moevement_core.rendezvous.roster import JOB_NAME
from moevement_core.rendezvous.value_client import connect, is_first_to_claim, supervisor_address
from moevement_core.saving.rollback import RollbackDecision, decided_rollback

_START = "job/starts/{}"


@dataclass(frozen=True, slots=True)
class JobNames:
    """Names of a job and of one of its starts."""

    name: str = ""
    """Name of the job: eight hexadecimal digits, the same in all its processes. It marks the job's folders."""
    start: str = ""
    """Name of this start, which windows on disk carry; empty in a process that has joined a running job.

    The first start has the job's name. Later starts have the job's name, followed by ``.1``, ``.2``, ...
    """
    rollback: RollbackDecision | None = None
    """Roll back of the job after a loss spike; None without one."""

    @property
    def number(self) -> int:
        """Number of this start: 0 for the first one."""
        return int(self.start.partition(".")[2] or 0)

    @property
    def is_restart(self) -> bool:
        """True if the job has started before."""
        return self.start != self.name


def agree_on_names() -> JobNames:
    """Return the names of the job and of this start. Every rank calls it at the same point, once in each start."""
    names: JobNames = from_rank_zero(_names, JobNames)
    return names


def _names() -> JobNames:
    if (name := job_name()) is None:
        return JobNames(*(_new_name(),) * 2)  # Without a supervisor, a job ends with its first failure.
    before = next(number for number in count() if is_first_to_claim(_START.format(number)))
    return JobNames(name, f"{name}.{before}" if before else name, decided_rollback())


def names_of_running_job() -> JobNames:
    """Return the names of the job in a process that joins it while it runs."""
    return JobNames(job_name() or "", rollback=decided_rollback())


def job_name() -> str | None:
    """Return the job's name; None in a process without a supervisor. Any process may call it at any time."""
    if supervisor_address() is None:
        return None
    with closing(connect()) as values:
        return values.claim(JOB_NAME, _new_name())  # The first process that asks sets the name.


def remember(key: str, value: str) -> str:
    """Set ``key`` among the job's values to ``value``, unless a process has done so before, and return the value.

    Any process may call it at any time. Without a supervisor the function returns ``value``: such a job ends with its
    first failure, so no later process asks.
    """
    if supervisor_address() is None:
        return value
    with closing(connect()) as values:
        return values.claim(key, value)


def _new_name() -> str:
    return uuid.uuid4().hex[:8]
