"""Entry into Megatron's trainer, which sets a job up from its start or continues it after a failure.

Megatron first builds model and optimizer, then opens data, then trains. After a failure, ranks agree on a restore point
in place of the first step. They replay lost state inside Megatron's training loop, before the next iteration
(:mod:`moevement_core.session.after_failure`).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron.moevement.arguments import EXPORT, RunConfig
from megatron.moevement.elastic.rebuild import MegatronRebuilder
from megatron.moevement.elastic.replicas import equalize_replicas
from megatron.moevement.elastic.setup import begin_placement, record_placement
from megatron.moevement.elastic.slots import slots
from megatron.moevement.optimizer import weights
from megatron.moevement.restart import leftovers, origin
from megatron.moevement.restart.built import FirstProgress, Setup, connect, has_built
from megatron.moevement.restart.groups import Groups
from megatron.moevement.restart.origin import Origin
from megatron.moevement.restart.solo_build import building_without_others
from megatron.moevement.runtime import recorder
from megatron.moevement.runtime.dense_checkpoint import TRACKER
from megatron.moevement.runtime.exits import checkpoint_and_decide_exit, export, leave
from megatron.moevement.runtime.host import TrainLoop
from megatron.moevement.runtime.job import Job, Process
from megatron.moevement.runtime.results import validate_first_iteration
from moevement_core import log
from moevement_core.comms.exchange import from_rank_zero
from moevement_core.errors import ConfigError
from moevement_core.recovery.agree import NothingToResume
from moevement_core.restart.communicators import make_communicators
from moevement_core.restart.generation import generation, waiting_for_others
from moevement_core.run.events import Restarted
from moevement_core.saving.identity import agree_on_names, job_name
from moevement_core.saving.store_check import check_stores
from moevement_core.saving.window_start import load_window
from moevement_core.session.after_failure import take_up
from moevement_core.session.build import build_session
from moevement_core.session.rejoin import Unrecoverable
from moevement_core.session.resize import ResizedSession, resize
from moevement_core.session.run_directory import lock_run_directory
from moevement_core.session.session import Session
from moevement_core.trainer.config import SessionConfig
from moevement_core.util.lock import FolderLock


def enter_setup(
    process: Process, first: FirstProgress, original: Callable[..., Any], *args: Any, **kwargs: Any
) -> tuple[Any, Any, Any]:
    """Keep the objects that ``setup_model_and_optimizer`` builds.

    After a failure, the function returns these objects on a survivor. On a replacement, it builds new ones.
    """
    if slots() is not None and (container := kwargs.get("cfg_container")) is not None:
        container.model.expert_model_parallel_size = process.args.expert_model_parallel_size

    def setup() -> tuple[list[Any], Any, Any]:
        with waiting_for_others():  # compilers, device libraries or a checkpoint may take long
            return original(*args, **kwargs)

    now, run = generation(), RunConfig.from_args(process.args)
    groups = Groups.now() if now is not None else None
    if now is not None:
        make_communicators(pipelines())
    is_start = now is None or now.roster.generation == 0
    if is_start or not take_up_job(process, run, setup, groups=groups, first=first):
        _begin(process, run, setup, groups=groups, first=first)
    live = process.job.live
    return live.model, live.optimizer, live.scheduler


def pipelines() -> list[Any]:
    """Return the pipeline-parallel process groups of this rank."""
    from megatron.core import parallel_state

    group = parallel_state.get_pipeline_model_parallel_group()
    return list(group) if isinstance(group, list) else [group]


def _begin(process: Process, run: RunConfig, setup: Setup, groups: Groups | None, first: FirstProgress) -> None:
    """Set a job up from its start, and begin the run's record at the start iteration.

    Raises:
        ConfigError: the job cannot start with its flags; for example, another job has the run directory.
    """
    first.put(process.args)
    job = process.job
    args, live, binding = process.args, job.live, job.binding
    with live.undo.nested() as inner:
        live.host.share_keys(inner, binding.parameter_keys, ())
        lock = name_job(job, run)
        begin_placement(args, is_restart=job.names.is_restart)
        with origin.loading(job.names, args) as began:
            live.model, live.optimizer, live.scheduler = setup()
        begin_session(job, run, began, lock)
    has_built(job, groups)
    if run.session is not None and run.session.elastic.is_elastic:
        process.resizing.formed(binding, job.names.number)


def name_job(job: Job, run: RunConfig) -> FolderLock | None:
    """Agree with the other ranks on the name of the job, and lock the run directory on the last rank. Collective.

    At the first start, every rank also tries the stores of windows, before it builds anything.

    Raises:
        ConfigError: another job has the run directory, or a store cannot be used.
    """
    names = job.names = agree_on_names()
    job.binding.job_name = names.name
    lock = lock_run_directory(run.run_dir, names.name) if run.run_dir is not None else None
    if run.session is not None and not names.is_restart:
        check_stores(run.session.disk)
    return lock


def begin_session(job: Job, run: RunConfig, began: Origin, lock: FolderLock | None) -> None:
    """Begin the record and the session of a job whose model, optimizer and scheduler exist. Collective.

    Args:
        job: job with the built objects.
        run: configuration of the run.
        began: origin of the state that the trainer has loaded.
        lock: lock of the run directory on the last rank; None on all others.

    Raises:
        ConfigError: the job is to export a window, and there is none.
    """
    args, live, binding, names = job.live.args, job.live, job.binding, job.names
    weights.recompute_weights(live.model or [], live.optimizer)
    if slots() is not None:
        equalize_replicas(binding.recut())
    live.iteration = args.iteration
    config = run.session
    loaded = None
    if config is not None:
        loaded = load_window(
            binding, config, names, is_resumed=began.is_resumed, asked_step=args.ckpt_step if args.load else None
        )
    if args.moevement_export and loaded is None:
        raise ConfigError(
            f"{EXPORT}: no window in {args.moevement_load}, or the checkpoint of --load is newer; give a folder "
            "with windows, and leave --load out"
        )
    recorder.begin(live, args, run.run_dir, lock)
    record_placement(live.record, live.iteration)
    if names.is_restart:
        _report_restart(job, f"the window {loaded.place}" if loaded else began.sentence)
    if config is not None:
        connect(job)
        job.session = build_session(binding, config, names, loaded.prepared if loaded is not None else None)


def _report_restart(job: Job, source: str) -> None:
    text = f"the job restarts at iteration {job.live.iteration}, from {source}"
    if dist.get_rank() == 0:
        log.info(text)
    job.event(Restarted(job.live.iteration, text))


def take_up_job(process: Process, run: RunConfig, setup: Setup, groups: Groups | None, first: FirstProgress) -> bool:
    """Meet the other ranks after a failure and find a restore point. Collective.

    Returns:
        False if no rank has committed an iteration. The process then has a new, empty job, which the caller sets up
        from its start.

    Raises:
        Unrecoverable: no rank has a state that the recovery needs. All ranks then meet again, and set the job up from a
            window on disk, from a dense checkpoint, or from the seed.
    """
    # No variable here refers to the job, because a resized job must be able to free its old model.
    config = run.session
    if config is None:  # a job without sparse checkpointing keeps no snapshots
        process.start_over()
        return False
    try:
        if config.elastic.is_elastic:
            _resize(process, config, MegatronRebuilder(process, run, setup, groups=groups, first=first))
        else:
            _rejoin(process.job, run, config, setup=setup, groups=groups, first=first)
    except NothingToResume as why:
        if dist.get_rank() == 0:
            log.warning(f"every rank restarts, because {why}")
        process.resizing.forget()
        process.start_over()
        return False
    except Unrecoverable:  # At the next meeting, this rank reports that it has no state.
        process.job.has_begun = False
        raise
    return True


def _resize(process: Process, config: SessionConfig, rebuilder: MegatronRebuilder) -> None:
    """Continue an elastic job on its present ranks, with a new model. Collective."""
    # No variable here refers to the old session, because it would keep the session's host memory.
    resized = resize(process.resizing, process.job.session if process.job.has_begun else None, config, rebuilder)
    process.job.session, process.job.rejoined = resized.session, resized


def _rejoin(
    job: Job, run: RunConfig, config: SessionConfig, setup: Setup, groups: Groups | None, first: FirstProgress
) -> None:
    """Continue a job whose survivors keep their model. Collective."""
    binding = job.binding
    binding.groups_now = groups
    args = job.live.args
    binding.on_build = lambda keys: _build(job, setup, parameter_keys=keys, first=first)
    binding.on_resume = lambda until: recorder.resume_record(job, args, run.run_dir)
    session, before = job.session if job.has_begun else None, job.rejoined
    assert not isinstance(before, ResizedSession)
    job.rejoined = take_up(binding, config, session=session, before=before, joined=functools.partial(_joined, job))


def _joined(job: Job, session: Session, until: int) -> None:
    job.session = session


def _build(job: Job, setup: Setup, parameter_keys: list[Any], first: FirstProgress) -> bool:
    """Build model, optimizer and scheduler on a replacement, without communication and before their state is restored.

    Returns:
        True if the new objects have the state from which the job started; False if the job started with weights from a
            checkpoint or from other ranks.
    """
    binding, live, args = job.binding, job.live, job.live.args
    first.put(args)  # This process may have advanced the progress in an earlier generation.
    binding.job_name = job_name() or ""
    load, pretrained = args.load, args.pretrained_checkpoint
    with live.undo.nested() as inner:
        for name in ("load", "pretrained_checkpoint"):
            inner.set(args, name, None)
        live.host.share_keys(inner, binding.parameter_keys, parameter_keys)
        asked = building_without_others(inner)
        live.model, live.optimizer, live.scheduler = setup()
    weights.recompute_own_weights(live.optimizer)
    job.config_before = leftovers.config_of(live)
    connect(job)
    return not asked and load is None and pretrained is None


# Inside the training loop


def enter_loop(process: Process, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Replay lost state before the first iteration of ``train``.

    The replay calls Megatron's ``train_step`` with the arguments of ``train``.
    """
    bound = inspect.signature(original).bind(*args, **kwargs)
    bound.apply_defaults()
    job = process.job
    job.live.loop = TrainLoop(*(bound.arguments[name] for name in TrainLoop._fields))
    begin_or_resume(job, lambda iteration: _do_what_is_due(job, iteration, bound))
    if process.args.moevement_export:
        export(job.live, bound.arguments)
    if (now := generation()) is not None:
        job.resumed_in = now.roster.generation
        validate_first_iteration()
    return original(*args, **kwargs)


def begin_or_resume(job: Job, do_what_is_due: Callable[[int], None]) -> None:
    """Begin training, or replay lost state after a failure, right before the first iteration of the trainer's loop.

    Args:
        job: job whose training loop is about to run.
        do_what_is_due: function that does what is due after an iteration, because a failure may have prevented it.
    """
    if job.rejoined is not None:
        job.binding.on_back = functools.partial(_back, job, do_what_is_due)
        job.rejoined.resume()
        job.rejoined = None
        job.binding.forget_loop()
    elif job.session is not None:
        job.session.begin_training()
    job.has_begun = True


def _back(
    job: Job, do_what_is_due: Callable[[int], None], until: int, outcome: Mapping[str, Any], is_between: bool
) -> None:
    """Finish a recovery to iteration ``until``: write missing metrics, and do what was due after this iteration."""
    if job.loads is not None:
        job.loads.forget_replayed()
    job.ledger.complete(until, outcome)
    if is_between:
        do_what_is_due(until)


def _do_what_is_due(job: Job, iteration: int, train: inspect.BoundArguments) -> None:
    """Do what is due after ``iteration`` (evaluation, dense save, exit), because the failure may have prevented it.

    Raises:
        SystemExit: the job was due to exit after the iteration.
    """
    from megatron.training import training

    args, inputs = job.live.args, train.arguments
    start = args.start_eval_at_iter
    due = args.eval_interval and args.do_valid and iteration % args.eval_interval == 0
    if due and (start is None or iteration >= start):
        training.evaluate_and_print_results(
            f"iteration {iteration}", inputs["forward_step_func"], inputs["valid_data_iterator"], inputs["model"],
            iteration, inputs["process_non_loss_data_func"], inputs["config"], verbose=False, write_to_tensorboard=True,
            non_loss_data_func=inputs["non_loss_data_func"], pg_collection=inputs["pg_collection"],
            p2p_communicator=inputs["p2p_communicator"],
        )  # fmt: skip
    every = args.save_interval
    is_due = bool(args.save and every)
    is_overdue = is_due and from_rank_zero(lambda: _is_overdue(Path(args.save), iteration, every), bool)
    with job.live.undo.nested() as undo:
        if is_due and not is_overdue:  # saved before the failure
            undo.set(args, "save_interval", None)
        is_to_exit = checkpoint_and_decide_exit(job.live, inputs, iteration)
    if is_to_exit:
        leave()


def _is_overdue(folder: Path, iteration: int, interval: int) -> bool:
    """Return True if Megatron's tracker file names no save, or one older than the newest scheduled save."""
    try:
        text = (folder / TRACKER).read_text(errors="replace").strip()
    except OSError:
        text = ""
    saved = int(text) if text.isdecimal() else 0
    return saved < iteration - iteration % interval
