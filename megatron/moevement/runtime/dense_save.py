"""Wrappers of Megatron's dense saves, which report a failed save and let the job continue.

Megatron itself saves and reshards. This module only catches the error of a failed save, which would end the job.
"""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megatron.moevement.restart import origin
from megatron.moevement.runtime.dense_checkpoint import mend_tracker
from megatron.moevement.runtime.job import Job, Process
from moevement_core import log
from moevement_core.comms.exchange import from_rank_zero
from moevement_core.restart import injection
from moevement_core.restart.faults import Phase
from moevement_core.restart.generation import atomic, waiting_for_others
from moevement_core.run.events import CheckpointFailed, CheckpointSaved


def save_or_report(process: Process, original: Callable[..., Any], iteration: int, *args: Any, **kwargs: Any) -> Any:
    """Report a failed ``save_checkpoint`` on every rank, and let training continue."""
    job, save = process.job, process.args.save
    # Non-persistent checkpoints may have folders of their own, without --save.
    if save and (problem := from_rank_zero(lambda: _unwritable(Path(save), iteration), str | None)):
        _report(job, iteration, problem)
        return None
    injection.at(Phase.SAVE, iteration)
    with _Reported(job, iteration) as outcome, waiting_for_others():
        original(iteration, *args, **kwargs)
        if save and torch.distributed.get_rank() == 0:
            _mark(process.args, iteration, job.binding.job_name)
    if outcome.succeeded and not process.args.async_save:
        job.event(CheckpointSaved(iteration, str(save)))
    return None


def _mark(args: Namespace, iteration: int, name: str) -> None:
    try:
        origin.mark_saved(Path(args.save), iteration, name, args)
    except OSError as error:  # The only effect is that a restart of the job will not use this checkpoint.
        log.warning(
            f"a restart of the job will not use the checkpoint of iteration {iteration}, because rank 0 cannot write "
            f"the file that names this job into the checkpoint's folder: {error.strerror}"
        )


def finalize_or_report(process: Process, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Report an asynchronous save that failed, in place of ``maybe_finalize_async_save``."""
    with _Reported(process.job, None), waiting_for_others():
        return original(*args, **kwargs)


def run_uninterrupted(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Protect ``original``, which starts a process and waits for its start, from interruptions.

    A restart that interrupted the start would leave a half-started process, and nothing would end it.
    """
    with atomic():
        return original(*args, **kwargs)


class _Reported:
    """Context around a dense save. If the save fails on any rank, it reports the failure and suppresses the error.

    Megatron raises this error, a ``CheckpointException``, on every rank. Any other exception interrupts the save and
    leaves the context. ``Live.is_saving`` then stays True until the recovery removes what the save left behind.
    """

    def __init__(self, job: Job, iteration: int | None) -> None:
        self._job = job
        self.iteration = iteration
        self.succeeded = False

    def __enter__(self) -> _Reported:
        self._job.live.is_saving = True
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> bool:
        from torch.distributed.checkpoint.api import CheckpointException

        self.succeeded = kind is None
        if not isinstance(error, CheckpointException):
            self._job.live.is_saving = not self.succeeded
            return False
        self._job.live.is_saving = False
        reasons = {f"rank {rank}: {wrapped[0]}" for rank, wrapped in error.failures.items()}
        _report(self._job, self.iteration, "; ".join(sorted(reasons)) or "a rank could not write its part")
        return True


def _report(job: Job, iteration: int | None, reason: str) -> None:
    which = "" if iteration is None else f" of iteration {iteration}"
    if torch.distributed.get_rank() == 0:
        log.warning(f"the checkpoint{which} was NOT saved: {reason}; training continues")
    job.event(CheckpointFailed(iteration, reason))


def _unwritable(folder: Path, iteration: int) -> str | None:
    place = folder / f"iter_{iteration:07d}"
    try:
        if place.exists() and not place.is_dir():  # A disk that does not answer also raises OSError here.
            return f"--save {folder}: {place.name} exists but is not a folder"
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".probe-{os.getpid()}"
        probe.write_bytes(b"\0")
        probe.unlink()
        mend_tracker(folder)
    except OSError as error:
        return f"--save {folder}: {error.strerror}"
    return None
