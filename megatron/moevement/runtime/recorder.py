"""The run directory of a Megatron run: who writes what, and when.

The last rank (a data-parallel replica's last pipeline stage, where the losses are) writes metrics, events and summary,
as it writes Megatron's own log; rank 0 writes ``ranks.json``.
"""

from __future__ import annotations

import functools
import math
import os
import socket
import time
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from megatron.moevement.arguments import RunConfig
from megatron.moevement.optimizer.norms import as_logged
from megatron.moevement.restart import injection, origin
from megatron.moevement.restart.environment import MEMBER_ENV
from megatron.moevement.runtime import persisted, sparse
from megatron.moevement.runtime.identity import agree_on_names
from megatron.moevement.runtime.job import Job, current_job, start_job
from megatron.moevement.runtime.ranks import tell_all
from megatron.moevement.runtime.replay import line_of
from megatron.moevement.state_digest import job_digest
from moevement_core.errors import FolderInUse
from moevement_core.injection import Phase
from moevement_core.persistence.lock import FolderLock, acquire
from moevement_core.rendezvous.status_page import wait_until_held
from moevement_core.run_record import RunRecord
from moevement_core.snapshot.cost import cost_line


def record_pretrain(original: Callable[..., Any]) -> Callable[..., Any]:
    """``pretrain`` that writes the summary when the run has come to its end, a planned exit included."""

    @functools.wraps(original)
    def pretrain(*args: Any, **kwargs: Any) -> Any:
        if not current_job().begun:
            start_job()
        started_s = time.time()
        try:
            result = original(*args, **kwargs)
        except SystemExit as exit_:
            if exit_.code in (0, None):
                _write_summary(current_job(), started_s)
            raise
        _write_summary(current_job(), started_s)
        return result

    return pretrain


def begin_job(job: Job, setup: Callable[[], tuple[list[Any], Any, Any]]) -> None:
    """Set a job up from its start, and begin its record at the iteration that it starts from.

    Args:
        job: empty.
        setup: Megatron's ``setup_model_and_optimizer``.

    Raises:
        ConfigError: the job cannot begin as its flags say, another job has the run directory, for example.
    """
    from megatron.training import get_args

    job.name, job.start = agree_on_names()
    lock = _lock_run_directory(job.name, get_args())
    with origin.loading(job, get_args()) as began:
        job.model, job.optimizer, job.scheduler = setup()
    config = RunConfig.from_args(get_args()).sparse
    loaded = persisted.load_into(job, config, is_resumed=began.is_resumed) if config else None
    job.iteration = get_args().iteration
    begin_record(job, get_args(), lock)
    if origin.is_restart(job):
        _tell_restart(job, f"the window {loaded.place}" if loaded else began.sentence)
    if config:
        job.sparse = sparse.start(job, config, loaded)


def _tell_restart(job: Job, source: str) -> None:
    text = f"the job restarts at iteration {job.iteration}, from {source}"
    if torch.distributed.get_rank() == 0:
        _say(text)
    job.event("restart", iteration=job.iteration, text=text)


def record_train_step(original: Callable[..., Any]) -> Callable[..., Any]:
    """``train_step`` that notes how long it took."""

    @functools.wraps(original)
    def train_step(*args: Any, **kwargs: Any) -> Any:
        started_s = time.perf_counter()
        result = original(*args, **kwargs)
        current_job().last_step_s = time.perf_counter() - started_s
        return result

    return train_step


def record_iteration(original: Callable[..., Any]) -> Callable[..., Any]:
    """``training_log``, which Megatron calls once for each committed iteration, that also writes the metrics line."""

    @functools.wraps(original)
    def training_log(
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
        job = current_job()
        job.iteration = iteration
        if job.record is not None:
            _write_metric(job, loss_dict, learning_rate, iteration, loss_scale, skipped_iter, grad_norm)
        if job.sparse is not None:
            _write_scalars(job.sparse.metrics(), iteration)
        return original(
            loss_dict, total_loss_dict, learning_rate, iteration, loss_scale, report_memory_flag, skipped_iter,
            grad_norm, *args, **kwargs,
        )  # fmt: skip

    return training_log


def record_evaluation(original: Callable[..., Any]) -> Callable[..., Any]:
    """``evaluate_and_print_results`` that tells :func:`record_evaluated` which data set is evaluated."""

    @functools.wraps(original)
    def evaluate_and_print_results(prefix: str, *args: Any, **kwargs: Any) -> Any:
        current_job().evaluated_set = "test" if "test set" in prefix else "validation"
        return original(prefix, *args, **kwargs)

    return evaluate_and_print_results


def record_evaluated(original: Callable[..., Any]) -> Callable[..., Any]:
    """``evaluate`` that writes its losses down."""

    @functools.wraps(original)
    def evaluate(*args: Any, **kwargs: Any) -> Any:
        injection.at(Phase.EVAL, current_job().iteration)
        result = original(*args, **kwargs)
        job, losses = current_job(), result[0]
        if losses and torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
            job.held_out[job.evaluated_set] = _number(losses["lm loss"]) if "lm loss" in losses else None
            job.event(
                "evaluation", set=job.evaluated_set, iteration=job.iteration, loss=job.held_out[job.evaluated_set]
            )
        return result

    return evaluate


def retain_datasets(original: Callable[..., Any]) -> Callable[..., Any]:
    """``build_train_valid_test_datasets`` that keeps the training set, to ask it for batches again."""

    @functools.wraps(original)
    def build_train_valid_test_datasets(*args: Any, **kwargs: Any) -> Any:
        job = current_job()
        chunks = len(job.model or [])
        if job.comeback is not None and len(job.datasets) >= chunks:  # after a failure, in the order of then
            job.datasets.append(job.datasets.pop(0))
            return job.datasets[-1]
        with job.rooms.aside() as room:
            if job.comeback is not None:  # a rank that is new builds its data sets alone; indices are on disk already
                room.put(torch.distributed, "barrier", lambda *args, **kwargs: None)
            datasets = original(*args, **kwargs)
        job.datasets.append(datasets)
        return datasets

    return build_train_valid_test_datasets


def go_on_with_record(job: Job, args: Namespace) -> None:
    """After a failure: the last rank writes on, also where another process was the last rank before."""
    run_dir = RunConfig.from_args(args).run_dir
    if run_dir is not None and job.record is None and torch.distributed.get_rank() == args.world_size - 1:
        try:
            lock = acquire(run_dir, job.name, "--run-dir", may_wait=False, report=_say)
        except (FolderInUse, OSError) as error:
            _say(f"nothing more is recorded: {error}")
            return
        job.record = RunRecord(run_dir, lock)
        job.record.begin(_plain_config(args), first_iteration=job.iteration + 1)


def complete_metrics(job: Job, until: int, outcome: Mapping[str, Any]) -> None:
    """Write the lines up to ``until`` that a failure has kept from being written; every rank calls it.

    Args:
        job: whose state is that of ``until``.
        until: the last committed iteration.
        outcome: of its step.
    """
    newest = job.record.newest_metric() if job.record is not None else None
    written = tell_all(newest["iteration"] if newest else 0)[-1]  # the last rank writes
    if written >= until:
        return
    lines = dict(job.replayed_lines)
    if until not in lines and job.micro_batch_losses[0] == until and job.micro_batch_losses[1]:
        norm = as_logged(outcome.get("clip_norm"))
        lines[until] = line_of(job, _averaged(job.micro_batch_losses[1]), bool(outcome.get("overflow")), norm)
    if job.record is None:
        return
    wait_until_held()
    for iteration in range(written + 1, until + 1):
        line = lines.get(iteration, {})
        losses = {name: _number(value) for name, value in line.pop("losses", {}).items()}
        job.last_loss = losses.get("lm loss", job.last_loss)
        loss = losses.pop("lm loss", None)
        grad_norm, unknown = _number(line.pop("grad_norm", None)), dict.fromkeys(("tokens_per_s", "iteration_s"))
        job.record.metric(
            iteration=iteration, loss=loss, **losses, grad_norm=grad_norm, **line, **unknown, recovered=True,
            time=time.time(),
        )  # fmt: skip


def _averaged(micro_batches: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Losses of an iteration from those of its micro-batches; the ranks of the last stage call it together.

    Megatron's schedule gives sums over tokens and numbers of tokens, or, in old scripts, means.
    """
    from megatron.core import parallel_state

    losses = {}
    for name in micro_batches[0]:
        values = [one[name].view(-1) for one in micro_batches]
        if values[0].numel() == 2:
            total = torch.vstack(values).sum(dim=0)
            torch.distributed.all_reduce(
                total, group=parallel_state.get_data_parallel_group(with_context_parallel=True)
            )
            losses[name] = total[0] / total[1]
        else:
            losses[name] = torch.cat(values).mean()
    return losses


def _lock_run_directory(name: str, args: Namespace) -> FolderLock | None:
    """Every rank calls it; the last one, which writes the record, gets the lock.

    Raises:
        FolderInUse: another job has it. On every rank.
    """
    run_dir, lock, complaint = RunConfig.from_args(args).run_dir, None, ""
    if run_dir is None:
        return None
    last = args.world_size - 1
    if torch.distributed.get_rank() == last:
        try:
            lock = acquire(run_dir, name, "--run-dir", report=_say)
        except FolderInUse as error:
            complaint = str(error)
        except OSError as error:
            complaint = f"--run-dir {run_dir}: {error.strerror}; give a folder that can be written"
    refused = [complaint]
    torch.distributed.broadcast_object_list(refused, src=last)
    if refused[0]:
        raise FolderInUse(refused[0])
    return lock


def _say(text: str) -> None:
    print(f"moevement: {text}", flush=True)


def begin_record(job: Job, args: Namespace, lock: FolderLock | None) -> None:
    """Every rank calls it; the last one, which has the directory's lock, writes from now on."""
    config = RunConfig.from_args(args)
    if config.run_dir is None:
        return
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    record = RunRecord(config.run_dir, lock)
    ranks: list[Any] = [None] * world_size
    torch.distributed.all_gather_object(
        ranks, {"rank": rank, "pid": os.getpid(), "host": socket.gethostname(), "role": "active"}
    )
    if rank == world_size - 1:
        record.begin(_plain_config(args), first_iteration=job.iteration + 1)
        if MEMBER_ENV not in os.environ:  # else the launcher writes it, who knows of spares, too
            record.write_ranks(ranks)
        job.record = record
        job.event("start", iteration=job.iteration, world_size=world_size)
    torch.distributed.barrier()


def _write_metric(
    job: Job,
    loss_dict: dict[str, torch.Tensor],
    learning_rate: float | None,
    iteration: int,
    loss_scale: float,
    skipped: int,
    grad_norm: float | None,
) -> None:
    from megatron.core.num_microbatches_calculator import get_current_global_batch_size
    from megatron.training import get_args

    assert job.record is not None
    wait_until_held()
    tokens = get_current_global_batch_size() * get_args().seq_length
    losses = {name: _number(value) for name, value in loss_dict.items()}
    job.last_loss = losses.get("lm loss", job.last_loss)
    job.record.metric(
        iteration=iteration,
        loss=losses.pop("lm loss", None),
        **losses,
        grad_norm=_number(grad_norm),
        learning_rate=learning_rate,
        loss_scale=_number(loss_scale),
        skipped=bool(skipped),
        tokens_per_s=tokens / job.last_step_s if job.last_step_s else None,
        iteration_s=job.last_step_s,
        time=time.time(),
        **(job.sparse.metrics() if job.sparse else {}),
    )


def _write_scalars(metrics: dict[str, Any], iteration: int) -> None:
    """Checkpointing of this rank in TensorBoard, where Megatron has a writer: on the last rank."""
    from megatron.training.global_vars import get_tensorboard_writer

    if writer := get_tensorboard_writer():
        for name, value in metrics.items():
            if value is None:
                continue
            writer.add_scalar(f"moevement/{name}", value, iteration)


def _number(value: Any) -> Any:
    """A plain number; a float that JSON has no word for as its name."""
    if isinstance(value, torch.Tensor):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _plain_config(args: Namespace) -> dict[str, Any]:
    """All resolved flags as YAML can hold them: what is no plain value is written as its name."""

    def plain(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return [plain(item) for item in value]
        if isinstance(value, dict):
            return {str(key): plain(item) for key, item in value.items()}
        return value if value is None or type(value) in (bool, int, float, str) else str(value)

    return {name: plain(value) for name, value in vars(args).items()}


def _write_summary(job: Job, started_s: float) -> None:
    from megatron.training import get_args

    if job.model is None:
        return
    checkpointing = job.sparse.finish() if job.sparse else None
    if checkpointing and torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
        print(f"moevement: {cost_line(checkpointing)}", flush=True)
    if RunConfig.from_args(get_args()).run_dir is None:
        return
    digest = job_digest(job)
    if job.record is None:
        return
    job.event("end", iteration=job.iteration)
    job.record.write_summary(
        {
            "iterations": job.iteration,
            "final_loss": job.last_loss,
            "validation_loss": job.held_out.get("validation"),
            "test_loss": job.held_out.get("test"),
            "wall_s": time.time() - started_s,
            "world_size": torch.distributed.get_world_size(),
            "checkpointing": checkpointing,
            "state_digest": digest,
        }
    )
    if job.record.lock is not None:
        job.record.lock.release()
