"""Wrappers of the functions in which Megatron-Bridge builds its objects, trains and logs.

Bridge builds model, optimizer and schedule by separate calls in one long function. On a survivor, each of these calls
returns the object that the rank has kept. A replacement builds all of them in the first call, because the ranks meet
there.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron.moevement.arguments import RunConfig
from megatron.moevement.bridge.due import do_what_is_due
from megatron.moevement.bridge.host import MegatronBridge
from megatron.moevement.restart.built import FirstProgress, has_built
from megatron.moevement.restart.entry import begin_or_resume, begin_session, name_job, pipelines, take_up_job
from megatron.moevement.restart.groups import Groups
from megatron.moevement.restart.origin import Origin
from megatron.moevement.restart.solo_build import sharing_gathers
from megatron.moevement.runtime import recorder
from megatron.moevement.runtime.host import TrainLoop
from megatron.moevement.runtime.job import Process
from megatron.moevement.runtime.results import validate_first_iteration
from moevement_core.restart import injection
from moevement_core.restart.communicators import make_communicators
from moevement_core.restart.faults import Phase
from moevement_core.restart.generation import generation, waiting_for_others
from moevement_core.util.lock import FolderLock
from moevement_core.util.undo import UndoStack


@dataclass
class Start:
    """State of this process between the functions that set a job up."""

    first: FirstProgress
    run: RunConfig | None = None
    groups: Groups | None = None
    lock: FolderLock | None = None
    is_taken_up: bool = False
    """True if the ranks have met after a failure, so that the objects of this rank exist."""
    started_s: float = 0.0


def build_model(
    process: Process, start: Start, original: Callable[..., Any], cfg: Any, pg_collection: Any
) -> list[Any]:
    """Build the model at the start, in place of ``_build_distributed_model``; after a failure, meet the other ranks.

    Collective.
    """
    now, start.run = generation(), RunConfig.from_args(process.args)
    start.groups = Groups.now() if now is not None else None
    if now is not None:
        make_communicators(pipelines())

    def build() -> tuple[list[Any], Any, Any]:
        host = process.job.live.host
        assert isinstance(host, MegatronBridge)
        with waiting_for_others():
            model = original(cfg, pg_collection)
            return (model, *_build_optimizer(host, model))

    is_start = now is None or now.roster.generation == 0
    start.is_taken_up = not is_start and take_up_job(process, start.run, build, groups=start.groups, first=start.first)
    if start.is_taken_up:
        return process.job.live.model or []
    start.first.put(process.args)
    start.lock = name_job(process.job, start.run)
    with waiting_for_others():
        process.job.live.model = original(cfg, pg_collection)
    return process.job.live.model or []


def _build_optimizer(host: MegatronBridge, model: list[Any]) -> tuple[Any, Any]:
    """Build optimizer and schedule with the arguments with which Bridge's ``setup`` builds them."""
    from megatron.bridge.training import optim

    cfg, timers = host.state.cfg, host.state.timers
    cfg.model.timers = cfg.optimizer.timers = timers
    with UndoStack().nested() as inner:
        sharing_gathers(inner, host.record, host.kept)
        optimizer, scheduler = optim.setup_optimizer(
            optimizer_config=cfg.optimizer, scheduler_config=cfg.scheduler, model=model,
            use_gloo_process_groups=cfg.dist.use_gloo_process_groups, pg_collection=None,
            optimizer_config_override_provider=cfg.optimizer_config_override_provider,
        )  # fmt: skip
    return optimizer, scheduler


def build_optimizer(
    process: Process, start: Start, original: Callable[..., Any], *args: Any, **kwargs: Any
) -> tuple[Any, Any]:
    """Build optimizer and schedule at the start, in ``setup_optimizer``; after a failure, return those kept."""
    live = process.job.live
    if not start.is_taken_up:
        with live.undo.nested() as inner:
            sharing_gathers(inner, process.job.binding.parameter_keys, ())
            live.optimizer, live.scheduler = original(*args, **kwargs)
    return live.optimizer, live.scheduler


def load_at_start_only(start: Start, original: Callable[..., bool], *args: Any, **kwargs: Any) -> bool:
    """Load no checkpoint after a failure, in ``_should_load_checkpoint``."""
    return not start.is_taken_up and original(*args, **kwargs)


def begin_job(process: Process, start: Start, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Begin the record and the session once a checkpoint is loaded, before ``_update_model_config_funcs``. Collective.

    Raises:
        ConfigError: the job cannot start with its flags.
    """
    if not start.is_taken_up:
        assert start.run is not None
        job = process.job
        step = job.live.args.iteration
        sentence = f"the checkpoint of iteration {step}" if step else "the state that the configuration names"
        begin_session(job, start.run, Origin(sentence, is_resumed=bool(step)), start.lock)
        has_built(job, start.groups)
    return original(*args, **kwargs)


def enter_loop(process: Process, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Replay lost state before the first iteration of Bridge's ``train``."""
    from megatron.bridge.training.utils.train_utils import prepare_forward_step_func
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
    from megatron.core.utils import get_model_config

    bound = inspect.signature(original).bind(*args, **kwargs)
    bound.apply_defaults()
    inputs, job = bound.arguments, process.job
    config, groups = get_model_config(inputs["model"][0]), inputs["pg_collection"]
    forward_step = prepare_forward_step_func(inputs["forward_step_func"], inputs["global_state"])
    job.live.loop = TrainLoop(forward_step, config, P2PCommunicator(pp_group=groups.pp, config=config), groups)
    begin_or_resume(job, lambda iteration: do_what_is_due(job.live, inputs, iteration))
    if (now := generation()) is not None:
        job.resumed_in = now.roster.generation
        validate_first_iteration()
    return original(*args, **kwargs)


def note_iteration(process: Process, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Note the number of finished iterations before ``train_step``, which Bridge does not pass to it."""
    process.job.live.iteration = process.args.iteration
    return original(*args, **kwargs)


def record_iteration(process: Process, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Write the metrics line of an iteration, before ``training_log``."""
    inputs = inspect.signature(original).bind(*args, **kwargs).arguments
    recorder.write_line(
        process.job,
        process.args.iteration,
        inputs["loss_dict"],
        learning_rate=inputs["learning_rate"],
        loss_scale=inputs["loss_scale"],
        skipped=bool(inputs["skipped_iter"]),
        grad_norm=inputs["grad_norm"],
    )
    return original(*args, **kwargs)


def note_save(process: Process, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Note that a dense save runs, in ``save_checkpoint_and_time``; an interruption leaves the note."""
    live = process.job.live
    injection.at(Phase.SAVE, process.args.iteration)
    live.is_saving = True
    with waiting_for_others():
        result = original(*args, **kwargs)
    live.is_saving = False
    return result


def record_pretrain(process: Process, start: Start, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Note when ``_pretrain`` is entered, and write the summary if it ends by a planned exit."""
    if not process.job.has_begun:
        process.start_over()
    start.started_s = time.monotonic()
    try:
        return original(*args, **kwargs)
    except SystemExit as exit_:
        if exit_.code in (0, None):
            recorder.write_summary(process.job, start.started_s)
        raise


def record_end(process: Process, start: Start, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Write the summary before ``_finish_train``, while process groups still exist. Collective."""
    recorder.write_summary(process.job, start.started_s)
    return original(*args, **kwargs)
