"""Run directory of a training loop. The last rank of the job writes metrics, events and the summary there."""

from __future__ import annotations

import math
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from moevement_core import log
from moevement_core.comms.exchange import all_gather_objects, broadcast_object
from moevement_core.comms.job_group import job_group
from moevement_core.errors import FolderInUse, RunRecordError
from moevement_core.rendezvous.status_page import wait_until_held
from moevement_core.run.events import Started
from moevement_core.run.run_record import RunRecord
from moevement_core.topology.parts import RankParts
from moevement_core.trainer.interface import BindingInterface
from moevement_core.util.digest import digest
from moevement_core.util.environment import MEMBER_ENV
from moevement_core.util.lock import FolderLock, acquire


def lock_run_directory(folder: Path, name: str) -> FolderLock | None:
    """Lock the run directory on the last rank, which writes the record. Every rank calls it.

    Args:
        folder: run directory, as ``--run-dir`` gives it.
        name: name of the job.

    Returns:
        Lock of the folder on the last rank; None on all other ranks.

    Raises:
        FolderInUse: another job uses the folder, or the last rank cannot write to it. Every rank raises it.
    """
    lock, complaint, last = None, "", dist.get_world_size() - 1
    if dist.get_rank() == last:
        try:
            lock = acquire(folder, name, "--run-dir", report=log.info)
        except FolderInUse as error:
            complaint = str(error)
        except OSError as error:
            complaint = f"--run-dir {folder}: {error.strerror}; give a folder that can be written"
    if refused := broadcast_object(complaint, str, last):
        raise FolderInUse(refused)
    return lock


def begin_record(folder: Path, lock: FolderLock | None, config: Mapping[str, Any], iteration: int) -> RunRecord | None:
    """Begin the record of the run on the last rank. Every rank calls it.

    Args:
        folder: run directory.
        lock: lock of the run directory, on the last rank.
        config: all resolved flags, as plain values.
        iteration: iteration that the job starts from.

    Returns:
        Record on the last rank; None on all other ranks.

    Raises:
        RunRecordError: the folder cannot be written, or its files are damaged. Every rank raises it.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    ranks = all_gather_objects(
        {"rank": rank, "pid": os.getpid(), "host": socket.gethostname(), "role": "active"}, dict[str, int | str]
    )
    record, last, refused = None, world_size - 1, ""
    if rank == last:
        record = RunRecord(folder, lock)
        try:
            record.begin(dict(config), first_iteration=iteration + 1)
        except RunRecordError as error:
            refused = str(error)
    if refused := broadcast_object(refused, str, last):
        raise RunRecordError(refused)
    if record is not None:
        if MEMBER_ENV not in os.environ:  # otherwise the launcher writes this file, because it also knows the spares
            record.write_ranks(ranks)
        record.event(Started(iteration, world_size))
    job_group().barrier()
    return record


def continue_record(folder: Path, name: str, iteration: int) -> RunRecord | None:
    """Continue the record after a failure, if another process was the last rank before. Only the last rank calls it.

    Args:
        folder: run directory.
        name: name of the job.
        iteration: iteration that the job resumes from.

    Returns:
        Record; None if another job uses the folder or the folder cannot be written. The log has the reason.
    """
    try:
        record = RunRecord(folder, acquire(folder, name, "--run-dir", may_wait=False, report=log.info))
        record.take_over(first_iteration=iteration + 1)
    except (FolderInUse, OSError, RunRecordError) as error:
        log.warning(f"metrics and events are no longer recorded: {error}")
        return None
    return record


def state_digest(parts: RankParts) -> dict[str, Any]:
    """Return digests of the job's state: of all of it, of each part, and of each part on each rank.

    Parts are the operators together, and each entry of the boundary record. Every rank calls this function.
    """
    boundary = {name: digest(part) for name, part in parts.binding.boundary().items()}
    local = {"operators": digest(parts.checkpointer.capturer.whole_now()), **boundary}
    ranks = all_gather_objects(local, dict[str, str])
    by_part = {part: digest([rank[part] for rank in ranks]) for part in local}
    return {"all": digest(by_part), "parts": by_part, "ranks": ranks}


class Lines:
    """Writer of one metrics line for each committed iteration. It also writes lines that a failed last rank left out.

    Args:
        binding: binding with the record and the losses of the iterations.
        began_at: iteration that the job started from.
    """

    def __init__(self, binding: BindingInterface, began_at: int) -> None:
        self._binding, self._began_at = binding, began_at

    def write(self, until: int, **fields: Any) -> None:
        """Write the metrics line of ``until``, and those of earlier iterations that have no line.

        A line is missing if the rank that writes lines failed before it wrote the line. This rank does not know the
        times of that iteration, so it writes ``recovered`` in their place. The method also drops the losses of
        iterations before ``until``.

        Args:
            until: last committed iteration.
            fields: further fields of the line of ``until``, such as times; empty after a recovery.
        """
        record, losses = self._binding.record, self._binding.losses
        if record is not None:
            wait_until_held()
            newest = record.newest_metric()
            first = (
                newest["iteration"] + 1 if newest else min(self._began_at + 1, until if until in losses else until + 1)
            )
            for iteration in range(first, until + 1):
                own = fields if fields and iteration == until else {"iteration_s": None, "recovered": True}
                record.metric(iteration=iteration, **_line(losses.get(iteration, {})), time=time.time(), **own)
        for iteration in [each for each in losses if each < until]:
            del losses[iteration]


def _line(losses: Mapping[str, Any]) -> dict[str, Any]:
    numbers = {name: number(value) for name, value in losses.items()}
    return {"loss": numbers.pop("lm loss", None), **numbers}


def number(value: Any) -> Any:
    """Return a value as JSON can hold it: a tensor of one element as a number, NaN and infinity as text."""
    if isinstance(value, torch.Tensor):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def plain_config(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return all resolved flags in a form that YAML holds; values that are not plain become strings."""

    def plain(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return [plain(item) for item in value]
        if isinstance(value, dict):
            return {str(key): plain(item) for key, item in value.items()}
        return value if value is None or type(value) in (bool, int, float, str) else str(value)

    return {name: plain(value) for name, value in flags.items()}
