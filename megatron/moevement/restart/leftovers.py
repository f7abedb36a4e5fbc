"""Cleanup of a surviving rank after an exception that interrupted the trainer at an arbitrary point.

The restart raises its exception from outside, between any two bytecodes of the main thread. It can strike after
autograd has accumulated a gradient and before Megatron's hook has run. It can also strike during the exit of a context
manager, which then never restores what it changed. So nothing here relies on a ``finally``. Each function removes one
kind of leftover, and its docstring says what the leftover would damage. Each function may be called repeatedly, and
does nothing if nothing is left.

Other places handle:

- what is rebuilt for every generation (``megatron_state.forget_core``): process groups, the rerun state machine,
  timers, data iterators, the memory buffers of collectives;
- what is restored from a boundary record afterwards (``runtime/boundary.py``): random states, router buffers, loss
  scalers, the learning-rate schedule, consumed samples;
- values that a step writes before it reads them: ``found_inf``, the scales of auxiliary losses, inputs of pipeline
  stages;
- temporary replacements by this package, which ``live.undo`` has reversed before.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from megatron.moevement.fp8 import interrupted
from megatron.moevement.runtime.live import Live
from megatron.moevement.state_digest import layer_wise, members

_CONFIG = ("no_sync_func", "grad_sync_func", "param_sync_func", "finalize_model_grads_func", "grad_scale_func")
"""Fields that ``train`` sets in the model's configuration."""
_INDICES = {"shuffle_index": ("sample_index", "document_index"), "dataset_index": ("dataset_sample_index",)}
"""Index arrays of Megatron's data sets: for each array that Megatron maps first, the arrays that it maps afterwards.

Megatron takes all of them as mapped once the first is mapped.
"""
_SHARED_EXPERTS = ("cached_fc1_input", "cached_fc2_input", "cached_fc2_output", "cached_output", "gate_score")


def config_of(live: Live) -> dict[str, Any]:
    """Return the fields of the model's configuration that ``train`` overwrites; to be called before ``train``."""
    from megatron.core.utils import get_model_config

    config = get_model_config((live.model or [])[0])
    return {name: getattr(config, name) for name in _CONFIG}


def clear_thread() -> None:
    """Reset state of the main thread, right after the interruption and before ranks meet."""
    _finish_context_managers()
    _reset_thread()
    _drop_queued_nodes()
    _reset_random_tracker()
    interrupted.forget_regions()


def clear(live: Live, config: Mapping[str, Any]) -> None:
    """Reset all leftovers in model and data sets except gradients, after :func:`clear_thread`.

    A rank may still need gradients: if it had contributed to every reduction of the interrupted step, and other ranks
    have executed the step, it executes the step as well.

    Args:
        live: Megatron's objects on this rank.
        config: result of :func:`config_of` for the model.
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
    """Clear all gradients and gradient buffers, once no rank executes the interrupted step any more.

    Megatron's hook adds ``param.grad`` to the buffer, and then drops ``param.grad``. A gradient that an interrupted
    hook leaves would be added to the next gradient. ``DistributedOptimizer.zero_grad`` drops only the gradients of this
    rank's shard.
    """
    for chunk in live.model or []:
        for parameter in chunk.parameters():
            _drop_gradient(parameter)
        _reset_reductions(chunk)  # Without a reset, Megatron refuses an incomplete count of the first iteration.
        chunk.zero_grad_buffer()
    for member in members(live.optimizer):
        for group in getattr(getattr(member, "optimizer", None), "param_groups", ()):
            for master in group["params"]:
                _drop_gradient(master)
    if live.optimizer is not None:
        live.optimizer.zero_grad()


def gradients(live: Live) -> list[str]:
    """Return descriptions of all gradients that :func:`clear_gradients` should have cleared but that still exist.

    The function reads every gradient buffer and waits for the device.
    """
    return [*_parameters_with_gradients(live), *_buffers_with_gradients(live)]


def _parameters_with_gradients(live: Live) -> Iterator[str]:
    for chunk in live.model or []:
        for name, parameter in chunk.named_parameters():
            if parameter.grad is not None or getattr(parameter, "decoupled_grad", None) is not None:
                yield f"a gradient of {name}"
            if getattr(parameter, "grad_added_to_main_grad", False):
                yield f"a gradient of {name} that is marked as added"


def _buffers_with_gradients(live: Live) -> Iterator[str]:
    for chunk in live.model or []:
        for number, buffer in enumerate((*chunk.buffers, *chunk.expert_parallel_buffers)):
            if any(bool(grad.count_nonzero()) for grad in (buffer.grad_data, *buffer.extra_main_grads)):
                yield f"gradients in buffer {number}"


def drop_references(live: Live) -> None:
    """Drop references that would keep a model in memory after its last use.

    Garbage collection does not follow autograd's graphs. Modules and their attributes keep tensors of the last forward
    pass. The tensors keep the graph, the graph keeps the gradient accumulators, and the accumulators' hooks keep the
    model.
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


# One function for each kind of leftover


def _finish_context_managers() -> None:
    """Finish the generators of interrupted context managers now.

    A generator whose exit was interrupted executes the rest of the exit when it is collected. A later collection would
    replace the random states of the continued training with old ones.
    """
    gc.collect()


def _reset_thread() -> None:
    """Reset settings that torch keeps for each thread.

    An interrupted context manager does not restore them. Then, for example, torch would not record gradients.
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
"""Graph that is built at import, before any graph that trains, so that its nodes have the lowest sequence numbers.

:func:`_drop_queued_nodes` needs such a graph.
"""


def _drop_queued_nodes() -> None:
    """Drop the nodes that an interrupted backward pass left in the thread's queue, with the graph they keep.

    The engine executes the nodes in the queue in the order of sequence numbers, the highest first, until the current
    pass is complete (torch 2.13, ``torch/csrc/autograd/engine.cpp``). A pass over a new graph would be complete before
    it reached the old nodes. So this function runs a pass over :data:`_FIRST`, a graph with the lowest numbers: the
    engine executes all old nodes before that graph's. The queues of devices need no such pass, because each has its own
    thread that empties it.
    """
    _FIRST.backward(retain_graph=True)


def _reset_random_tracker() -> None:
    """Reset Megatron's random tracker.

    If the exit of the tracker's ``fork`` is interrupted, the name of the forked state stays the current name. The next
    fork would store the default generator's state under that name, and dropout would continue from this state. If a
    block with recomputed activations is interrupted, Megatron's flag for such blocks stays on.
    """
    from megatron.core.tensor_parallel import random

    tracker = random._CUDA_RNG_STATE_TRACKER
    if getattr(tracker, "_current_state_name", "default-rng") != "default-rng":
        tracker._current_state_name = "default-rng"
    random._unset_checkpointing()


def _reset_configuration(live: Live, before: Mapping[str, Any]) -> None:
    """Restore configuration fields that ``train`` requires to be unset, and set this generation's timers.

    An interrupted evaluation leaves the configuration without timers. Every generation has new timers, because an
    interruption may leave the old ones running.
    """
    from megatron.core.utils import get_model_config

    timers = live.host.timers()
    config = get_model_config((live.model or [])[0])
    for name, value in before.items():
        setattr(config, name, value)
    config.timers = timers
    for optimizer in (live.optimizer, *members(live.optimizer)):
        if (config_ := getattr(optimizer, "config", None)) is not None:
            config_.timers = timers


def _reset_indices(live: Live) -> None:
    """Reset data sets that an interruption left with only some of their index files mapped.

    With ``--dataloader-defer-npy-index-mmap``, a data set maps its index files at its first sample. Megatron regards
    all files as mapped once the first is mapped.
    """
    for dataset in _all_datasets(live.datasets):
        for first, others in _INDICES.items():
            if any(getattr(dataset, name, first) is None for name in others):
                setattr(dataset, first, None)


def _all_datasets(datasets: Any) -> Iterator[Any]:
    if isinstance(datasets, list | tuple):
        for dataset in datasets:
            yield from _all_datasets(dataset)
    elif datasets is not None:
        yield datasets
        yield from _all_datasets(getattr(datasets, "datasets", ()))


def _reset_metrics(live: Live) -> None:
    """Drop metrics that the interrupted iteration has summed, and the cache of groups for gradient norms.

    Megatron's next log line would include the sums. Ranks fill the cache by a collective. A replacement has no cache,
    so it would call the collective alone.
    """
    from megatron.core.transformer.experimental_attention_variant.dsa import DSAIndexerLossLoggingHelper
    from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    destroy_moe_metrics_tracker()  # The tracker keeps process groups, but the rank may move to a stage without experts.
    MTPLossLoggingHelper.tracker.clear()
    DSAIndexerLossLoggingHelper.tracker.clear()
    for optimizer in (live.optimizer, *layer_wise(live.optimizer), *members(live.optimizer)):
        optimizer._has_grad_norm_group_cache = None


def _reset_modules(live: Live) -> None:
    """Reset modules that an interruption left in the middle of a pass or an evaluation.

    An interrupted evaluation leaves modules without dropout. Shared experts that overlap with the dispatcher are called
    in five parts, and refuse the first part after an interruption between two parts. FP8 modules still count as
    registered, although their registry no longer exists. Grouped layers may hold their weights as constants.
    """
    from megatron.core.transformer.moe.shared_experts import SharedExpertMLP, SharedExpertState

    for chunk in live.model or []:
        chunk.train()
        for module in chunk.modules():
            module.__dict__.pop("modules_with_is_first_microbatch", None)  # a partial list would be taken as complete
            interrupted.reset_registration(module)
            if (split := getattr(module, "split_weight_gradients", None)) is not None:
                split.reset(module)
            if isinstance(module, SharedExpertMLP) and hasattr(module, "_overlap_state"):
                module._overlap_state = SharedExpertState.IDLE
                for name in _SHARED_EXPERTS:
                    setattr(module, name, None)


def _reset_reductions(chunk: Any) -> None:
    """Reset the state of gradient reductions.

    Otherwise, Megatron would wait for handles of aborted reductions, and would count the gradients of the repeated
    iteration twice. A new process reduces after the backward pass of its first iteration. After the reset, survivors do
    so too. If they overlapped reductions with the backward pass, survivors and replacements would issue the reductions
    on a shared communicator in different orders.
    """
    chunk.force_all_reduce = False
    for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
        group.grad_reduce_handle = None
        group.grad_reduce_finished, group.is_last_microbatch = False, True
        group.golden_per_param_grad_ready_counts, group.is_first_batch = {}, True
        group.per_param_grad_ready_counts = {}


def _reset_gathers(chunk: Any) -> None:
    """Make Megatron gather all parameters again, and reinstall forward hooks that an interruption partly removed.

    Otherwise, Megatron would regard parameters as gathered whose gather was aborted.
    """
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
