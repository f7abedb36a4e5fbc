"""The name of the job that this process takes part in: the owner of the folders that the job writes to.

All processes of a job have it, whenever they join, and keep it through failures and restarts within the job. Each start
within the job, of which there are several if all state was lost, has a name of its own for its windows.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from itertools import count

from moevement_core.comms.exchange import from_rank_zero
from moevement_core.rendezvous.roster import JOB_NAME
from moevement_core.rendezvous.store import connect, store_address

_START = "job/starts/{}"


@dataclass(frozen=True, slots=True)
class JobNames:
    """Names of a job and of one start of it."""

    name: str = ""
    """Eight hexadecimal digits, the same in all processes of the job: who owns the folders that it writes to."""
    start: str = ""
    """The same for the first start, with ``.1``, ``.2``, ... for those after it: in the names of its windows. Empty in
    a process that has joined a running job."""

    @property
    def is_restart(self) -> bool:
        """True if the job has started before."""
        return self.start != self.name


def agree_on_names() -> JobNames:
    """Returns the names of the job and of this start of it; every rank calls it at the same point, once a start."""
    names: JobNames = from_rank_zero(_names, JobNames)
    return names


def _names() -> JobNames:
    if (name := job_name()) is None or (address := store_address()) is None:
        return JobNames(*(_new_name(),) * 2)  # a job that ends with its first failure
    store, claimant = connect(address), uuid.uuid4().hex
    before = next(number for number in count() if store.claim(_START.format(number), claimant) == claimant)
    return JobNames(name, f"{name}.{before}" if before else name)


def job_name() -> str | None:
    """The job's name as the launcher's store has it, for any process at any time; None where there is no store."""
    if (address := store_address()) is None:
        return None
    return connect(address).claim(JOB_NAME, _new_name())  # whoever asks first gives it


def remember(key: str, value: str) -> str:
    """Return the value that the first process of the job gave for ``key``, which may be this one. Any process may call
    it at any time.

    Where there is no store nothing is remembered: the job ends with its first failure.
    """
    if (address := store_address()) is None:
        return value
    return connect(address).claim(key, value)


def _new_name() -> str:
    return uuid.uuid4().hex[:8]
