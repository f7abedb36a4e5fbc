"""Writers of the run directory: which rank writes what, and when.

The last rank is in the last pipeline stage, and so has the losses. It writes metrics, events and the summary, just as
it writes Megatron's own log. Rank 0 writes ``ranks.json``.
"""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megatron.moevement.patches import around
from megatron.moevement.runtime.job import Job, Process
from megatron.moevement.runtime.live import Live
from megatron.moevement.state_digest import job_digest
from moevement_core import log
from moevement_core.comms.exchange import all_gather_objects
from moevement_core.restart import injection
from moevement_core.restart.faults import Phase
from moevement_core.run.cost_line import cost_line
from moevement_core.run.events import Ended, Evaluated
from moevement_core.run.figures import RunFigures
from moevement_core.run.run_record import RunRecord
from moevement_core.session.run_directory import begin_record, continue_record, number, plain_config
from moevement_core.util.arithmetic import environment
from moevement_core.util.lock import FolderLock


def record_pretrain(process: Process, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Write the summary at the end of ``pretrain``, which may be a planned exit."""
    if not process.job.has_begun:
        process.start_over()
    started_s = time.monotonic()
    try:
        result = original(*args, **kwargs)
    except SystemExit as exit_:
        if exit_.code in (0, None):
            write_summary(process.job, started_s)
        raise
    write_summary(process.job, started_s)
    return result


def record_train_step(process: Process, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Record how long each ``train_step`` takes."""
    started_s = time.perf_counter()
    result = original(*args, **kwargs)
    process.job.ledger.step_s = time.perf_counter() - started_s
    return result


def record_iteration(
    process: Process,
    original: Callable[..., Any],
    loss_dict: dict[str, torch.Tensor],
    total_loss_dict: dict[str, Any],
    learning_rate: float | None,
    iteration: int,
    loss_scale: float,
    report_memory_flag: bool,
    skipped_iter: int,
    grad_norm: float | None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Write the metrics line, before ``training_log``.

    Megatron calls ``training_log`` once for each committed iteration.
    """
    write_line(
        process.job, iteration, loss_dict, learning_rate=learning_rate, loss_scale=loss_scale,
        skipped=bool(skipped_iter), grad_norm=grad_norm,
    )  # fmt: skip
    if kwargs.get("is_first_iteration") and iteration > 1:
        # A recovery enters Megatron's loop again. After the first line of a loop, Megatron does not reset its
        # sums, so the next line would be a mean of two iterations.
        kwargs["is_first_iteration"] = False
    return original(
        loss_dict, total_loss_dict, learning_rate, iteration, loss_scale, report_memory_flag, skipped_iter,
        grad_norm, *args, **kwargs,
    )  # fmt: skip


def write_line(
    job: Job,
    iteration: int,
    losses: dict[str, torch.Tensor],
    *,
    learning_rate: float | None,
    loss_scale: float,
    skipped: bool,
    grad_norm: float | None,
) -> None:
    """Write the metrics line of a committed iteration; ranks without a record only note the iteration.

    Args:
        job: job of this rank.
        iteration: iteration that was committed.
        losses: losses by name.
        learning_rate: learning rate of the step.
        loss_scale: loss scale of the step.
        skipped: True if the step was skipped.
        grad_norm: gradient norm of the step.
    """
    job.live.iteration = iteration
    checkpointing = job.session.metrics() if job.session is not None else {}
    if job.loads is not None and job.live.record is not None:  # Waits for the device, as the loss does.
        checkpointing = {**checkpointing, "expert_imbalance": job.loads.imbalance()}
    job.ledger.write(
        iteration, losses, checkpointing, learning_rate=learning_rate, loss_scale=loss_scale, skipped=skipped,
        grad_norm=grad_norm,
    )  # fmt: skip
    _write_scalars(job.live.record, checkpointing, iteration)


def record_evaluation(process: Process, original: Callable[..., Any], prefix: str, *args: Any, **kwargs: Any) -> Any:
    """Tell :func:`record_evaluated` which data set ``evaluate_and_print_results`` uses."""
    process.job.ledger.evaluated_set = "test" if "test set" in prefix else "validation"
    return original(prefix, *args, **kwargs)


def record_evaluated(process: Process, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Write the loss of ``evaluate`` to the run's events."""
    injection.at(Phase.EVAL, process.job.live.iteration)
    result = original(*args, **kwargs)
    job, losses = process.job, result[0]
    if losses and torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
        loss = number(losses["lm loss"]) if "lm loss" in losses else None
        job.ledger.held_out[job.ledger.evaluated_set] = loss
        job.event(Evaluated(job.ledger.evaluated_set, job.live.iteration, loss))
    return result


def resume_record(job: Job, args: Namespace, run_dir: Path | None) -> None:
    """Open the run's record again on the last rank after a failure, if a replacement process has this rank."""
    live = job.live
    live.run_dir = run_dir
    _spare_training_its_writer()
    if run_dir is not None and live.record is None and torch.distributed.get_rank() == args.world_size - 1:
        live.record = continue_record(run_dir, job.binding.job_name, live.iteration)


def begin(live: Live, args: Namespace, run_dir: Path | None, lock: FolderLock | None) -> None:
    """Begin the record of the run in its run directory, if it has one. Collective.

    From now on the last rank writes the record. Only the last rank gets a ``lock`` of the directory.
    """
    live.run_dir = run_dir
    _spare_training_its_writer()
    if run_dir is not None:
        live.record = begin_record(run_dir, lock, plain_config(live.host.config(args)), live.iteration)


def _spare_training_its_writer() -> None:
    """Keep errors of TensorBoard's writer away from training: log the first, and then write nothing more.

    The writer raises such errors after its thread has met a full disk.
    """
    from megatron.training.global_vars import get_tensorboard_writer

    file_writer = getattr(get_tensorboard_writer(), "file_writer", None)
    if file_writer is None or hasattr(file_writer, "_moevement_failed"):
        return
    file_writer._moevement_failed = False

    def guarded(original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        if file_writer._moevement_failed:
            return
        try:
            original(*args, **kwargs)
        except OSError as error:
            file_writer._moevement_failed = True
            log.warning(
                f"TensorBoard's file cannot be written ({error.strerror or error}); training continues without it"
            )

    for name in ("add_event", "flush", "close"):
        setattr(file_writer, name, around(getattr(file_writer, name), guarded))


def _write_scalars(record: RunRecord | None, checkpointing: dict[str, Any], iteration: int) -> None:
    """Write metrics of sparse checkpointing and recoveries to TensorBoard; only the last rank has a writer for it."""
    from megatron.training.global_vars import get_tensorboard_writer

    if (writer := get_tensorboard_writer()) is None or (record is None and not checkpointing):
        return
    figures = RunFigures.of([checkpointing], []) if record is None else record.figures
    for tag, value in figures.scalars():
        writer.add_scalar(tag, value, iteration)


def write_summary(job: Job, started_s: float) -> None:
    """Write the summary of a job that has ended, in which model and process groups still exist. Collective.

    Args:
        job: job of this rank.
        started_s: time at which the trainer was entered, from ``time.monotonic()``.
    """
    if job.live.model is None:
        return
    checkpointing = job.session.finish() if job.session is not None else None
    if checkpointing and torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
        log.info(cost_line(checkpointing))
    if job.live.run_dir is None:
        return
    digest = job_digest(job.live)
    environments = all_gather_objects(environment(), dict[str, str])
    record, ledger = job.live.record, job.ledger
    if record is None:
        return
    job.event(Ended(job.live.iteration))
    record.write_summary(
        {
            "iterations": job.live.iteration,
            "final_loss": ledger.last_loss,
            "validation_loss": ledger.held_out.get("validation"),
            "test_loss": ledger.held_out.get("test"),
            "wall_s": time.monotonic() - started_s,
            "world_size": torch.distributed.get_world_size(),
            "checkpointing": checkpointing,
            "environment": list({tuple(sorted(each.items())): each for each in environments}.values()),
            "state_digest": digest,
        }
    )
    if record.lock is not None:
        record.lock.release()
