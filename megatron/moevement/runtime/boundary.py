"""Boundary state (the state between two iterations other than model and optimizer), and its restoration."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from megatron.moevement.optimizer.outcome import put_step_counts, step_counts
from megatron.moevement.optimizer.scales import Scales
from megatron.moevement.runtime.live import Live
from megatron.moevement.state_digest import loss_scaler, members, named_tensors, progress, random_states
from moevement_core.errors import RecoveryError


def boundary_state(live: Live) -> dict[str, Any]:
    """Return the boundary state as plain data and live tensors.

    It has random states, router buffers, FP8 scales, loss scalers, the learning-rate schedule, step counts, the
    iteration and consumed samples. The caller has to copy the tensors before the next iteration begins, because a
    forward pass changes buffers and scales.
    """
    return {
        "rng": _compact(random_states()),
        "router_buffers": _router_buffers(live),
        **Scales(live.model or []).state(),
        "loss_scalers": [loss_scaler(member) for member in members(live.optimizer)],
        "scheduler": live.scheduler.state_dict() if live.scheduler is not None else None,
        "group_steps": step_counts(live.optimizer),
        "progress": progress(live),
    }


def boundary_copy(live: Live) -> dict[str, Any]:
    """Return the boundary state with copies of its tensors."""
    state = boundary_state(live)
    state["router_buffers"] = [
        {name: tensor.clone() for name, tensor in chunk.items()} for chunk in state["router_buffers"]
    ]
    return {**state, **Scales(live.model or []).copies()}


def boundary_after(live: Live) -> dict[str, Any]:
    """Return the boundary state that the rank will have after the current iteration, as far as it can be predicted.

    The caller asks right before the iteration's optimizer step. Iteration and consumed samples already have their
    values from after the step. Loss scalers, step counts and the learning-rate schedule still have their values from
    before the step, because the step itself changes them.
    """
    from megatron.core import parallel_state
    from megatron.core.num_microbatches_calculator import (
        get_current_global_batch_size,
        get_current_running_global_batch_size,
        get_num_microbatches,
    )

    state = boundary_copy(live)
    samples = parallel_state.get_data_parallel_world_size() * live.args.micro_batch_size * get_num_microbatches()
    left_out = get_current_global_batch_size() - get_current_running_global_batch_size()
    done = state["progress"]
    state["progress"] = {
        **done,
        "iteration": done["iteration"] + 1,
        "consumed_train_samples": done["consumed_train_samples"] + samples,
        "skipped_train_samples": done["skipped_train_samples"] + left_out,
    }
    state["samples"] = samples
    return state


def advanced(boundary: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of the learning-rate schedule after the step, from the result of :func:`boundary_after`."""
    schedule = dict(boundary["scheduler"])
    schedule["num_steps"] += boundary["samples"]
    return schedule


def put_boundary_state(live: Live, boundary: Mapping[str, Any]) -> None:
    """Restore the result of :func:`boundary_state` on this rank.

    Random states are restored last, because restoring the rest may draw random numbers. Each optimizer in a chained
    optimizer gets the saved state of its own loss scaler, because the scalers may have different states.

    Raises:
        RecoveryError: the boundary state is from a job with another model.
    """
    _put_buffers(_router_buffers(live), boundary["router_buffers"])
    Scales(live.model or []).put(boundary)
    for member, state in zip(members(live.optimizer), boundary["loss_scalers"], strict=True):
        if state:
            copied = {name: value.clone() if torch.is_tensor(value) else value for name, value in state.items()}
            member.grad_scaler.load_state_dict(copied)
    if live.scheduler is not None:
        put_schedule(live.scheduler, boundary["scheduler"])
    put_step_counts(live.optimizer, boundary["group_steps"])
    put_progress(live, boundary["progress"])
    put_random_states(boundary["rng"])


def put_progress(live: Live, state: Mapping[str, int]) -> None:
    """Restore the iteration and the consumed samples, as :func:`megatron.moevement.state_digest.progress` gave them."""
    live.samples_are_known = True
    for name, value in state.items():
        if name == "iteration":
            live.iteration = value
        else:
            setattr(live.args, name, value)


def put_random_states(states: Mapping[str, Any]) -> None:
    """Restore the states of all random generators, as :func:`boundary_state` gave them."""
    from megatron.core import tensor_parallel

    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(int(number) for number in numbers), gauss))
    np.random.set_state(tuple(states["numpy"]))
    torch.cuda.set_rng_state(states["device"].clone())
    torch.set_rng_state(states["torch"].clone())
    tracker = tensor_parallel.get_cuda_rng_tracker()
    live = tracker.get_states()
    for name, state in states["tracker"].items():
        if isinstance(live.get(name), torch.Generator):
            live[name].set_state(state.clone())
        else:
            live[name] = state.clone()
    tracker.set_states(live)


def _router_buffers(live: Live) -> list[dict[str, Any]]:
    return named_tensors(live, "named_buffers", lambda name: ".router." in name)


def _put_buffers(live: list[dict[str, Any]], saved: list[dict[str, Any]]) -> None:
    if [list(chunk) for chunk in live] != [list(chunk) for chunk in saved]:
        raise RecoveryError(
            "the saved buffers of the routers do not fit this model; use the flags of the job that saved them"
        )
    for chunk, saved_chunk in zip(live, saved, strict=True):
        for name, tensor in chunk.items():
            tensor.copy_(saved_chunk[name])


def put_schedule(scheduler: Any, state: Mapping[str, Any]) -> None:
    """Restore the learning-rate schedule from a ``state_dict`` of Megatron's scheduler, or from some entries of it.

    Megatron's ``load_state_dict`` refuses saved settings that differ from the present ones. This function accepts them,
    because a job may train for longer than first planned.
    """
    for name, value in state.items():
        setattr(scheduler, name, value)
    scheduler.step(increment=0)  # This sets the learning rate and weight decay of every group.


def _compact(states: dict[str, Any]) -> dict[str, Any]:
    """Return the random states, with the state of Python's generator as an array.

    This state has 625 numbers. As single numbers, they would take longer to save than the rest of the boundary state.
    """
    version, numbers, gauss = states["python"]
    return {**states, "python": [version, np.array(numbers, dtype=np.uint32), gauss]}
