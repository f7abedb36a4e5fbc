"""Names of a job and of its starts, which identify the owner of folders and windows.

All processes of a job know the job's name, even processes that join later. The name stays the same through failures and
restarts. A *start* is the first beginning of a job, or a restart after the job lost all state. Each start has a name of
its own. Windows on disk carry the name of the start that wrote them.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from itertools import count

from moevement_core.comms.address import store_address
from moevement_core.comms.exchange import from_rank_zero
from moevement_core.rendezvous.roster import JOB_NAME
from moevement_core.rendezvous.store import connect

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

    @property
    def is_restart(self) -> bool:
        """True if the job has started before."""
        return self.start != self.name


def agree_on_names() -> JobNames:
    """Return the names of the job and of this start. Every rank calls it at the same point, once in each start."""
    names: JobNames = from_rank_zero(_names, JobNames)
    return names


def _names() -> JobNames:
    if (name := job_name()) is None or (address := store_address()) is None:
        return JobNames(*(_new_name(),) * 2)  # without a store, a job ends with its first failure: it has one start
    store, claimant = connect(address), uuid.uuid4().hex
    before = next(number for number in count() if store.claim(_START.format(number), claimant) == claimant)
    return JobNames(name, f"{name}.{before}" if before else name)


def job_name() -> str | None:
    """Return the job's name from the launcher's store; None without a store. Any process may call it at any time."""
    if (address := store_address()) is None:
        return None
    return connect(address).claim(JOB_NAME, _new_name())  # the first process that asks sets the name


def remember(key: str, value: str) -> str:
    """Store ``value`` for ``key`` in the job's store, unless a process has done so before, and return the stored value.

    Any process may call it at any time. Without a store the function returns ``value``: such a job ends with its first
    failure, so no later process asks.
    """
    if (address := store_address()) is None:
        return value
    return connect(address).claim(key, value)


def _new_name() -> str:
    return uuid.uuid4().hex[:8]
