"""Writer of ``job.json``, the file in a run directory that says how a job was started and how it ended."""

from __future__ import annotations

import signal
import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, replace
from types import TracebackType

from moevement_core.comms.address import address_of
from moevement_core.errors import MoEvementError, RunRecordError
from moevement_core.launching.signals import Stopped
from moevement_core.run.job_entry import JobEntry
from moevement_core.run.run_record import RunRecord
from moevement_core.util.exit_codes import USAGE_ERROR
from moevement_core.util.file_modes import make_folder

MOST_LINES = 3
"""Largest number of lines of the text in ``job.json`` that says why a job has ended."""


@dataclass(frozen=True)
class JobOutcome:
    """Exit code of a job, and the reason if the code is not 0."""

    code: int
    reason: str = ""

    @staticmethod
    def of_error(error: BaseException) -> JobOutcome:
        """Return the outcome of a job that ends with an exception."""
        if isinstance(error, Stopped):
            return JobOutcome(128 + error.number, f"stopped by {stopped_by(error)}")
        if isinstance(error, KeyboardInterrupt):
            return JobOutcome(128 + signal.SIGINT, "interrupted")
        if isinstance(error, MoEvementError):
            return JobOutcome(USAGE_ERROR, str(error))
        return JobOutcome(1, f"{type(error).__name__}: {error}")


class JobFile:
    """Writer of ``job.json``, as a context manager. The launcher or coordinator runs the job in the ``with`` block.

    The block sets :attr:`outcome` when the job has ended. If the job ended before it trained, because of an error that
    the user can correct, the writer restores the ``job.json`` of the previous job in the run directory.

    Args:
        record: record of the run; None: nothing is written.
        entry: content of ``job.json`` for this job.
        begins: True to write ``job.json`` at the beginning of the block; False to wait for :meth:`begin`, because the
            run directory may still belong to another job.
    """

    def __init__(self, record: RunRecord | None, entry: JobEntry, *, begins: bool = True) -> None:
        self.outcome: JobOutcome | None = None
        self._record, self._entry, self._begins, self._has_begun = record, entry, begins, False
        self._earlier: JobEntry | None = None
        """Content of ``job.json`` from the previous job; None if there was none, or it cannot be read."""
        self._lines_before = 0
        """Size of the run's metrics file before this job, in bytes."""

    def begin(self) -> None:
        """Write ``job.json`` for a job that begins, unless it is written or the run directory cannot be made."""
        if self._record is None or self._has_begun:
            return
        with suppress(OSError):  # The code that needs the folder reports that it cannot be made.
            make_folder(self._record.folder)
            self._has_begun = True
            self._earlier = entry_of(self._record)
            self._lines_before = self._size_of_metrics()
            self._record.write_job(self._entry)

    def listens_at(self, address: str) -> None:
        """Note the address of the coordinator, before :meth:`begin`."""
        self._entry = replace(self._entry, address=address)

    def has_standby(self, address: str) -> None:
        """Note the address of the coordinator's standby; empty if it has none."""
        self._entry = replace(self._entry, standby=address)
        if self._has_begun and self._record is not None:
            self._record.write_job(self._entry)

    def hands_over(self) -> None:
        """Note that another process writes ``job.json`` from now on, which continues the job."""
        self._record = None

    def __enter__(self) -> JobFile:
        if self._begins:
            self.begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        outcome = JobOutcome.of_error(error) if error is not None else self.outcome
        if outcome is None or self._record is None:
            return
        if not self._has_begun and self._record.job_path.exists():
            return  # The entry belongs to another job, which owns the run directory.
        if not self._has_begun:
            self.begin()
        if self._earlier is not None and self._was_refused(outcome):
            self._record.write_job(self._earlier)
        elif self._has_begun:
            reason = "\n".join(outcome.reason.strip().splitlines()[:MOST_LINES])
            self._record.write_job(
                replace(self._entry, ended_at=round(time.time(), 3), code=outcome.code, reason=reason)
            )

    def _was_refused(self, outcome: JobOutcome) -> bool:
        """Return True if the job ended before it trained, because of an error that the user can correct."""
        return outcome.code == USAGE_ERROR and self._size_of_metrics() == self._lines_before

    def _size_of_metrics(self) -> int:
        assert self._record is not None
        path = self._record.metrics_path
        return path.stat().st_size if path.exists() else 0


def entry_of(record: RunRecord | None) -> JobEntry | None:
    """Return the content of ``job.json``; None if there is none, or it cannot be read."""
    with suppress(RunRecordError):
        return record.job() if record is not None else None
    return None


def coordinator_of(record: RunRecord | None) -> tuple[str, int] | None:
    """Return the address in ``job.json`` of the coordinator of the job that runs; None if no job runs there.

    On a node that joins late, or was cut off, ``MOEVEMENT_STORE`` may be the address of a coordinator that is lost.
    """
    job = entry_of(record)
    return address_of(job.address) if job is not None and job.ended_at is None and job.address else None


def has_ended(record: RunRecord | None, coordinators: Collection[tuple[str, int] | None]) -> bool:
    """Return True if ``job.json`` says that a job has ended whose last coordinator had one of these addresses."""
    job = entry_of(record)
    if job is None or job.ended_at is None or not job.address:
        return False
    return address_of(job.address) in coordinators


def stopped_by(stopped: Stopped) -> str:
    """Return the name of the signal that stopped a job; "Ctrl-C" for SIGINT."""
    return "Ctrl-C" if stopped.number == signal.SIGINT else signal.Signals(stopped.number).name
