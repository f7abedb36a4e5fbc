"""List of the functions of Megatron's trainer that this project replaces, each with its reason.

Where Megatron has extension points (specs, arguments of ``pretrain`` and the schedules), the project uses those. The
functions here have none. ``tests/unit/test_activate.py`` pins the signature of each, so that test, and no other, names
a function that a new Megatron moves. Replacements for FP8 (``fp8/install.py``) and for machines without a GPU
(``platform/megatron_cpu.py``) are not in this list.
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
from megatron.moevement.runtime.job import Process
from megatron.moevement.runtime.token_count import keep_token_count

Wrapper = Callable[[Callable[..., Any]], Callable[..., Any]]


@dataclass(frozen=True)
class Point:
    """Function of Megatron, with the wrapper that replaces it."""

    modules: tuple[str, ...]
    """Modules, or classes, whose name for the function is rebound; the first one defines it."""
    name: str
    wrapper: Wrapper
    reason: str


_process = Process()
"""Object that the replaced functions of a process share, because Megatron passes none to them."""


def process() -> Process:
    """Return the object that the replaced functions of this process share."""
    return _process


def activate() -> None:
    """Make this process fault tolerant, before a training script imports Megatron; idempotent."""
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
    """Return all replaced functions, in the order of replacement; the function imports Megatron's trainer."""
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
        Point((arguments_,), "parse_args", arguments.parse_args_with_ours, "our flags, and one-line errors"),
        Point(
            ("megatron.training.argument_utils:ArgumentGroupFactory",),
            "_get_field_docstrings",
            arguments.remember_field_docstrings,
            "parses the sources of all configuration classes whenever a parser is built",
        ),
        Point(
            (arguments_,), "validate_args", preflight.validate_args_after_preflight, "one-line errors, from one rank"
        ),
        *(
            Point(
                ("megatron.training.argument_utils",),
                name,
                preflight.one_line_errors,
                "what configuration objects refuse, every rank prints as a traceback",
            )
            for name in ("gpt_config_from_args", "pretrain_cfg_container_from_args")
        ),
        Point(
            ("megatron.core.transformer.torch_norm:WrappedTorchNorm",),
            "__new__",
            norm.norm_with_sequence_parallel,
            "refuses sequence parallelism, and the local spec has no other norm",
        ),
        Point(
            ("megatron.core.transformer.dot_product_attention:DotProductAttention",),
            "__init__",
            attention.attention_with_channels,
            "does not take the head widths that multi-latent attention names",
        ),
        Point(
            ("megatron.core.transformer.moe.moe_utils", "megatron.core.transformer.moe.router"),
            "router_gating_linear",
            frozen.gating_without_weight_gradient,
            "computes the weight gradient of a frozen router",
        ),
        Point(
            ("megatron.core.transformer.moe.moe_utils", "megatron.core.transformer.moe.router"),
            "apply_router_token_dropping",
            capacity.dropping_with_room,
            "has one capacity for all experts",
        ),
        *(
            Point(
                (provider,),
                "grouped_mlp_modules",
                experts.experts_with_kernels,
                "specs name their experts by class, and the class does not know of frozen ones",
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
            "the wheel has the compiled helpers and no makefile",
        ),
        Point(
            (training, "megatron.training"),
            "pretrain",
            lambda pretrain: in_process.restart_in_process(_process)(
                recorder.record_pretrain(_process)(launcher_store.meet_in_launcher_store(pretrain))
            ),
            "the launcher's store, a run's summary, and to be entered again after a failure",
        ),
        Point(
            ("megatron.training.inprocess_restart",),
            "maybe_force_nccl_backend_init",
            launcher_store.force_nccl_init,
            "communicators that an abort can end have to be there before subgroups are",
        ),
        Point(
            (training,),
            "setup_model_and_optimizer",
            entry.enter_setup(_process),
            "model and optimizer are handed to nobody, and after a failure they are there",
        ),
        Point(
            (training,),
            "train_step",
            lambda original: recorder.record_train_step(_process)(
                train_step.snapshot_every_iteration(_process)(original)
            ),
            "duration of a step; a snapshot every iteration",
        ),
        Point(
            (training,),
            "train",
            entry.enter_loop(_process),
            "lost state is replayed here; what it is replayed with is handed to nobody",
        ),
        Point(
            ("megatron.core.pipeline_parallel.p2p_communication", "megatron.core.pipeline_parallel.schedules"),
            "P2PCommunicator",
            communicator.logging_communicator(_process),
            "schedules make their own; what crosses a stage boundary is logged, and fed to a stage that replays alone",
        ),
        Point(
            (training,),
            "finalize_model_grads",
            lambda original: keep_token_count(_process)(
                fault_points.around(Phase.REDUCE)(replicas.reducing_replicas(original))
            ),
            "gradients of experts in slots are reduced over their replicas; the token count of the batch is recorded",
        ),
        Point(
            ("megatron.core.models.gpt.moe_module_specs",),
            "MoELayer",
            elastic_moe.layer_with_slots,
            "the helper that makes specs names the layer itself, and its experts are not elastic",
        ),
        Point(
            ("torch.distributed",),
            "all_reduce",
            rank_order.summing_in_rank_order,
            "NCCL's order of a sum follows the places of ranks (--moevement-sums-in-rank-order)",
        ),
        Point((training,), "training_log", recorder.record_iteration(_process), "a metrics line for each iteration"),
        Point(
            (training,),
            "evaluate_and_print_results",
            lambda evaluate: evaluation.leaving_generators(recorder.record_evaluation(_process)(evaluate)),
            "which set is evaluated; what an evaluation draws must not move what training draws",
        ),
        Point(
            (training,),
            "evaluate",
            lambda original: recorder.record_evaluated(_process)(evaluation.ending_when_asked(_process)(original)),
            "held-out losses are printed and dropped; a job that is asked to end would evaluate to the end",
        ),
        Point(
            (training,),
            "build_train_valid_test_datasets",
            loaders.retain_datasets(_process),
            "batches can be asked for again",
        ),
        Point(
            (training,),
            "build_train_valid_test_data_loaders",
            loaders.from_known_samples(_process),
            "guesses a number of consumed samples that is zero",
        ),
        Point(
            (training,),
            "build_pretraining_data_loader",
            loaders.with_own_generator(_process),
            "opening an iterator must not move the generator that training draws from",
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
    """Return the functions that handle results that are not finite, in a job that continues after failures."""
    from megatron.moevement.runtime import results

    machine = ("megatron.core.rerun_state_machine:RerunStateMachine",)
    return (
        Point(
            machine,
            "should_run_forward_backward",
            results.locate_on_recomputation(_process),
            "what a first pass computed is gone once the second one runs",
        ),
        Point(
            machine,
            "should_checkpoint_and_exit",
            results.interrupt_instead_of_exit(_process),
            "ends every rank where a result is not finite, and a spare could take the place of one",
        ),
        Point(
            machine,
            "validate_result",
            results.refuse_without_second_pass(_process),
            "without a second pass a rank raises alone, and nobody knows that it does so again",
        ),
    )


def _save_points() -> tuple[Point, ...]:
    """Return the functions that save dense checkpoints while ranks may fail."""
    from megatron.moevement.restart import saves
    from megatron.moevement.runtime import dense_save, results_queue

    training = "megatron.training.training"
    return (
        Point((training,), "save_checkpoint", dense_save.save_or_report(_process), "a failed save ends no job"),
        Point(
            (training,),
            "maybe_finalize_async_save",
            dense_save.finalize_or_report(_process),
            "an asynchronous save shows its failure here",
        ),
        Point(
            ("megatron.training.initialize",),
            "init_persistent_async_worker",
            dense_save.uninterrupted,
            "who is interrupted within it leaves a process that nobody ends",
        ),
        *(
            Point(
                (writer,),
                "get_write_results_queue",
                results_queue.with_small_server,
                "its server imports the training script, and is left behind where its start is interrupted",
            )
            for writer in saves.WRITERS
        ),
    )


def _optimizer_points() -> tuple[Point, ...]:
    """Return the functions for dense checkpoints with torch's Adam.

    Megatron uses it only without Apex and Transformer Engine.
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
            "asserts a step count that torch's Adam has only after its first step, and no empty shard has",
        ),
        Point(
            distributed,
            "_set_main_param_and_optimizer_states",
            torch_adam.without_step,
            "asks for a step count that the fully reshardable format keeps elsewhere",
        ),
        Point(
            distributed,
            "load_state_dict",
            torch_adam.with_own_steps,
            "gives all parameters one step counter, which torch's Adam then counts up once for each",
        ),
        Point(
            ("megatron.core.optimizer.optimizer:ChainedOptimizer",),
            "load_state_dict",
            chained.across_expert_parallelism,
            "cannot load between runs with and without expert parallelism",
        ),
        *(
            Point(
                owner,
                "sharded_state_dict",
                lambda original: masters.masters_by_number(torch_adam.with_adam_state(original)),
                "torch's Adam has no moments before its first step; second replicas of experts are left out of lists",
            )
            for owner in others
        ),
        *(
            Point(
                owner,
                "load_state_dict",
                lambda original: masters.masters_in_lists(torch_adam.with_step_zero(original)),
                "a step count of zero is left out of checkpoints; masters are by number where experts have slots",
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
