"""List of the functions of Megatron's trainer that this project replaces, each with its reason.

The project uses Megatron's extension points where they exist: specs, and arguments of ``pretrain`` and of the
schedules. The functions here have no extension point. ``tests/unit/megatron/test_activate.py`` pins the signature of
each function, and names the function if a new Megatron changes it. Replacements for FP8 (``fp8/install.py``) and for
machines without a GPU (``platform/megatron_cpu.py``) are not in this list.
"""

from __future__ import annotations

import functools
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from megatron.moevement import checkout, platform
from megatron.moevement.patches import Body, around, check_names, replace
from megatron.moevement.runtime.job import Process
from moevement_core.util.extras import is_installed


@dataclass(frozen=True)
class Point:
    """Function of Megatron, with the functions that run in its place."""

    modules: tuple[str, ...]
    """Paths of the modules or classes that have the function as attribute ``name``; the first defines the function."""
    name: str
    reason: str
    bodies: tuple[Body, ...]
    """Functions that run in its place. The first calls the second as its original, and the last calls Megatron's."""


_process = Process()
"""Object that all replaced functions of this process share, because Megatron passes no object of this project."""


def process() -> Process:
    """Return the object that all replaced functions of this process share."""
    return _process


def activate() -> None:
    """Replace the functions of :func:`points`, before a training script imports Megatron.

    A repeated call does nothing.
    """
    platform.install()
    check_names()
    install(points())


def install(listed: Sequence[Point]) -> None:
    """Replace the functions of ``listed``, except those that are replaced already."""
    for point in listed:
        owners = [_resolve(path) for path in point.modules]
        original = getattr(owners[0], point.name)
        if getattr(original, "_moevement_original", None) is not None:
            continue
        replacement = functools.reduce(around, reversed(point.bodies), original)
        replacement._moevement_original = original
        for owner in owners:
            replace(owner, point.name, replacement, point.reason)


def points() -> tuple[Point, ...]:
    """Return all functions to replace, in the order of replacement; the call imports Megatron's trainer."""
    return (
        *_flag_points(), *_model_points(), *_job_points(), *_data_points(), *_optimizer_points(), *_result_points(),
        *_save_points(),
    )  # fmt: skip


_TRAINING = "megatron.training.training"


def _here(body: Body, *context: Any) -> Body:
    """Return ``body`` with this process's shared object as its first argument."""
    return functools.partial(body, _process, *context)


def _arguments() -> Namespace:
    return _process.args


def _flag_points() -> Iterator[Point]:
    """Yield the functions that parse and validate flags, so that errors have one line."""
    from megatron.moevement import arguments, preflight

    yield Point(
        ("megatron.training.arguments",), "parse_args",
        "adds this project's flags, and reports errors in one line", (arguments.parse_args_with_ours,),
    )  # fmt: skip
    yield Point(
        ("megatron.training.argument_utils:ArgumentGroupFactory",), "_get_field_docstrings",
        "Megatron parses the sources of all configuration classes again for each parser; one parse suffices",
        (functools.partial(arguments.remember_field_docstrings, {}),),
    )  # fmt: skip
    yield Point(
        ("megatron.training.arguments",), "validate_args",
        "Megatron's assertions print a traceback on every rank; rank 0 alone reports the error, in one line",
        (preflight.validate_args_after_preflight,),
    )  # fmt: skip
    for name in ("gpt_config_from_args", "pretrain_cfg_container_from_args"):
        yield Point(
            ("megatron.training.argument_utils",), name,
            "if a configuration object refuses a flag, every rank prints a traceback", (preflight.one_line_errors,),
        )  # fmt: skip


def _model_points() -> Iterator[Point]:
    """Yield the functions that build and run parts of the model."""
    from megatron.moevement import rank_order
    from megatron.moevement.pipeline_parallel import communicator
    from megatron.moevement.transformer import attention, capacity, elastic_moe, experts, frozen, norm

    router = ("megatron.core.transformer.moe.moe_utils", "megatron.core.transformer.moe.router")
    yield Point(
        ("megatron.core.transformer.torch_norm:WrappedTorchNorm",), "__new__",
        "this norm refuses sequence parallelism, and the local spec has no other norm",
        (norm.norm_with_sequence_parallel,),
    )  # fmt: skip
    yield Point(
        ("megatron.core.transformer.dot_product_attention:DotProductAttention",), "__init__",
        "local attention does not accept the head widths that multi-latent attention passes",
        (attention.attention_with_channels,),
    )  # fmt: skip
    yield Point(
        router, "router_gating_linear", "Megatron computes the weight gradient even of a frozen router",
        (frozen.gating_without_weight_gradient,),
    )  # fmt: skip
    yield Point(
        router, "apply_router_token_dropping", "Megatron has one capacity for all experts",
        (capacity.dropping_with_room,),
    )  # fmt: skip
    for provider in (
        "megatron.core.models.backends:LocalSpecProvider",
        "megatron.core.extensions.transformer_engine_spec_provider:TESpecProvider",
    ):
        yield Point(
            (provider,), "grouped_mlp_modules",
            "specs name a class of experts, and that class does not support frozen experts",
            (functools.partial(experts.experts_with_kernels, _arguments),),
        )  # fmt: skip
    yield Point(
        ("megatron.core.models.gpt.moe_module_specs",), "MoELayer",
        "Megatron's specs name this layer, whose experts cannot be in slots", (elastic_moe.layer_with_slots,),
    )  # fmt: skip
    yield Point(
        ("megatron.core.pipeline_parallel.p2p_communication:P2PCommunicator",), "_communicate",
        "logs what crosses a stage boundary, and feeds logged tensors to a stage that replays alone",
        (_here(communicator.log_and_feed),),
    )  # fmt: skip
    yield Point(
        ("torch.distributed",), "all_reduce",
        "NCCL adds in an order that depends on the ranks' nodes (--moevement-sums-in-rank-order)",
        (functools.partial(rank_order.sum_in_rank_order, _arguments),),
    )  # fmt: skip


def _job_points() -> Iterator[Point]:
    """Yield the functions that start a job, train, log and evaluate."""
    from megatron.moevement.elastic import replicas
    from megatron.moevement.restart import built, entry, fault_points, in_process, launcher_store
    from megatron.moevement.runtime import audited, evaluation, recorder, token_count, train_step
    from moevement_core.restart.faults import Phase

    yield Point(
        (_TRAINING, "megatron.training"), "pretrain",
        "must use the launcher's store, write the run's summary, and be entered again after a failure",
        (
            _here(in_process.restart_in_process), _here(recorder.record_pretrain),
            launcher_store.meet_in_launcher_store,
        ),
    )  # fmt: skip
    yield Point(
        ("megatron.training.inprocess_restart",), "maybe_force_nccl_backend_init",
        "an abort leaves kernels of subgroups running if the parent group has no communicator yet",
        (launcher_store.force_nccl_init,),
    )  # fmt: skip
    yield Point(
        (_TRAINING,), "setup_model_and_optimizer",
        "Megatron passes model and optimizer to no callback, and survivors reuse theirs after a failure",
        (_here(entry.enter_setup, built.FirstProgress()),),
    )  # fmt: skip
    yield Point(
        (_TRAINING,), "train_step", "records the duration of each step, and takes a snapshot every iteration",
        (_here(recorder.record_train_step), _here(train_step.snapshot_every_iteration)),
    )  # fmt: skip
    yield Point(
        (_TRAINING,), "train", "lost state is replayed here, with arguments that Megatron passes to no callback",
        (_here(entry.enter_loop),),
    )  # fmt: skip
    yield Point(
        (_TRAINING,), "finalize_model_grads",
        "reduces gradients of experts in slots over their replicas, records the batch's token count, and lets an "
        "audit observe gradients",
        (
            _here(token_count.keep_token_count), functools.partial(fault_points.inject_before, Phase.REDUCE),
            audited.note_gradients, replicas.finalize_with_replicas,
        ),
    )  # fmt: skip
    yield Point(
        (_TRAINING,), "training_log", "writes a metrics line for each iteration", (_here(recorder.record_iteration),)
    )
    yield Point(
        (_TRAINING,), "evaluate_and_print_results",
        "notes which data set is evaluated, and restores the random states afterwards",
        (evaluation.leave_generators, _here(recorder.record_evaluation)),
    )  # fmt: skip
    yield Point(
        (_TRAINING,), "evaluate",
        "records held-out losses, and ends an evaluation early if the job is asked to end",
        (_here(recorder.record_evaluated), _here(evaluation.end_when_asked)),
    )  # fmt: skip


def _data_points() -> Iterator[Point]:
    """Yield the functions that build data sets and data loaders."""
    from megatron.moevement.data import loaders

    yield Point(
        ("megatron.core.datasets.utils",), "compile_helpers",
        "Megatron runs a makefile that the wheel does not have, and that may find another Python in a checkout",
        (_compile_unless_compiled,),
    )  # fmt: skip
    yield Point(
        (_TRAINING,), "build_train_valid_test_datasets",
        "keeps the data sets, so that a replay can read batches again", (_here(loaders.retain_datasets),),
    )  # fmt: skip
    yield Point(
        (_TRAINING,), "build_train_valid_test_data_loaders",
        "Megatron replaces zero consumed samples by a guess, but zero may be right",
        (_here(loaders.load_from_known_samples),),
    )  # fmt: skip
    yield Point(
        (_TRAINING,), "build_pretraining_data_loader",
        "opening an iterator must not advance the generator that training draws from",
        (_here(loaders.load_with_own_generator),),
    )  # fmt: skip


def _result_points() -> Iterator[Point]:
    """Yield the functions that handle losses and gradients that are not finite; see ``runtime/results.py``."""
    from megatron.moevement.runtime import results

    machine = ("megatron.core.rerun_state_machine:RerunStateMachine",)
    yield Point(
        machine, "should_run_forward_backward",
        "the second pass overwrites the values that the first pass computed", (_here(results.locate_on_recomputation),),
    )  # fmt: skip
    yield Point(
        machine, "should_checkpoint_and_exit",
        "Megatron ends every rank after a result that is not finite; a spare can replace the rank at fault",
        (_here(results.interrupt_instead_of_exit),),
    )  # fmt: skip
    yield Point(
        machine, "validate_result",
        "without a second pass only one rank raises, and Megatron does not count its failures",
        (_here(results.refuse_without_second_pass),),
    )  # fmt: skip


def _save_points() -> Iterator[Point]:
    """Yield the functions for dense checkpoints: random states, and saves that may fail or be interrupted."""
    from megatron.moevement.restart import saves
    from megatron.moevement.runtime import checkpoint_rng, dense_save, results_queue

    first_alone = "expert-parallel ranks would all resume with the first one's random states"
    yield Point(
        ("megatron.training.checkpointing",), "get_rng_state", first_alone,
        (_here(checkpoint_rng.states_of_every_rank),),
    )  # fmt: skip
    yield Point(
        ("megatron.core.dist_checkpointing",), "load", first_alone, (_here(checkpoint_rng.states_of_this_rank),)
    )
    yield Point(
        (_TRAINING,), "save_checkpoint", "a failed save must not end the job", (_here(dense_save.save_or_report),)
    )
    yield Point(
        (_TRAINING,), "maybe_finalize_async_save", "Megatron raises the error of a failed asynchronous save here",
        (_here(dense_save.finalize_or_report),),
    )  # fmt: skip
    yield Point(
        ("megatron.training.initialize",), "init_persistent_async_worker",
        "an interruption during the start would leave a process that nothing ends", (dense_save.run_uninterrupted,),
    )  # fmt: skip
    for writer in filter(is_installed, saves.WRITERS):
        yield Point(
            (writer,), "get_write_results_queue",
            "the server of the queue imports the training script; if its start is interrupted, nothing ends it",
            (results_queue.queue_with_small_server,),
        )  # fmt: skip


def _optimizer_points() -> Iterator[Point]:
    """Yield the functions that save and load the optimizers' state in dense checkpoints.

    Most replacements are for torch's Adam, which Megatron uses only without Apex and Transformer Engine.
    """
    from megatron.moevement.elastic import masters
    from megatron.moevement.optimizer import chained, torch_adam

    distributed = ("megatron.core.optimizer.distrib_optimizer:DistributedOptimizer",)
    yield Point(
        distributed, "state_dict",
        "Megatron asserts a step count, which torch's Adam lacks before its first step and in an empty shard",
        (torch_adam.save_step_of_empty_shard,),
    )  # fmt: skip
    yield Point(
        distributed, "_set_main_param_and_optimizer_states",
        "Megatron asks for a step count of each tensor; the fully reshardable format keeps one for all",
        (torch_adam.load_without_step,),
    )  # fmt: skip
    yield Point(
        distributed, "load_state_dict",
        "Megatron gives all parameters one step counter; torch's Adam then advances it once for each parameter",
        (torch_adam.load_own_steps,),
    )  # fmt: skip
    yield Point(
        ("megatron.core.optimizer.optimizer:ChainedOptimizer",), "load_state_dict",
        "Megatron cannot load a checkpoint with expert parallelism into a job without it, or the reverse",
        (chained.load_across_expert_parallelism,),
    )  # fmt: skip
    for name in ("Float16OptimizerWithFloat16Params", "FP32Optimizer"):
        owner = (f"megatron.core.optimizer.optimizer:{name}",)
        yield Point(
            owner, "sharded_state_dict",
            "torch's Adam has no moments before its first step; a rank saves only one replica of an expert",
            (masters.save_masters_by_number, torch_adam.save_adam_state),
        )  # fmt: skip
        yield Point(
            owner, "load_state_dict",
            "checkpoints leave out a step count of zero; masters are stored by number if experts have slots",
            (masters.load_masters_in_lists, torch_adam.load_step_zero),
        )  # fmt: skip


def _resolve(path: str) -> Any:
    module, _, attribute = path.partition(":")
    owner = import_module(module)
    return getattr(owner, attribute) if attribute else owner


def _compile_unless_compiled(original: Callable[[], None]) -> None:
    from megatron.core.datasets import utils

    with suppress(ImportError):
        import_module("megatron.core.datasets.helpers_cpp")
        return
    checkout.compile_helpers(Path(utils.__file__).parent)
