"""List of the functions of Megatron-Bridge's trainer that this project replaces, each with its reason.

The functions of Megatron's core are in the list of :mod:`megatron.moevement.activate`, which is installed first.
"""

from __future__ import annotations

import functools
from argparse import Namespace
from collections.abc import Callable, Iterator
from typing import Any

from megatron.moevement import activate, platform
from megatron.moevement.activate import Point, install, process
from megatron.moevement.bridge import entry, training
from megatron.moevement.data import loaders
from megatron.moevement.elastic import replicas
from megatron.moevement.patches import Body
from megatron.moevement.restart import fault_points
from megatron.moevement.restart.built import FirstProgress
from megatron.moevement.runtime import audited, evaluation, recorder, token_count, train_step
from moevement_core.restart.faults import Phase

_TRAINING = "megatron.bridge.training"
_SETUP, _TRAIN, _PRETRAIN = f"{_TRAINING}.setup", f"{_TRAINING}.train", f"{_TRAINING}.pretrain"


def activate_bridge(flags: Namespace) -> None:
    """Replace the functions of :func:`points`, before a script imports Megatron-Bridge.

    Args:
        flags: parsed flags of this project; see :func:`megatron.moevement.bridge.arguments.take_flags`.
    """
    activate.activate()
    install(points(flags))


def points(flags: Namespace) -> tuple[Point, ...]:
    """Return all functions of Bridge to replace; the call imports Bridge's trainer."""
    start = entry.Start(FirstProgress())
    return (*_job_points(flags, start), *_build_points(start), *_loop_points())


def _here(body: Body, *context: Any) -> Body:
    """Return ``body`` with this process's shared object as its first argument."""
    return functools.partial(body, process(), *context)


def _job_points(flags: Namespace, start: entry.Start) -> Iterator[Point]:
    """Yield the functions that start and end a job."""
    yield Point(
        (_PRETRAIN,), "_pretrain", "must be entered again after a failure, and use the launcher's store",
        (_here(training.restart_in_process, flags), _here(entry.record_pretrain, start)),
    )  # fmt: skip
    yield Point(
        (_PRETRAIN,), "_finish_train", "afterwards, the run's summary could not be made, because groups are gone",
        (_here(entry.record_end, start),),
    )  # fmt: skip
    yield Point((_SETUP,), "initialize_megatron", "asserts CUDA unless asked otherwise", (_allow_cpu,))


def _build_points(start: entry.Start) -> Iterator[Point]:
    """Yield the functions that build a rank's objects."""
    yield Point(
        (_SETUP,), "_build_distributed_model", "survivors keep their model, and the ranks meet here",
        (_here(entry.build_model, start),),
    )  # fmt: skip
    yield Point(
        (_SETUP,), "setup_optimizer", "survivors keep their optimizer, and a replacement builds alone",
        (_here(entry.build_optimizer, start),),
    )  # fmt: skip
    yield Point(
        (_SETUP,), "_should_load_checkpoint", "after a failure, state comes from snapshots",
        (functools.partial(entry.load_at_start_only, start),),
    )  # fmt: skip
    yield Point(
        (_SETUP,), "_update_model_config_funcs", "the session needs model, optimizer and a loaded checkpoint",
        (_here(entry.begin_job, start),),
    )  # fmt: skip
    yield Point(
        (_SETUP,), "finalize_model_grads", "records the batch's token count, and lets an audit observe gradients",
        (
            _here(token_count.keep_token_count), functools.partial(fault_points.inject_before, Phase.REDUCE),
            audited.note_gradients, replicas.finalize_with_replicas,
        ),
    )  # fmt: skip
    data = ("megatron.bridge.data.loaders",)
    yield Point(
        data, "build_train_valid_test_datasets", "keeps the data sets, so that a replay can read batches again",
        (_here(loaders.retain_datasets),),
    )  # fmt: skip
    yield Point(
        data, "build_pretraining_data_loader",
        "opening an iterator must not advance the generator that training draws from",
        (_here(loaders.load_with_own_generator),),
    )  # fmt: skip


def _loop_points() -> Iterator[Point]:
    """Yield the functions that train, log and evaluate."""
    yield Point(
        (_TRAIN, _PRETRAIN), "train", "lost state is replayed here, with arguments that no callback receives",
        (_here(entry.enter_loop),),
    )  # fmt: skip
    yield Point(
        (_TRAIN,), "train_step", "records the duration of each step, and takes a snapshot every iteration",
        (
            _here(recorder.record_train_step), _here(entry.note_iteration),
            _here(train_step.snapshot_every_iteration),
        ),
    )  # fmt: skip
    yield Point((_TRAIN,), "training_log", "writes a metrics line for each iteration", (_here(entry.record_iteration),))
    yield Point(
        (_TRAIN,), "save_checkpoint_and_time", "an interrupted save leaves lists in the writers' queues",
        (_here(entry.note_save),),
    )  # fmt: skip
    yield Point(
        (_TRAIN, _PRETRAIN), "evaluate_and_print_results", "restores the random states afterwards",
        (evaluation.leave_generators,),
    )  # fmt: skip


def _allow_cpu(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return original(*args, **{**kwargs, "allow_no_cuda": platform.is_cpu()})
