"""Cleaning up after an exception between any two steps of the trainer, in a rank that keeps its state.

The restart's exception is raised from outside, between any two bytecodes of the main thread: after autograd has
accumulated and before Megatron's hook has run, or on the way out of a context manager, which then never restores what
it changed. So nothing here relies on anybody's ``finally``. Each function takes one kind of leftover away and says what
it would have done; all of them may be called again, and do nothing where nothing is left.

Not here:

- what is rebuilt for every generation (``megatron_state.forget_generation``): process groups, the rerun state
  machine, timers, data iterators, the memory buffers of collectives;
- what is put back from a boundary record afterwards (``runtime/boundary.py``): random states, router buffers, loss
  scalers, the schedule, consumed samples;
- what a step writes before it reads it: ``found_inf``, the scales of auxiliary losses, inputs of pipeline stages;
- what this package itself puts aside for a while: it is in ``live.undo``, which are closed before.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from megatron.moevement.fp8 import interrupted
from megatron.moevement.runtime.live import Live
from megatron.moevement.state_digest import members

_CONFIG = ("no_sync_func", "grad_sync_func", "param_sync_func", "finalize_model_grads_func", "grad_scale_func")
"""Fields that ``train`` puts into the model's configuration."""
_INDICES = {"shuffle_index": ("sample_index", "document_index"), "dataset_index": ("dataset_sample_index",)}
"""Indices of Megatron's data sets: the one that is checked, and those that are mapped after it."""
_SHARED_EXPERTS = ("cached_fc1_input", "cached_fc2_input", "cached_fc2_output", "cached_output", "gate_score")


def config_of(live: Live) -> dict[str, Any]:
    """Return the content of the model's configuration before ``train`` puts its own into it."""
    from megatron.core.utils import get_model_config

    config = get_model_config((live.model or [])[0])
    return {name: getattr(config, name) for name in _CONFIG}


def clear_thread() -> None:
    """Reset state of the thread, not of the model; right after the interruption, before ranks meet."""
    _finish_context_managers()
    _reset_thread()
    _drop_queued_nodes()
    _reset_random_tracker()
    interrupted.forget_regions()


def clear(live: Live, config: Mapping[str, Any]) -> None:
    """Everything of the model but gradients; after :func:`clear_thread`. Gradients may still be needed: a rank that had
    contributed to every reduction of a step follows those that have made it.

    Args:
        live: of this rank.
        config: what :func:`config_of` gave.
    """
    _reset_indices(live)
    if live.model is not None:
        _reset_configuration(live, config)
        _reset_metrics(live)
        _reset_modules(live)
        for chunk in live.model:
            _reset_reductions(chunk)
            _reset_gathers(chunk)


def clear_gradients(live: Live) -> None:
    """Clear all gradients and gradient buffers, when no rank follows a step any more.

    Megatron's hook adds ``param.grad`` to the buffer and drops it; what is there when the hook is interrupted is added
    to the next gradient. ``DistributedOptimizer.zero_grad`` drops those of this rank's shard alone.
    """
    for chunk in live.model or []:
        for parameter in chunk.parameters():
            _drop_gradient(parameter)
        _reset_reductions(chunk)  # else an incomplete count of the first iteration is refused
        chunk.zero_grad_buffer()
    for member in members(live.optimizer):
        for group in getattr(getattr(member, "optimizer", None), "param_groups", ()):
            for master in group["params"]:
                _drop_gradient(master)
    if live.optimizer is not None:
        live.optimizer.zero_grad()


def gradients(live: Live) -> list[str]:
    """Gradients that are there and should not be, in words. Reads every gradient buffer and waits for the device."""
    return [*_parameters_with_gradients(live), *_buffers_with_gradients(live)]


def _parameters_with_gradients(live: Live) -> Iterator[str]:
    for chunk in live.model or []:
        for name, parameter in chunk.named_parameters():
            if parameter.grad is not None or getattr(parameter, "decoupled_grad", None) is not None:
                yield f"a gradient of {name}"
            if getattr(parameter, "grad_added_to_main_grad", False):
                yield f"a gradient of {name} that counts as added"


def _buffers_with_gradients(live: Live) -> Iterator[str]:
    for chunk in live.model or []:
        for number, buffer in enumerate((*chunk.buffers, *chunk.expert_parallel_buffers)):
            if any(bool(grad.count_nonzero()) for grad in (buffer.grad_data, *buffer.extra_main_grads)):
                yield f"gradients in buffer {number}"


def let_go(live: Live) -> None:
    """Release what keeps an unreferenced model in memory.

    A garbage collection does not look into graphs of autograd. Modules, and what they hold, keep tensors of the last
    forward pass, these its graph, that the accumulators of gradients, and their hooks the model.
    """
    for chunk in live.model or []:
        chunk.grad_accs.clear()
        for module in chunk.modules():
            for owner in (module, *vars(module).values()):
                for name, value in list(vars(owner).items()) if hasattr(owner, "__dict__") else ():
                    if isinstance(value, torch.Tensor) and value.grad_fn is not None:
                        setattr(owner, name, None)


def _drop_gradient(parameter: Any) -> None:
    parameter.grad = None
    if getattr(parameter, "decoupled_grad", None) is not None:
        parameter.decoupled_grad = None


# One kind each


def _finish_context_managers() -> None:
    """Generators whose way out was interrupted run the rest of it when they are collected: that is to be now, not when
    it would put old random states over those of the training that goes on.
    """
    gc.collect()


def _reset_thread() -> None:
    """Reset settings that torch keeps for a thread and that context managers change; otherwise gradients might not be
    recorded.
    """
    torch.set_grad_enabled(True)
    for device in ("cuda", "cpu"):
        if torch.is_autocast_enabled(device):
            torch.set_autocast_enabled(device, False)
            torch.autocast_decrement_nesting()
    torch.clear_autocast_cache()
    while torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
        torch._C._autograd._pop_saved_tensors_default_hooks()
    if torch.cuda.is_available():  # not tested on GPUs
        torch.cuda.set_stream(torch.cuda.default_stream())


def _first_graph() -> torch.Tensor:
    with torch.enable_grad():
        return torch.ones((), requires_grad=True) * 1.0


_FIRST = _first_graph()
"""Made when this module is imported, before any graph that trains: its nodes have the lowest numbers."""


def _drop_queued_nodes() -> None:
    """An interrupted backward pass leaves its nodes in the thread's queue, and the graph with all that it has saved.

    The queue is worked off in the order of numbers, the highest first, until the pass is over that is under way (torch
    2.13, ``torch/csrc/autograd/engine.cpp``): a new pass would be over before it came to what is left. One of the
    first graph comes to everything else before. Queues of devices have threads of their own, which wait for more.
    """
    _FIRST.backward(retain_graph=True)


def _reset_random_tracker() -> None:
    """A fork that was interrupted where it ends leaves its name as the current one: the next fork stores the default
    generator's state under it, and dropout goes on from there. A checkpointed block leaves the mark of one.
    """
    from megatron.core.tensor_parallel import random

    tracker = random._CUDA_RNG_STATE_TRACKER
    if getattr(tracker, "_current_state_name", "default-rng") != "default-rng":
        tracker._current_state_name = "default-rng"
    random._unset_checkpointing()


def _reset_configuration(live: Live, before: Mapping[str, Any]) -> None:
    """``train`` asserts that nobody has set what it sets; an evaluation puts the timers aside. Timers are new in each
    generation: the optimizer's would go on with one that was started and not stopped.
    """
    from megatron.core.utils import get_model_config
    from megatron.training import get_timers

    config = get_model_config((live.model or [])[0])
    for name, value in before.items():
        setattr(config, name, value)
    config.timers = get_timers()
    for optimizer in (live.optimizer, *members(live.optimizer)):
        if (its := getattr(optimizer, "config", None)) is not None:
            its.timers = get_timers()


def _reset_indices(live: Live) -> None:
    """Reset half-mapped data sets. With ``--dataloader-defer-npy-index-mmap`` a data set maps its files at its first
    sample, and takes all of them to be there once the first is.
    """
    for one in _all_datasets(live.datasets):
        for first, others in _INDICES.items():
            if any(getattr(one, name, first) is None for name in others):
                setattr(one, first, None)


def _all_datasets(found: Any) -> Iterator[Any]:
    if isinstance(found, list | tuple):
        for one in found:
            yield from _all_datasets(one)
    elif found is not None:
        yield found
        yield from _all_datasets(getattr(found, "datasets", ()))


def _reset_metrics(live: Live) -> None:
    """Sums of half an iteration, which the next line of the log would count; and what ranks ask each other once and
    remember: one that is new would ask alone.
    """
    from megatron.core.transformer.experimental_attention_variant.dsa import DSAIndexerLossLoggingHelper
    from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    destroy_moe_metrics_tracker()  # it keeps groups, too, and a rank may come to a stage that has no experts
    MTPLossLoggingHelper.tracker.clear()
    DSAIndexerLossLoggingHelper.tracker.clear()
    for optimizer in (live.optimizer, *members(live.optimizer)):
        optimizer._has_grad_norm_group_cache = None


def _reset_modules(live: Live) -> None:
    """An interrupted evaluation leaves modules without dropout. Shared experts that overlap with the dispatcher are
    called in five parts, and refuse the first where another one comes next. FP8 modules stand in a registry that is
    gone.
    """
    from megatron.core.transformer.moe.shared_experts import SharedExpertMLP, SharedExpertState

    for chunk in live.model or []:
        chunk.train()
        for module in chunk.modules():
            module.__dict__.pop("modules_with_is_first_microbatch", None)  # half a list would count as all of it
            interrupted.register_again(module)
            if isinstance(module, SharedExpertMLP) and hasattr(module, "_overlap_state"):
                module._overlap_state = SharedExpertState.IDLE
                for name in _SHARED_EXPERTS:
                    setattr(module, name, None)


def _reset_reductions(chunk: Any) -> None:
    """Handles of aborted reductions would be waited for; gradients counted in an iteration that is begun again would
    be counted twice. Every rank begins as a new one does, whose first iteration reduces when backward is over: in
    another order than while it runs, where groups of parameters share communicators.
    """
    chunk.force_all_reduce = False
    for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
        group.grad_reduce_handle = None
        group.grad_reduce_finished, group.is_last_microbatch = False, True
        group.golden_per_param_grad_ready_counts, group.is_first_batch = {}, True
        group.per_param_grad_ready_counts = {}


def _reset_gathers(chunk: Any) -> None:
    """Parameters that count as gathered and are not; hooks that wait for them and were half taken away."""
    for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
        group.param_gather_handle = None
        group.param_gather_dispatched = False
        for bucket in group.buckets:
            bucket.layerwise_gather_list = None
    if chunk.use_forward_hook:
        for handle in chunk.remove_forward_pre_hook_handles.values():
            handle.remove()
        chunk.remove_forward_pre_hook_handles.clear()
        chunk.enable_forward_pre_hook()
