"""List of the functions of Megatron's trainer that this project replaces, each with its reason.

The project uses Megatron's extension points where they exist: specs, and arguments of ``pretrain`` and of the
schedules. The functions here have no extension point. ``tests/unit/megatron/test_activate.py`` pins the signature of
each function, and names the function if a new Megatron changes it. Replacements for FP8 (``fp8/install.py``) and for
machines without a GPU (``platform/megatron_cpu.py``) are not in this list.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from megatron.moevement import platform
from megatron.moevement.patches import check_names, replace
from megatron.moevement.runtime.audited import noting_gradients
from megatron.moevement.runtime.job import Process
from megatron.moevement.runtime.token_count import keep_token_count

Wrapper = Callable[[Callable[..., Any]], Callable[..., Any]]


@dataclass(frozen=True)
class Point:
    """Function of Megatron, with the wrapper that replaces it."""

    modules: tuple[str, ...]
    """Paths of the modules or classes that have the function as attribute ``name``; the first defines the function."""
    name: str
    wrapper: Wrapper
    reason: str


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
    for point in points():
        owners = [_resolve(path) for path in point.modules]
        original = getattr(owners[0], point.name)
        if getattr(original, "_moevement_original", None) is not None:
            continue
        replacement = point.wrapper(original)
        replacement._moevement_original = original  # type: ignore[attr-defined]
        for owner in owners:
            replace(owner, point.name, replacement, point.reason)


def points() -> tuple[Point, ...]:
    """Return all functions to replace, in the order of replacement; the call imports Megatron's trainer."""
    from megatron.moevement import arguments, preflight, rank_order
    from megatron.moevement.data import loaders
    from megatron.moevement.elastic import replicas
    from megatron.moevement.pipeline_parallel import communicator
    from megatron.moevement.restart import entry, fault_points, in_process, launcher_store
    from megatron.moevement.runtime import checkpoint_rng, evaluation, recorder, train_step
    from megatron.moevement.transformer import attention, capacity, elastic_moe, experts, frozen, norm
    from moevement_core.restart.faults import Phase

    training, arguments_ = "megatron.training.training", "megatron.training.arguments"
    return (
        Point(
            (arguments_,),
            "parse_args",
            arguments.parse_args_with_ours,
            "adds this project's flags, and reports errors in one line",
        ),
        Point(
            ("megatron.training.argument_utils:ArgumentGroupFactory",),
            "_get_field_docstrings",
            arguments.remember_field_docstrings,
            "Megatron parses the sources of all configuration classes again for each parser; one parse suffices",
        ),
        Point(
            (arguments_,),
            "validate_args",
            preflight.validate_args_after_preflight,
            "Megatron's assertions print a traceback on every rank; rank 0 alone reports the error, in one line",
        ),
        *(
            Point(
                ("megatron.training.argument_utils",),
                name,
                preflight.one_line_errors,
                "if a configuration object refuses a flag, every rank prints a traceback",
            )
            for name in ("gpt_config_from_args", "pretrain_cfg_container_from_args")
        ),
        Point(
            ("megatron.core.transformer.torch_norm:WrappedTorchNorm",),
            "__new__",
            norm.norm_with_sequence_parallel,
            "this norm refuses sequence parallelism, and the local spec has no other norm",
        ),
        Point(
            ("megatron.core.transformer.dot_product_attention:DotProductAttention",),
            "__init__",
            attention.attention_with_channels,
            "local attention does not accept the head widths that multi-latent attention passes",
        ),
        Point(
            ("megatron.core.transformer.moe.moe_utils", "megatron.core.transformer.moe.router"),
            "router_gating_linear",
            frozen.gating_without_weight_gradient,
            "Megatron computes the weight gradient even of a frozen router",
        ),
        Point(
            ("megatron.core.transformer.moe.moe_utils", "megatron.core.transformer.moe.router"),
            "apply_router_token_dropping",
            capacity.dropping_with_room,
            "Megatron has one capacity for all experts",
        ),
        *(
            Point(
                (provider,),
                "grouped_mlp_modules",
                experts.experts_with_kernels,
                "specs name a class of experts, and that class does not support frozen experts",
            )
            for provider in (
                "megatron.core.models.backends:LocalSpecProvider",
                "megatron.core.extensions.transformer_engine_spec_provider:TESpecProvider",
            )
        ),
        Point(
            ("megatron.core.datasets.utils",),
            "compile_helpers",
            _compile_unless_compiled,
            "Megatron runs a makefile; the wheel has none, but has the compiled helpers",
        ),
        Point(
            (training, "megatron.training"),
            "pretrain",
            lambda pretrain: in_process.restart_in_process(_process)(
                recorder.record_pretrain(_process)(launcher_store.meet_in_launcher_store(pretrain))
            ),
            "must use the launcher's store, write the run's summary, and be entered again after a failure",
        ),
        Point(
            ("megatron.training.inprocess_restart",),
            "maybe_force_nccl_backend_init",
            launcher_store.force_nccl_init,
            "an abort leaves kernels of subgroups running if the parent group has no communicator yet",
        ),
        Point(
            (training,),
            "setup_model_and_optimizer",
            entry.enter_setup(_process),
            "Megatron passes model and optimizer to no callback, and survivors reuse theirs after a failure",
        ),
        Point(
            (training,),
            "train_step",
            lambda original: recorder.record_train_step(_process)(
                train_step.snapshot_every_iteration(_process)(original)
            ),
            "records the duration of each step, and takes a snapshot every iteration",
        ),
        Point(
            (training,),
            "train",
            entry.enter_loop(_process),
            "lost state is replayed here, with arguments that Megatron passes to no callback",
        ),
        Point(
            ("megatron.core.pipeline_parallel.p2p_communication", "megatron.core.pipeline_parallel.schedules"),
            "P2PCommunicator",
            communicator.logging_communicator(_process),
            "logs what crosses a stage boundary, and feeds logged tensors to a stage that replays alone",
        ),
        Point(
            (training,),
            "finalize_model_grads",
            lambda original: keep_token_count(_process)(
                fault_points.around(Phase.REDUCE)(noting_gradients(replicas.reducing_replicas(original)))
            ),
            "reduces gradients of experts in slots over their replicas, records the batch's token count, and lets an "
            "audit observe gradients",
        ),
        Point(
            ("megatron.core.models.gpt.moe_module_specs",),
            "MoELayer",
            elastic_moe.layer_with_slots,
            "Megatron's specs name this layer, whose experts cannot be in slots",
        ),
        Point(
            ("torch.distributed",),
            "all_reduce",
            rank_order.summing_in_rank_order,
            "NCCL adds in an order that depends on the ranks' nodes (--moevement-sums-in-rank-order)",
        ),
        Point(
            (training,), "training_log", recorder.record_iteration(_process), "writes a metrics line for each iteration"
        ),
        Point(
            (training,),
            "evaluate_and_print_results",
            lambda evaluate: evaluation.leaving_generators(recorder.record_evaluation(_process)(evaluate)),
            "notes which data set is evaluated, and restores the random states afterwards",
        ),
        Point(
            (training,),
            "evaluate",
            lambda original: recorder.record_evaluated(_process)(evaluation.ending_when_asked(_process)(original)),
            "records held-out losses, and ends an evaluation early if the job is asked to end",
        ),
        Point(
            (training,),
            "build_train_valid_test_datasets",
            loaders.retain_datasets(_process),
            "keeps the data sets, so that a replay can read batches again",
        ),
        Point(
            (training,),
            "build_train_valid_test_data_loaders",
            loaders.from_known_samples(_process),
            "Megatron replaces zero consumed samples by a guess, but zero may be right",
        ),
        Point(
            (training,),
            "build_pretraining_data_loader",
            loaders.with_own_generator(_process),
            "opening an iterator must not advance the generator that training draws from",
        ),
        *_optimizer_points(),
        *_result_points(),
        Point(
            ("megatron.training.checkpointing",),
            "get_rng_state",
            checkpoint_rng.states_of_every_rank(_process),
            "expert-parallel ranks would all resume with the first one's random states",
        ),
        Point(
            ("megatron.core.dist_checkpointing",),
            "load",
            checkpoint_rng.states_of_this_rank,
            "expert-parallel ranks would all resume with the first one's random states",
        ),
        *_save_points(),
    )


def _result_points() -> tuple[Point, ...]:
    """Return the functions that handle losses and gradients that are not finite; see ``runtime/results.py``."""
    from megatron.moevement.runtime import results

    machine = ("megatron.core.rerun_state_machine:RerunStateMachine",)
    return (
        Point(
            machine,
            "should_run_forward_backward",
            results.locate_on_recomputation(_process),
            "the second pass overwrites the values that the first pass computed",
        ),
        Point(
            machine,
            "should_checkpoint_and_exit",
            results.interrupt_instead_of_exit(_process),
            "Megatron ends every rank after a result that is not finite; a spare can replace the rank at fault",
        ),
        Point(
            machine,
            "validate_result",
            results.refuse_without_second_pass(_process),
            "without a second pass only one rank raises, and Megatron does not count its failures",
        ),
    )


def _save_points() -> tuple[Point, ...]:
    """Return the functions that save dense checkpoints, wrapped so that a failed or interrupted save does no harm."""
    from megatron.moevement.restart import saves
    from megatron.moevement.runtime import dense_save, results_queue

    training = "megatron.training.training"
    return (
        Point(
            (training,),
            "save_checkpoint",
            dense_save.save_or_report(_process),
            "a failed save must not end the job",
        ),
        Point(
            (training,),
            "maybe_finalize_async_save",
            dense_save.finalize_or_report(_process),
            "Megatron raises the error of a failed asynchronous save here",
        ),
        Point(
            ("megatron.training.initialize",),
            "init_persistent_async_worker",
            dense_save.uninterrupted,
            "an interruption during the start would leave a process that nothing ends",
        ),
        *(
            Point(
                (writer,),
                "get_write_results_queue",
                results_queue.with_small_server,
                "the server of the queue imports the training script; if its start is interrupted, nothing ends it",
            )
            for writer in saves.WRITERS
        ),
    )


def _optimizer_points() -> tuple[Point, ...]:
    """Return the functions that save and load the optimizers' state in dense checkpoints.

    Most wrappers are for torch's Adam, which Megatron uses only without Apex and Transformer Engine.
    """
    from megatron.moevement.elastic import masters
    from megatron.moevement.optimizer import chained, torch_adam

    distributed = ("megatron.core.optimizer.distrib_optimizer:DistributedOptimizer",)
    others = tuple(
        (f"megatron.core.optimizer.optimizer:{name}",)
        for name in ("Float16OptimizerWithFloat16Params", "FP32Optimizer")
    )
    return (
        Point(
            distributed,
            "state_dict",
            torch_adam.with_step_of_empty_shard,
            "Megatron asserts a step count, which torch's Adam lacks before its first step and in an empty shard",
        ),
        Point(
            distributed,
            "_set_main_param_and_optimizer_states",
            torch_adam.without_step,
            "Megatron asks for a step count of each tensor; the fully reshardable format keeps one for all",
        ),
        Point(
            distributed,
            "load_state_dict",
            torch_adam.with_own_steps,
            "Megatron gives all parameters one step counter; torch's Adam then advances it once for each parameter",
        ),
        Point(
            ("megatron.core.optimizer.optimizer:ChainedOptimizer",),
            "load_state_dict",
            chained.across_expert_parallelism,
            "Megatron cannot load a checkpoint with expert parallelism into a job without it, or the reverse",
        ),
        *(
            Point(
                owner,
                "sharded_state_dict",
                lambda original: masters.masters_by_number(torch_adam.with_adam_state(original)),
                "torch's Adam has no moments before its first step; a rank saves only one replica of an expert",
            )
            for owner in others
        ),
        *(
            Point(
                owner,
                "load_state_dict",
                lambda original: masters.masters_in_lists(torch_adam.with_step_zero(original)),
                "checkpoints leave out a step count of zero; masters are stored by number if experts have slots",
            )
            for owner in others
        ),
    )


def _resolve(path: str) -> Any:
    module, _, attribute = path.partition(":")
    owner = import_module(module)
    return getattr(owner, attribute) if attribute else owner


def _compile_unless_compiled(original: Callable[[], None]) -> Callable[[], None]:
    @functools.wraps(original)
    def compile_helpers() -> None:
        from megatron.core.datasets import utils

        if Path(utils.__file__).with_name("Makefile").exists():
            original()
        else:
            import_module("megatron.core.datasets.helpers_cpp")

    return compile_helpers
