"""Standby of a job over several hosts: a process that a supervisor starts, and that may become the coordinator."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from dataclasses import replace

from moevement_core.comms.token import Token
from moevement_core.launching.coordinate import (
    OPTIONS,
    Coordination,
    CoordinatorPlace,
    report,
    run_coordinator,
)
from moevement_core.launching.job_file import JobFile, JobOutcome, entry_of
from moevement_core.launching.signals import Signals
from moevement_core.rendezvous.coordinator_loop import LEASES_ALONE, POLL_S
from moevement_core.rendezvous.standby import Standby
from moevement_core.run.job_entry import JobEntry
from moevement_core.run.run_record import RunRecord
from moevement_core.util.environment import REQUEUE_ENV

BACKLOG = 1024
"""Number of connections that may wait until a standby accepts them."""
BATCH_SCRIPT_S = 30.0
"""Seconds that a batch script has to notice the end of its job."""


def stand_by(coordinator: tuple[str, int], host: str, token: Token) -> None:
    """Stand by in this process until the job has ended, and take over if the coordinator is lost.

    A supervisor calls this in a process of its own.

    Args:
        coordinator: host and port of the coordinator.
        host: address of this host that all nodes reach.
        token: token of the job.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    listener = socket.create_server((host, 0), backlog=BACKLOG)
    standby = Standby(coordinator, f"{host}:{listener.getsockname()[1]}", listener.dup(), token)
    heard_at = time.monotonic()
    while not standby.is_elected:
        standby.poll(POLL_S)
        if standby.has_coordinator or standby.has_callers:
            heard_at = time.monotonic()
        if standby.is_over or time.monotonic() - heard_at > LEASES_ALONE * standby.lease_s:
            return
    standby.close()
    options = Coordination.decode(standby.values.read(OPTIONS) or "", host)
    record = RunRecord(options.run_dir) if options.run_dir is not None else None
    entry = JobFile(record, _continued(record, options))
    entry.listens_at(standby.term.owner)
    report(f"the coordinator is lost; {standby.term.owner} takes over the job in term {standby.term.number}")
    place = CoordinatorPlace(
        listener, standby.values, standby.term, lease_s=standby.lease_s, expected=standby.voters, is_awaited=False,
    )  # fmt: skip
    with Signals() as signals, entry:
        outcome = run_coordinator(options, signals, entry, place)
        entry.outcome = outcome if isinstance(outcome, JobOutcome) else None
    if isinstance(outcome, JobOutcome):
        _end_allocation()


def _end_allocation() -> None:
    """End the Slurm job if its batch script has not done so: it is lost with the first node.

    A batch script that lives reads in ``job.json`` that the job has ended, and ends. Then Slurm ends this process.
    """
    job, scancel = os.environ.get("SLURM_JOB_ID"), shutil.which("scancel")
    if job and scancel and os.environ.get(REQUEUE_ENV) == "1":
        time.sleep(BATCH_SCRIPT_S)
        subprocess.run([scancel, job], timeout=60, check=False)


def _continued(record: RunRecord | None, options: Coordination) -> JobEntry:
    """Return the entry of ``job.json`` for a job that this process continues."""
    own = JobEntry.of_this_process(options.command, options.ranks, None)
    if (before := entry_of(record)) is None:
        return own
    return replace(
        before, host=own.host, pid=own.pid, machine=own.machine, started=own.started, standby="", ended_at=None,
        code=None, reason="",
    )  # fmt: skip
